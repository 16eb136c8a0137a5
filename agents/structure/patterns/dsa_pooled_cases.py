"""Inputs on which sparse attention over pools is compared: every token valid, scores without ties.

Legend: B rows, S tokens, W places of the choice, P tokens of a pool.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.agents.structure.patterns.base import Tensors

CASES = ("normal", "half-the-heads-cut-off", "loud-query", "tiny", "zero-latent")
LIFT = 3.0


def case(name: str, seed: int, shapes: dict[str, tuple[int, ...]], c: dict[str, Any]) -> Tensors:
    generator = torch.Generator().manual_seed(53 + seed)
    whole = ("valid", "selected")
    made = {
        role: torch.randn(shape, generator=generator, dtype=torch.float64)
        for role, shape in shapes.items()
        if role not in whole
    }
    made["kv_b_weight"] *= shapes["kv_b_weight"][-1] ** -0.5
    if "selected" in shapes:
        made["selected"] = _selection(shapes["selected"], generator)
    else:
        made["valid"] = torch.ones(shapes["valid"], dtype=torch.bool)
        _without_ties(made, c, cut=name == "half-the-heads-cut-off")
    if name == "loud-query":
        made["q"][:, -1] *= 100
    if name == "tiny":
        made["latent"] *= 1e-7
    if name == "zero-latent":
        made["latent"][:, 1] = 0
    return made


def _without_ties(made: Tensors, c: dict[str, Any], cut: bool) -> None:
    """Products of queries and keys above 0, so that no pool scores exactly 0; below 0 for half of the heads."""
    made["q_latent"].abs_()
    made["index_q_weight"].abs_()
    made["index_norm_bias"].abs_().add_(LIFT)
    made["index_norm_weight"] *= 0.5
    made["index_k_weight"] *= made["hidden"].shape[-1] ** -0.5
    made["pool_gate"] *= made["hidden"].shape[-1] ** -0.5
    if cut:
        made["index_q_weight"].unflatten(0, (c["index_heads"], -1))[::2] *= -1


def _selection(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Distinct keys in any order, of which one is the query's own; the last place holds nothing."""
    B, S, W = shape
    drawn = torch.rand((B, S, S), generator=generator)
    drawn[:, torch.arange(S), torch.arange(S)] = 2
    found = torch.full(shape, -1, dtype=torch.int32)
    count = max(1, min(W - 1, S))
    found[..., :count] = drawn.topk(count, -1).indices.to(torch.int32)
    return found
