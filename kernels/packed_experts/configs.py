"""Which way a packed product runs, and its tiles, by rows an expert. Data, chosen on one H200; no torch.

Legend: R rows, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwright.kernels import tuned


@dataclass(frozen=True)
class Tile:
    """One product's launch: ``BN`` weight columns, ``BK`` depth of a step, ``group`` row tiles a weight tile."""

    BN: int
    BK: int
    group: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Copies:
    """Whether a dequantised copy of a layer's stacks is made."""

    made: bool


@dataclass(frozen=True)
class Pieces:
    """Rows of a tile, in two pieces that are powers of two (the second may be 0)."""

    BA: int
    BB: int

    @property
    def rows(self) -> int:
        return self.BA + self.BB


PIECES = (Pieces(64, 0), Pieces(64, 32), Pieces(128, 0), Pieces(128, 32))
"""Larger tiles would spill: the decoded weights share the registers with the sums."""

DEQUANTISE_ROWS, DEQUANTISE_ROWS_ALONE = 256, 640
"""From so many rows an expert on, a dequantised copy of the layer's stacks is cheaper than decoding in every tile:
where a backward follows and shares the copy, and for a forward alone. One H200, 14 experts of 3584 × 3072: 293 rows
1.52 ms with a copy and 1.58 without for forward and dx, 0.92 and 0.73 for the forward alone; 585 rows 2.53 and 2.96,
1.46 and 1.35."""


def dequantises(rows: int, experts: int, *, trains: bool) -> bool:
    """Whether the stacks are dequantised to the workspace first, for ``rows`` rows in all."""
    default = Copies(rows >= (DEQUANTISE_ROWS if trains else DEQUANTISE_ROWS_ALONE) * experts)
    kernel = "copies" if trains else "copies-alone"
    return tuned.lookup("packed_experts", kernel, _bucket(rows, experts), default).made


@lru_cache(maxsize=4096)
def _bucket(rows: int, experts: int) -> str:
    return tuned.bucket(R=rows, E=experts)


@lru_cache(maxsize=4096)
def pieces(rows: int, experts: int) -> Pieces:
    """The tile that leaves the fewest empty rows at the mean number of rows an expert; the larger of equals."""
    mean = max(1, -(-rows // experts))
    return min(reversed(PIECES), key=lambda p: -(-mean // p.rows) * p.rows)


# Four warps, so that two programs share a multiprocessor: one decodes while the other's products run.
GATE_UP = Tile(BN=64, BK=64, group=1, warps=4, stages=3)
ALONG = Tile(BN=128, BK=64, group=1, warps=4, stages=3)
ACTIVATION_BWD = Tile(BN=128, BK=64, group=1, warps=4, stages=3)
ACROSS = Tile(BN=128, BK=64, group=1, warps=4, stages=3)
STRIP_ROWS = 32
"""Rows whose activation gradient one step computes."""

DEQUANTISE_BLOCKS, DEQUANTISE_ROWS_A_PROGRAM, DEQUANTISE_WARPS = 1, 128, 4
"""Blocks of 64 columns, and weight rows, that one program dequantises."""


TAIL_ROWS, TAIL_COLUMNS, TAIL_WARPS = 64, 1024, 4
"""Rows that one program looks at for those of no expert, and how wide it clears them."""


def rank_columns(rank: int) -> int:
    """The rank as the matrix units take it: a power of two, at least 16."""
    return max(16, 1 << (rank - 1).bit_length())
