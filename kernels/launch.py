"""How a row kernel is launched: choices that are data, never tuned at run time. No torch here.

Legend: T rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """One launch configuration of a row kernel.

    A program owns tiles of ``rows`` whole rows. With ``programs_per_sm`` > 0 the grid is that many
    programs for each multiprocessor and every program walks over tiles, ``stages`` of them in flight;
    0 starts one program a tile. ``reload`` reads a row again for its second use (from cache) instead of
    keeping it in registers.
    """

    rows: int
    warps: int
    stages: int
    programs_per_sm: int
    reload: bool = False

    def grid(self, T: int, multiprocessors: int) -> int:
        """Number of programs for ``T`` rows; at least 1."""
        tiles = max(1, -(-T // self.rows))
        return min(tiles, self.programs_per_sm * multiprocessors) if self.programs_per_sm else tiles


def columns(H: int) -> int:
    """The tile's width: ``H`` rounded up to a power of two, at least 16."""
    return max(16, 1 << (H - 1).bit_length())


def rows_for(H: int, elements: int) -> int:
    """Rows of a tile of about ``elements`` values: a power of two, at least 1."""
    return max(1, elements // columns(H))
