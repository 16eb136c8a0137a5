"""Which EP rank owns which expert: runs of neighbours, or evened out by measured loads."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, among, exchanges
from shardwright.search_spaces.context import SearchContext

VALUES = ("contiguous", "balanced")


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    """``balanced`` needs a load profile: without one the prior says nothing of single experts."""
    return VALUES if exchanges(draws) and context.loads else ("contiguous",)


AXIS = Axis(
    "expert_placement",
    _choices,
    lambda s: s.expert_placement,
    among("placement-needs-loads", "expert_placement", _choices),
    "categorical",
    VALUES,
    refines=True,
)
