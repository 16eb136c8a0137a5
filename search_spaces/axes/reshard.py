"""Whether a layer's gathered weights are dropped after its forward pass and gathered again for backward."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, gathers, no_rule
from shardwright.search_spaces.context import SearchContext

VALUES = (True, False)


def _choices(context: SearchContext, draws: Draws) -> tuple[bool, ...]:
    """One value where nothing is gathered: both would be the same plan."""
    return VALUES if gathers(draws) else (True,)


AXIS = Axis(
    "reshard_after_forward", _choices, lambda s: s.reshard_after_forward, no_rule, encoding="categorical", fixed=VALUES
)
