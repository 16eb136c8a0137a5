"""The reference of a registered kernel as a second formula for the differential test."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from shardwright.agents.structure.patterns.base import Match, Tensors

OPERANDS = {"rms_norm": ("x", "weight"), "add_rms_norm": ("branch", "residual", "weight")}
"""Operator → roles of its tensors, in order; ε follows."""

_RESULTS = {"rms_norm": ("y",), "add_rms_norm": ("y", "new_residual")}
"""Operator → roles of what its reference returns, in order."""


def kernel_reference(match: Match) -> Callable[[Tensors], Tensors] | None:
    """The plain reference of the kernel that could replace a match, by role; ``None`` where there is none."""
    from shardwright.kernels.registry import OPERATORS

    own = match.pattern.kernel_reference(match)
    if own is not None:
        return own
    for variant in match.pattern.variants():
        fits = variant.computes(match.constants)
        if variant.provider == "shardwright" and fits and variant.op in OPERATORS and variant.op in OPERANDS:
            return _by_role(variant.op, match.constants["eps"])
    return None


def _by_role(op: str, eps: float) -> Callable[[Tensors], Tensors]:
    function = getattr(importlib.import_module(f"shardwright.kernels.{op}.reference"), f"{op}_reference")

    def run(values: Tensors) -> Tensors:
        found = function(*(values[role] for role in OPERANDS[op]), eps)
        return dict(zip(_RESULTS[op], found if isinstance(found, tuple) else (found,), strict=True))

    return run
