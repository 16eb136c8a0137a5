"""Inputs on which sparse latent attention is compared: two documents, scores without ties.

Legend: B batch, S tokens, K selected keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.agents.structure.patterns.base import Tensors
from shardwright.agents.structure.patterns.dsa_spelling import INDEXER


def two_documents(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """Causal; rows but the first are two documents."""
    B, _, S, _ = shape
    seen = torch.ones(S, S, dtype=torch.bool).tril().repeat(B, 1, 1, 1)
    seen[1:, :, S // 3 :, : S // 3] = False
    return seen if kind == torch.bool else torch.where(seen, 0.0, float(torch.finfo(kind).min)).double()


def case(name: str, seed: int, shapes: dict[str, tuple[int, ...]], c: dict[str, Any], kind: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(41 + seed)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = {role: normal(shape) for role, shape in shapes.items() if role not in ("mask", "selected")}
    made["kv_b_weight"] *= shapes["kv_b_weight"][-1] ** -0.5
    angle = torch.rand(shapes["cos"], generator=generator, dtype=torch.float64) * 6.3
    angle = torch.cat([angle[..., : angle.shape[-1] // 2]] * 2, dim=-1)
    made |= {"cos": angle.cos(), "sin": angle.sin(), "mask": two_documents(shapes["mask"], kind)}
    if "selected" in shapes:
        made["selected"] = _selection(shapes["selected"], generator)
    else:
        for role in INDEXER[:2]:
            _lift(made[role], c)
        if name == "shared-keys":
            made["index_k"][:, :3] *= 10
    if name == "loud-query":
        made["q"][:, -1] *= 100
    if name == "tiny":
        made["latent"] *= 1e-7
    if name == "zero-latent":
        made["latent"][:, 1] = 0
    return made


def _lift(x: Tensor, c: dict[str, Any]) -> None:
    """Plain dims far above 0, so that no product is cut off: scores of exactly 0 would tie."""
    rows = x.unflatten(-1, (-1, c["index_width"]))
    plain = rows[..., c["rope"] :] if c["index_first"] else rows[..., : c["index_width"] - c["rope"]]
    plain.abs_().add_(3.0)


def _selection(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Distinct keys, of which one is the query's own."""
    B, S, K = shape
    drawn = torch.rand((B, S, S), generator=generator)
    drawn[:, torch.arange(S), torch.arange(S)] = 2
    return drawn.topk(K, -1).indices.to(torch.int32)
