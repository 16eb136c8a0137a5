"""The re-trace check: a pattern's own function, traced on the matched shapes, must be the matched region.

A matcher may forget a constant or an operand; then the region and the function differ here, and the match is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwright.agents.structure.canonical import CanonicalGraph, canonicalise
from shardwright.agents.structure.flatten import flatten
from shardwright.agents.structure.region import Region

Function = Callable[[dict[str, torch.Tensor], dict[str, Any]], dict[str, torch.Tensor]]
"""(tensors by role, constants) → results by role."""


class _Traced(nn.Module):
    def __init__(self, function: Function, roles: tuple[str, ...], constants: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__["call"] = (function, roles, constants)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        function, roles, constants = self.__dict__["call"]
        results = function(dict(zip(roles, tensors, strict=True)), constants)
        return tuple(results[role] for role in sorted(results))


def meta_inputs(region: Region) -> dict[str, torch.Tensor]:
    """Meta tensors like the region's inputs, by role."""
    made = {}
    for role in region.inputs:
        spec = region.spec(role)
        dtype = getattr(torch, spec.dtype)
        made[role] = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="meta")
    return made


def retrace(function: Function, region: Region, constants: dict[str, Any]) -> CanonicalGraph:
    """Trace a function on meta tensors like the region's inputs, told apart by role."""
    inputs = meta_inputs(region)
    roles = tuple(inputs)
    program = torch.export.export(_Traced(function, roles, constants), tuple(inputs.values()), strict=False)
    placeholders = [p for p in program.graph_signature.user_inputs if isinstance(p, str)]
    leaves = {p: ("input", role) for p, role in zip(placeholders, roles, strict=True)}
    return canonicalise(flatten(program.graph_module), leaves, labelled=True)  # type: ignore[arg-type]


def first_difference(one: CanonicalGraph, other: CanonicalGraph) -> str:
    """The first node where two canonical graphs part, in words; empty where they are isomorphic."""
    for a, b in zip(one.nodes, other.nodes, strict=False):
        seen = [
            (n.target, n.inputs, n.arguments, n.output and n.output.shape, n.output and n.output.dtype) for n in (a, b)
        ]
        if seen[0] != seen[1]:
            return f"{a.target}{a.arguments or ''} at {a.source or a.id} against {b.target}{b.arguments or ''}"
    if len(one.nodes) != len(other.nodes):
        return f"{len(one.nodes)} nodes against {len(other.nodes)}"
    return "" if one.outputs == other.outputs else "other outputs"
