"""Sparse latent attention by the plain references of our kernels: rows flattened into one packed sequence.

Legend: B batch, S tokens, T = B · S, N, R, V widths of plain key, rotated key and value, D indexer width, P tokens of a
pool.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.agents.structure.patterns.base import Tensors
from shardwright.agents.structure.patterns.dsa_pooled_spelling import index_parts, members, pooled_keys
from shardwright.agents.structure.patterns.dsa_spelling import visible
from shardwright.agents.structure.patterns.mla_gated_spelling import seen_by


def by_kernels(values: Tensors, c: dict[str, Any]) -> Tensors:
    """The same by the plain references of our kernels, rows flattened into one packed sequence."""
    from shardwright.kernels.dsa.indexer.reference import rotate_reference, scores_reference, select_reference
    from shardwright.kernels.dsa.reference import latent_attention_reference
    from shardwright.kernels.dsa.up_projection import UpProjection

    B, S, _ = values["q"].shape
    N, R, V = c["nope"], c["rope"], c["value"]
    cos, sin = (values[name][..., : R // 2].expand(B, -1, -1).reshape(B * S, R // 2) for name in ("cos", "sin"))
    seen = visible(values["mask"])
    packed = torch.block_diag(*seen.double()).bool()
    first = packed.double().argmax(-1)
    bounds = torch.stack([first, torch.arange(1, B * S + 1)], -1)
    q = values["q"].reshape(B * S, -1, N + R)
    q_rope = rotate_reference(q[..., N:], cos, sin, c["layout"])
    k_rope = rotate_reference(values["k_rot"].reshape(B * S, R), cos, sin, c["layout"])
    starts = (torch.arange(B * S) // S * S)[:, None]
    if "selected" in values:
        indices = values["selected"].reshape(B * S, -1).long() + starts
    else:
        D = c["index_width"]
        parts = [values["index_q"].reshape(B * S, -1, D), values["index_k"].reshape(B * S, D)]
        parts = [rotate_reference(_rotated_first(x, c), cos, sin, c["index_layout"]) for x in parts]
        weights = values["index_weights"].reshape(B * S, -1)
        scores = scores_reference(parts[0], parts[1], weights, c["index_scale"])
        indices = select_reference(scores, packed, c["k"]).long()
    up = UpProjection(values["kv_b_weight"], q.shape[1], N, V)
    gate = values["gate"].reshape(B * S, -1, V) if "gate" in values else None
    latent = values["latent"].reshape(B * S, -1)
    o = latent_attention_reference(
        q[..., :N], q_rope, latent, k_rope, up, indices, gate, values.get("sinks"), scale=c["scale"], bounds=bounds
    )
    made = {"o": o.reshape(B, S, -1)}
    if "selected" in values:
        return made
    chosen = torch.zeros(B * S, B * S + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(indices < 0, B * S, indices), True)
    rows = chosen[:, : B * S].reshape(B, S, B, S)
    return {**made, "chosen": torch.stack([rows[b, :, b] for b in range(B)]).double()}


def by_kernels_pooled(values: Tensors, c: dict[str, Any]) -> Tensors:
    """Pools of keys scored by the indexer's reference, their tokens attended to by the attention's, row by row."""
    from shardwright.kernels.dsa.indexer.reference import scores_reference, select_reference
    from shardwright.kernels.dsa.reference import latent_attention_reference
    from shardwright.kernels.dsa.up_projection import UpProjection

    B, S, _ = values["q"].shape
    N, V = c["nope"], c["value"]
    q = values["q"].unflatten(-1, (-1, N))
    up = UpProjection(values["kv_b_weight"], q.shape[2], N, V)
    at = torch.arange(S)
    bounds = torch.stack([torch.zeros_like(at), torch.full_like(at, S)], -1)
    if "selected" in values:
        rows = values["selected"].long()
    else:
        P, pools, (index_q, weights) = c["pool"], pooled_keys(values, c), index_parts(values, c)
        seen = torch.arange(pools.shape[1]) < ((at + 1) // P)[:, None]
        begun = (at + 1) // P * P
        tail = begun[:, None] + torch.arange(P - 1)
        tail = torch.where(tail <= at[:, None], tail, -1)
        found = []
        for row in range(B):
            scores = scores_reference(index_q[row], pools[row], weights[row], c["index_scale"])
            best = select_reference(scores, seen, c["k"] // P).long()
            tokens = torch.where(best[..., None] < 0, -1, best[..., None] * P + torch.arange(P))
            found.append(torch.cat([tokens.flatten(1), tail], -1))
        rows = torch.stack(found)
    none = q.new_empty(S, q.shape[2], 0)
    o = [
        latent_attention_reference(
            q[row], none, values["latent"][row], none[:, 0], up, rows[row], scale=c["scale"], bounds=bounds
        )
        for row in range(B)
    ]
    made = {"o": torch.stack(o).flatten(-2)}
    return made if "selected" in values else {**made, "chosen": members(rows, S).double()}


def by_kernels_gated(values: Tensors, c: dict[str, Any]) -> Tensors:
    """Unrotated keys scored and selected by the indexer's reference, or all of them; the gate on their values."""
    from shardwright.kernels.dsa.indexer.reference import scores_reference, select_reference
    from shardwright.kernels.dsa.reference import latent_attention_reference
    from shardwright.kernels.dsa.up_projection import UpProjection

    B, S, _ = values["q"].shape
    N, V, H = c["nope"], c["value"], c["heads"]
    q = values["q"].unflatten(-1, (H, -1))
    up = UpProjection(values["kv_b_weight"], H, N, V)
    seen = seen_by(values)
    found = []
    for row in range(B):
        first = seen[row].double().argmax(-1)
        bounds = torch.stack([first, torch.arange(1, S + 1)], -1)
        indices = None
        if c["form"] == "own":
            index_q = values["index_q"][row].unflatten(-1, (c["index_heads"], -1))
            weights = values["index_weights"][row]
            scores = scores_reference(index_q, values["index_k"][row], weights, c["index_scale"])
            indices = select_reference(scores, seen[row], c["k"]).long()
        parts = (q[row, ..., :N], q[row, ..., N:], values["latent"][row], values["k_rot"][row], up, indices)
        gate = values["gate"][row].unflatten(-1, (H, V))
        found.append(latent_attention_reference(*parts, gate, scale=c["scale"], bounds=bounds))
    return {"o": torch.stack(found).flatten(-2)}


def _rotated_first(x: Tensor, c: dict[str, Any]) -> Tensor:
    """The operator rotates first dims; where the family rotates the last, both parts of a product change places."""
    return x if c["index_first"] else x.roll(c["rope"], -1)
