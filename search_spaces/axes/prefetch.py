"""Layers whose weights are gathered ahead of use."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, gathers, no_rule
from shardwright.search_spaces.context import SearchContext


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    return (1, 2, 4) if gathers(draws) else (1,)


AXIS = Axis("prefetch_depth", _choices, lambda s: s.prefetch_depth, no_rule)
