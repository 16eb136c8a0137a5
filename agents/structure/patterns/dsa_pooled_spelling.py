"""Sparse latent attention over pools of keys, spelled as its family spells it and once by independent formulas.

    p_m = Σ_r softmax_r(g x_{Pm+r} + a_r) ⊙ norm(W_k x_{Pm+r}),  P tokens of a pool, r = 0 … P − 1
    I[t, m] = Σ_j w_j ReLU(qᴵ_j · p_m)
    chosen = the K / P pools with the largest I among those that end by t, and the begun pool that t is in
    o = softmax over the chosen of (q · k) · scale, times v;  nothing is rotated

Legend: B rows, S tokens, H heads, N, V widths of key and value, C latent width, J indexer heads, D indexer width,
P tokens of a pool, K tokens of the chosen pools, W = K + P − 1 places of the choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.agents.structure.patterns.base import Tensors

Constants = dict[str, Any]
INDEXER = (
    "index_q_weight",
    "index_k_weight",
    "index_norm_weight",
    "index_norm_bias",
    "index_weights_weight",
    "pool_position",
    "pool_gate",
)
"""In the order of the leaf's parameters."""
NORM_EPS = 1e-6


def spell(values: Tensors, c: Constants) -> Tensors:
    """The region as transformers writes it."""
    q, latent, k_rot, weight = (values[role] for role in ("q", "latent", "k_rot", "kv_b_weight"))
    (B, S, _), N, V = q.shape, c["nope"], c["value"]
    query = q.view(B, S, -1, N).transpose(1, 2)
    both = F.linear(latent.view(B, 1, S, -1), weight).view(B, S, -1, N + V).transpose(1, 2)
    k_pass, value = torch.split(both, [N, V], dim=-1)
    key = both.new_empty(*both.shape[:-1], N)
    key[..., :N].copy_(k_pass)
    key[..., N:].copy_(k_rot.view(B, 1, S, 0).expand(-1, k_pass.shape[1], -1, -1))
    selected = values["selected"] if "selected" in values else _leaf(values, c)
    valid = selected.ge(0) & selected.lt(S)
    counts = torch.zeros(B, selected.shape[1], S, dtype=torch.int32, device=selected.device)
    counts.scatter_add_(-1, selected.clamp(0, S - 1), valid.to(torch.int32))
    mask = counts.ne(0).unsqueeze(1)
    o = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=c["scale"])
    made = {"o": o.transpose(1, 2).reshape(B, S, -1)}
    return made if "selected" in values else {**made, "indices": selected}


def _leaf(values: Tensors, c: Constants) -> Tensor:
    given = [values[role] for role in INDEXER]
    numbers = (c["index_heads"], c["k"], c["pool"], c["tail"])
    chosen: Tensor = torch.ops.shardwright_capture.pooled_choice(
        values["hidden"], values["q_latent"], values["valid"], given, c["rule"], *numbers
    )
    return chosen


def formula(values: Tensors, c: Constants) -> Tensors:
    """The region by independent formulas: keys stay latents, the choice as ``chosen [B, S, S]``; all tokens valid."""
    N, V, latent = c["nope"], c["value"], values["latent"]
    rows = values["kv_b_weight"].unflatten(0, (-1, N + V))
    absorbed = torch.einsum("bthn,hnc->bthc", values["q"].unflatten(-1, (-1, N)), rows[:, :N])
    scores = torch.einsum("bthc,bsc->bhts", absorbed, latent) * c["scale"]
    chosen = members(values["selected"], latent.shape[1]) if "selected" in values else choice_formula(values, c)
    weights = scores.masked_fill(~chosen.unsqueeze(1), float("-inf")).softmax(-1)
    mixed = torch.einsum("bhts,bsc->bthc", weights, latent)
    made = {"o": torch.einsum("bthc,hvc->bthv", mixed, rows[:, N:]).flatten(-2)}
    return made if "selected" in values else {**made, "chosen": chosen.double()}


def pooled_keys(values: Tensors, c: Constants) -> Tensor:
    """``[B, S // P, D]``: the weighted mean of each whole pool's keys."""
    x, P = values["hidden"], c["pool"]
    raw = torch.einsum("bsh,dh->bsd", x, values["index_k_weight"])
    centred = raw - raw.mean(-1, keepdim=True)
    keys = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + NORM_EPS)
    keys = keys * values["index_norm_weight"] + values["index_norm_bias"]
    gates = torch.einsum("bsh,dh->bsd", x, values["pool_gate"])
    whole = x.shape[1] // P
    keys, gates = (part[:, : whole * P].unflatten(1, (whole, P)) for part in (keys, gates))
    shares = torch.exp(gates + values["pool_position"])
    return (shares * keys).sum(2) / shares.sum(2)


def index_parts(values: Tensors, c: Constants) -> tuple[Tensor, Tensor]:
    """q ``[B, S, J, D]`` and weights ``[B, S, J]`` of the indexer, not scaled."""
    q = torch.einsum("bsl,nl->bsn", values["q_latent"], values["index_q_weight"]).unflatten(-1, (c["index_heads"], -1))
    return q, torch.einsum("bsh,jh->bsj", values["hidden"], values["index_weights_weight"])


def choice_formula(values: Tensors, c: Constants) -> Tensor:
    """Tokens of the best whole pools that end no later than the query, and of the pool that it is in."""
    P, S = c["pool"], values["hidden"].shape[1]
    (q, weights), pools = index_parts(values, c), pooled_keys(values, c)
    scores = torch.einsum("bsjd,bmd->bsjm", q, pools).clamp_min(0)
    total = torch.einsum("bsj,bsjm->bsm", weights, scores) * c["index_scale"]
    whole = (torch.arange(S) + 1) // P
    seen = torch.arange(pools.shape[1]) < whole[:, None]
    best = total.masked_fill(~seen, float("-inf"))
    count = min(c["k"] // P, pools.shape[1])
    if count:
        edge = best.sort(-1, descending=True).values[..., count - 1 : count]
        kept = (seen & (best >= edge)).repeat_interleave(P, -1)
    else:
        kept = torch.zeros(*total.shape[:2], 0, dtype=torch.bool)
    kept = F.pad(kept, (0, S - kept.shape[-1]))
    keys = torch.arange(S)
    begun = (keys >= (whole * P)[:, None]) & (keys <= torch.arange(S)[:, None])
    return kept | begun if c["tail"] else kept


def members(indices: Tensor, S: int) -> Tensor:
    """``[B, S, S]`` of indices ``[B, S, W]``, of which -1 is nothing."""
    found = torch.zeros((*indices.shape[:2], S + 1), dtype=torch.bool)
    return found.scatter(-1, torch.where(indices < 0, S, indices).long(), True)[..., :S]
