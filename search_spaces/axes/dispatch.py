"""How routed rows travel: straight to each expert's rank, or once to each node and on inside it."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, among, runs_cut, whole_domains
from shardwright.search_spaces.context import SearchContext

VALUES = ("all_to_all", "hierarchical")


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    """``hierarchical`` where an expert group spans several whole domains with several ranks in each."""
    crosses = whole_domains(context, draws, draws["ep"]) and not runs_cut(context, draws)
    return VALUES if crosses else ("all_to_all",)


AXIS = Axis(
    "dispatch",
    _choices,
    lambda s: s.dispatch,
    among("hierarchical-needs-nodes", "dispatch", _choices),
    encoding="categorical",
    fixed=VALUES,
)
