"""Which EP rank owns which expert."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, no_rule
from shardwright.search_spaces.context import SearchContext


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    return ("contiguous",)


AXIS = Axis("expert_placement", _choices, lambda s: s.expert_placement, no_rule, "categorical", ("contiguous",))
