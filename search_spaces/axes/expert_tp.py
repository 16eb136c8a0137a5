"""Expert tensor parallelism: neighbouring ranks share the width of each expert."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, among, inner_ranks
from shardwright.search_spaces.context import SearchContext, divisors

ALIGNMENT = 8
"""Columns of one expert's part stay a multiple of this: row strides of 16 bytes in bf16."""


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    """Degrees that divide shard · tp · cp and the expert width; they stay inside a load/store domain."""
    width, ranks = context.profile.shape.expert_intermediate_size, draws["shard"] * inner_ranks(draws)
    if context.experts == 0:
        return (1,)
    return tuple(
        d for d in divisors(ranks) if d == 1 or (d <= context.domain // draws["ep"] and width % (ALIGNMENT * d) == 0)
    )


AXIS = Axis("expert_tp", _choices, lambda s: s.mesh.expert_tp, among("expert-tp-divides", "expert_tp", _choices))
