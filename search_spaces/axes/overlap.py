"""Overlap of expert dispatch with computation: rows move in chunks, one while another is computed."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, among, exchanges
from shardwright.search_spaces.context import SearchContext

VALUES = ("none", "chunked")


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    return VALUES if exchanges(draws) and context.cluster.backend != "gloo" else ("none",)


AXIS = Axis(
    "overlap",
    _choices,
    lambda s: s.overlap,
    among("overlap-needs-exchange", "overlap", _choices),
    encoding="categorical",
    fixed=VALUES,
    refines=True,
)
