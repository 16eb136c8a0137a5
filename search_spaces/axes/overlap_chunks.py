"""Into how many chunks an overlapped exchange is cut; each chunk reads the experts' weights again."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, among
from shardwright.search_spaces.context import SearchContext

CHUNKS = {"none": (1,), "chunked": (2, 4, 8), "shared": (1, 2, 4, 8)}
"""By what the exchange is overlapped with; the shared expert lies under all chunks' dispatches."""


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    return CHUNKS[draws["overlap"]]


AXIS = Axis(
    "overlap_chunks",
    _choices,
    lambda s: s.overlap_chunks,
    among("chunks-need-overlap", "overlap_chunks", _choices),
    refines=True,
)
