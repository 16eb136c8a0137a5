"""How routed rows travel: straight to each expert's rank, or once to each node and on inside it."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, among, inner_ranks
from shardwright.search_spaces.context import SearchContext

VALUES = ("all_to_all", "hierarchical")


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    """``hierarchical`` where an expert group spans several domains with several ranks in each."""
    inside = max(1, context.domain // inner_ranks(draws))
    return VALUES if draws["ep"] > inside > 1 else ("all_to_all",)


AXIS = Axis(
    "dispatch",
    _choices,
    lambda s: s.dispatch,
    among("hierarchical-needs-nodes", "dispatch", _choices),
    encoding="categorical",
    fixed=VALUES,
)
