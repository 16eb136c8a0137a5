"""Gated latent attention without rotation, spelled as its model spells it and once by independent formulas.

    [k_h, v_h] = W_kv c;  o = softmax of ([q, q'] · [k, k']) · scale, times v;  y = o σ(g)
    sparse: over the K keys of largest I[t, s] = Σ_j w_j ReLU(qᴵ_j · kᴵ_s) among those that t sees

Legend: B rows, S tokens, H heads, N, R, V widths of plain key, key part that all heads share, and value, C latent
width, J indexer heads, D indexer width, K selected keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.agents.structure.patterns.base import Tensors

Constants = dict[str, Any]
INDEXER = ("index_q", "index_k", "index_weights")


def wide(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def spell(values: Tensors, c: Constants) -> Tensors:
    """The region as the model writes it."""
    q, latent, k_rot, weight = (values[role] for role in ("q", "latent", "k_rot", "kv_b_weight"))
    B, S, _ = q.shape
    heads = q.view(B, S, c["heads"], -1).transpose(1, 2)
    both = F.linear(latent, weight).view(B, S, c["heads"], -1).transpose(1, 2)
    nope, v = both.split([c["nope"], c["value"]], dim=-1)
    k = torch.cat([nope, k_rot.unsqueeze(1).expand(-1, c["heads"], -1, -1)], dim=-1)
    mask = values.get("mask")
    if c["form"] == "own":
        mask = spell_choice(values, c)
    options = {} if c["default_scale"] else {"scale": c["scale"]}
    o = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, is_causal=mask is None, **options)
    gate = torch.sigmoid(wide(values["gate"])).to(q.dtype)
    return {"o": o.transpose(1, 2).reshape(B, S, -1) * gate}


def spell_choice(values: Tensors, c: Constants) -> Tensor:
    """``[B, 1, S, S]``: which keys a query attends to."""
    B, S, _ = values["q"].shape
    if "mask" in values:
        seen = values["mask"][:, 0]
    else:
        seen = torch.ones(S, S, dtype=torch.bool, device=values["q"].device).tril().expand(B, S, S)
    q = wide(values["index_q"]).view(B, S, c["index_heads"], c["index_width"]) * c["score_factor"]
    k, weights = wide(values["index_k"]), wide(values["index_weights"]) * c["weight_factor"]
    scores = torch.zeros(B, S, S, dtype=k.dtype, device=k.device)
    for head in range(c["index_heads"]):
        scores = scores + weights[..., head, None] * F.relu(q[:, :, head] @ k.transpose(1, 2))
    best = torch.topk(scores.masked_fill(~seen, float("-inf")), c["k"], dim=-1).indices
    return (torch.zeros_like(seen).scatter(-1, best, True) & seen).unsqueeze(1)


def seen_by(values: Tensors) -> Tensor:
    """``[B, S, S]``: which keys a query may see."""
    B, S, _ = values["q"].shape
    at = torch.arange(S)
    return values["mask"][:, 0] if "mask" in values else (at <= at[:, None]).expand(B, S, S)


def formula(values: Tensors, c: Constants) -> Tensors:
    """The region by independent formulas: keys stay latents."""
    N, V, latent = c["nope"], c["value"], values["latent"]
    rows = values["kv_b_weight"].unflatten(0, (c["heads"], N + V))
    q = values["q"].unflatten(-1, (c["heads"], -1))
    scores = torch.einsum("bthn,hnc,bsc->bhts", q[..., :N], rows[:, :N], latent)
    scores = (scores + torch.einsum("bthr,bsr->bhts", q[..., N:], values["k_rot"])) * c["scale"]
    seen = seen_by(values)
    if c["form"] == "own":
        seen = choice_formula(values, c, seen)
    shares = torch.where(seen.unsqueeze(1), torch.exp(scores - scores.detach().amax(-1, keepdim=True)), 0.0)
    mixed = torch.einsum("bhts,bsc->bthc", shares / shares.sum(-1, keepdim=True), latent)
    o = torch.einsum("bthc,hvc->bthv", mixed, rows[:, N:]).flatten(-2)
    return {"o": o * (1 + torch.tanh(values["gate"] / 2)) / 2}


def choice_formula(values: Tensors, c: Constants, seen: Tensor) -> Tensor:
    """Visible keys whose score is no smaller than the K-th largest visible one."""
    q = values["index_q"].unflatten(-1, (c["index_heads"], -1))
    dots = torch.einsum("btjd,bsd->btjs", q, values["index_k"]).clamp_min(0)
    total = c["index_scale"] * torch.einsum("btjs,btj->bts", dots, values["index_weights"])
    ranked = total.masked_fill(~seen, float("-inf")).sort(-1, descending=True).values
    count = min(c["k"], total.shape[-1])
    return seen & (total >= ranked[..., count - 1 : count])
