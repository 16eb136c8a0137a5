"""Overlap of expert dispatch with computation. The cost model covers ``none``."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, no_rule
from shardwright.search_spaces.context import SearchContext


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    return ("none",)


AXIS = Axis("overlap", _choices, lambda s: s.overlap, no_rule, encoding="categorical", fixed=("none",))
