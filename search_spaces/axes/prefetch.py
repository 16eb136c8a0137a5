"""Layers whose weights are gathered ahead of use."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, gathers, no_rule
from shardwright.search_spaces.context import SearchContext


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    """More than one only where a gather can run behind computation: over gloo none does."""
    return (1, 2, 4) if gathers(draws) and context.cluster.backend != "gloo" else (1,)


AXIS = Axis("prefetch_depth", _choices, lambda s: s.prefetch_depth, no_rule)
