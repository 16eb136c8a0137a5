"""How far weights are spread again after forward: over all ranks, or over the ranks of a node."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, among, gathers, inner_ranks
from shardwright.search_spaces.context import SearchContext

VALUES = ("all", "node")


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    """``node`` where weights are dropped after forward and their group is wider than a node."""
    ranks = draws["shard"] * draws["ep"] * inner_ranks(draws)
    wider = gathers(draws) and ranks > context.domain > inner_ranks(draws)
    return VALUES if wider and draws["reshard_after_forward"] else ("all",)


AXIS = Axis(
    "reshard_scope",
    _choices,
    lambda s: s.reshard_scope,
    among("node-reshard", "reshard_scope", _choices),
    encoding="categorical",
    fixed=VALUES,
)
