"""How far weights are spread again after forward: over all ranks, or over the ranks of a node."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, among, gathers, inner_ranks, runs_cut, whole_domains
from shardwright.search_spaces.context import SearchContext

VALUES = ("all", "node")


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    """``node`` where weights are dropped after forward and their group is several whole domains."""
    return VALUES if draws["reshard_after_forward"] and domains_divide(context, draws) else ("all",)


def domains_divide(context: SearchContext, draws: Draws) -> bool:
    """Whether domains cut the group that shares weights evenly, and an expert group too."""
    if runs_cut(context, draws):
        return False
    inside = max(1, context.domain // inner_ranks(draws))
    even = draws["ep"] % inside == 0 or inside % draws["ep"] == 0
    return gathers(draws) and even and whole_domains(context, draws, draws["shard"] * draws["ep"])


AXIS = Axis(
    "reshard_scope",
    _choices,
    lambda s: s.reshard_scope,
    among("node-reshard", "reshard_scope", _choices),
    encoding="categorical",
    fixed=VALUES,
)
