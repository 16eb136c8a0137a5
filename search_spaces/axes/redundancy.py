"""Copies of the most loaded experts that each EP rank holds beside its own."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, among
from shardwright.search_spaces.context import SearchContext


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    """Copies only where experts are placed by loads: nothing else says which are worth one."""
    each = context.experts // draws["ep"] if context.experts else 0
    return tuple(n for n in (0, 1, 2, 4) if n <= each) if draws["expert_placement"] == "balanced" else (0,)


AXIS = Axis(
    "redundant_experts",
    _choices,
    lambda s: s.redundant_experts,
    among("redundancy-needs-balance", "redundant_experts", _choices),
    refines=True,
)
