"""Sparse latent attention (DSA), spelled as the families spell it and once by independent formulas.

    q' = rope(q),  k' = rope(k_rot),  [k_h, v_h] = W_kv c
    I[t, s] = Σ_j w_j ReLU(qᴵ_j · kᴵ_s),  selected = the K largest of I among visible keys
    o = softmax over the selected of (q · k) · scale, times v;  with a sink in the sum, and a gate σ(g) over o

The formulas read the latent itself (absorbed queries), rotate by complex numbers and select by the K-th largest score.
Legend: B batch, S tokens, H heads, N, R, V widths of plain key, rotated key and value, C latent width, J indexer heads,
D indexer width, K selected keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.agents.structure.patterns.base import Tensors

Constants = dict[str, Any]
INDEXER = ("index_q", "index_k", "index_weights")


def spell(values: Tensors, c: Constants) -> Tensors:
    """The region as transformers writes it."""
    q, latent, k_rot, weight = (values[role] for role in ("q", "latent", "k_rot", "kv_b_weight"))
    (B, S, _), N, R, V = q.shape, c["nope"], c["rope"], c["value"]
    heads = q.view(B, S, -1, N + R).transpose(1, 2)
    q_pass, q_rot = torch.split(heads, [N, R], dim=-1)
    cos, sin = tables(values, c["layout"], 1)
    k_rot = k_rot.view(B, 1, S, R)
    q_rot, k_rot = turn(q_rot, cos, sin, c["layout"]), turn(k_rot, cos, sin, c["layout"])
    query = torch.cat((q_pass, q_rot), dim=-1)
    kv = F.linear(latent.view(B, 1, S, -1), weight).view(B, S, -1, N + V).transpose(1, 2)
    k_pass, value = torch.split(kv, [N, V], dim=-1)
    k_rot = k_rot.expand(-1, k_pass.shape[1], -1, -1)
    key = kv.new_empty(*kv.shape[:-1], N + R)
    key[..., :N].copy_(k_pass)
    key[..., N:].copy_(k_rot)
    selected = values["selected"] if "selected" in values else spell_choice(values, c)
    left_out = selected.new_ones((B, S, S), dtype=torch.bool).scatter(-1, selected.long(), False).unsqueeze(1)
    mask = values["mask"]
    if mask.dtype == torch.bool:
        mask = mask & ~left_out
    else:
        mask = mask.masked_fill(left_out, c["least"])
    if "sinks" in values:
        o = _with_sinks(query, key, value, mask, values["sinks"], c["scale"])
    else:
        o = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=c["scale"])
    o = o.transpose(1, 2)
    if "gate" in values:
        o = o * torch.sigmoid(values["gate"].view(B, S, -1, V))
    made = {"o": o.reshape(B, S, -1)}
    return made if "selected" in values else {**made, "indices": selected}


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """A softmax in which each head's sink takes part, and is left out of the sum over values."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scale + mask
    column = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
    joined = torch.cat([scores, column], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    shares = F.softmax(joined, dim=-1, dtype=joined.dtype)
    return torch.matmul(shares[..., :-1].to(value.dtype), value)


def spell_choice(values: Tensors, c: Constants) -> Tensor:
    """``[B, S, K]`` int32."""
    R, D, layout = c["rope"], c["index_width"], c["index_layout"]
    B, S, _ = values["index_q"].shape
    q = values["index_q"].view(B, S, -1, D)
    k = values["index_k"].unsqueeze(2)
    sizes = [R, D - R] if c["index_first"] else [D - R, R]
    rotated = 0 if c["index_first"] else 1
    cos, sin = tables(values, layout, 2)
    turned = []
    for x in (q, k):
        parts = list(torch.split(x, sizes, dim=-1))
        parts[rotated] = turn(parts[rotated], cos, sin, layout)
        turned.append(torch.cat(parts, dim=-1))
    q, k = turned[0], turned[1].squeeze(2)
    scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
    if c["score_factor"] != 1.0:
        scores = scores * c["score_factor"]
    weights = values["index_weights"].float()
    for factor in c["weight_factors"]:
        weights = weights * factor
    total = torch.matmul(weights.unsqueeze(-2), F.relu(scores)).squeeze(-2)
    mask = values["mask"][:, 0, :, :]
    total = total.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else total + mask
    return total.topk(c["k"], dim=-1).indices.to(torch.int32)


def tables(values: Tensors, layout: str, dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin with a dimension for the heads; of half the width where pairs are neighbours."""
    cos, sin = values["cos"], values["sin"]
    if layout == "interleaved":
        cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
    return cos.unsqueeze(dim), sin.unsqueeze(dim)


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotated x; of neighbours, first parts before second parts."""
    if layout == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def visible(mask: Tensor) -> Tensor:
    """``[B, 1, S, S]`` → which keys a query may see, ``[B, S, S]``."""
    return (mask if mask.dtype == torch.bool else mask == 0)[:, 0]


def formula(values: Tensors, c: Constants) -> Tensors:
    """The region by independent formulas; the choice as ``chosen [B, S, S]``."""
    N, R, V = c["nope"], c["rope"], c["value"]
    S = values["q"].shape[1]
    latent, seen = values["latent"], visible(values["mask"])
    rows = values["kv_b_weight"].unflatten(0, (-1, N + V))
    q = values["q"].unflatten(-1, (-1, N + R))
    absorbed = torch.einsum("bthn,hnc->bthc", q[..., :N], rows[:, :N])
    q_turned = _complex(q[..., N:], values, c["layout"])
    k_turned = _complex(values["k_rot"].unsqueeze(2), values, c["layout"]).squeeze(2)
    scores = torch.einsum("bthc,bsc->bhts", absorbed, latent)
    scores = (scores + torch.einsum("bthr,bsr->bhts", q_turned, k_turned)) * c["scale"]
    if "selected" in values:
        chosen = _members(values["selected"], S) & seen
    else:
        chosen = choice_formula(values, c, seen)
    allowed = chosen.unsqueeze(1)
    top = scores.detach().masked_fill(~allowed, float("-inf")).amax(-1, keepdim=True)
    mass = torch.where(allowed, torch.exp(scores - top), 0.0)
    total = mass.sum(-1, keepdim=True)
    if "sinks" in values:
        total = total + torch.exp(values["sinks"].view(1, -1, 1, 1) - top)
    mixed = torch.einsum("bhts,bsc->bthc", mass / total, latent)
    o = torch.einsum("bthc,hvc->bthv", mixed, rows[:, N:])
    if "gate" in values:
        o = o * (1 + torch.tanh(values["gate"].view(o.shape) / 2)) / 2
    made = {"o": o.flatten(-2)}
    return made if "selected" in values else {**made, "chosen": chosen.double()}


def choice_formula(values: Tensors, c: Constants, seen: Tensor) -> Tensor:
    """Visible keys whose score is no smaller than the K-th largest visible one."""
    R, D = c["rope"], c["index_width"]
    q, k = values["index_q"].unflatten(-1, (-1, D)), values["index_k"].unsqueeze(2)
    at = slice(0, R) if c["index_first"] else slice(D - R, D)
    rest = slice(R, D) if c["index_first"] else slice(0, D - R)
    q_turned, k_turned = (_complex(x[..., at], values, c["index_layout"]) for x in (q, k))
    dots = torch.einsum("btjr,bsr->btjs", q_turned, k_turned[:, :, 0])
    dots = dots + torch.einsum("btjd,bsd->btjs", q[..., rest], k[:, :, 0, rest])
    factor = c["score_factor"]
    for more in c["weight_factors"]:
        factor = factor * more
    total = factor * torch.einsum("btjs,btj->bts", dots.clamp_min(0), values["index_weights"])
    ranked = total.masked_fill(~seen, float("-inf")).sort(-1, descending=True).values
    edge = ranked[..., min(c["k"], total.shape[-1]) - 1 : min(c["k"], total.shape[-1])]
    return seen & (total >= edge)


def _complex(x: Tensor, values: Tensors, layout: str) -> Tensor:
    """``x [B, S, heads, R]``, each pair as one complex number turned by its angle; pairs side by side."""
    half = x.shape[-1] // 2
    angle = torch.complex(values["cos"][..., :half], values["sin"][..., :half]).unsqueeze(2)
    if layout == "interleaved":
        pair = torch.complex(x[..., 0::2], x[..., 1::2])
    else:
        pair = torch.complex(x[..., :half], x[..., half:])
    return torch.view_as_real(pair * angle).flatten(-2)


def _members(indices: Tensor, S: int) -> Tensor:
    found = torch.zeros((*indices.shape[:2], S), dtype=torch.bool)
    return found.scatter(-1, indices.long(), True)
