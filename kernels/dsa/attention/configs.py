"""Tiles, runs and ways of sparse attention. Data, chosen on one H200; no torch.

Legend: T queries, H query heads, HEADS heads of a key head, D widths, K · B positions of a query's selection,
W columns of a key's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["atomic", "sorted", "blocks"]
"""How keys get their gradients: see ``backward_triton``."""

RUN_BYTES = 2 * 1024**3
"""Most workspace of a backward's run of queries: P, dS and, sorted, one row a pair."""

BLOCK_ROWS = 32
"""Blocks of at least this many keys are summed by their owner; smaller ones leave much of a matrix tile empty and are
sorted. At K · B 2048, H 64, T 8192: blocks of 64 take 24.8 ms, of 32 31.4, of 16
39.1, and sorted pairs 31.3."""

PREPARE_ROWS, PREPARE_WARPS = 4, 4
SUM_ROWS, SUM_WARPS = 8, 4
EXAMINE_WARPS = 8


@dataclass(frozen=True)
class Tile:
    """Heads and keys of one step of a program."""

    heads: int
    keys: int
    warps: int
    stages: int


def power_of_two(n: int, least: int = 16) -> int:
    """``n`` rounded up to a power of two, at least ``least``: the narrowest matrix operand."""
    return max(least, 1 << max(0, n - 1).bit_length())


def forward(HEADS: int, D: int, value_bytes: int) -> Tile:
    """64 heads of 576 columns and 64 keys fill 221 KB of shared memory with two stages: 290 to 295 TFLOP/s."""
    if value_bytes > 2:
        return Tile(16, 16, 4, 1)
    heads = min(64, power_of_two(HEADS))
    return Tile(heads, 64, 8 if heads * D > 16_384 else 4, 2)


def shares(HEADS: int, D: int, value_bytes: int) -> Tile:
    """One stage and four warps, so that scores are made once: 7.3 ms at T 8192, H 64; with dQ it spills (13.1)."""
    if value_bytes > 2:
        return Tile(16, 16, 4, 1)
    return Tile(min(64, power_of_two(HEADS)), 64, 4, 1)


def queries(HEADS: int, D: int, value_bytes: int) -> Tile:
    """4.0 ms at T 8192, H 64."""
    if value_bytes > 2:
        return Tile(16, 16, 4, 1)
    heads = min(64, power_of_two(HEADS))
    return Tile(heads, 64, 8 if heads * D > 16_384 else 4, 2)


def contributions(HEADS: int, value_bytes: int) -> Tile:
    """128 columns of the queries stay on the chip; 12.4 ms with stored rows at T 8192, H 64, a third stage 14.4.

    Of more heads than a tile has, queries are loaded again for each tile: two stages would fill shared memory.
    """
    if value_bytes > 2:
        return Tile(16, 16, 4, 1)
    return Tile(min(64, power_of_two(HEADS)), 64, 4, 2 if HEADS <= 64 else 1)


def columns(width: int) -> int:
    """Columns of one part."""
    return min(128, power_of_two(width))


def way(block_size: int, deterministic: bool) -> Way:
    """Atomics only for single keys, and there only where bits may differ between runs."""
    if block_size >= BLOCK_ROWS:
        return "blocks"
    return "sorted" if deterministic or block_size > 1 else "atomic"


def run_tokens(T: int, H: int, G: int, positions: int, W: int, value_bytes: int, pairs: bool) -> int:
    """Queries whose shares are stored at once: as many as ``RUN_BYTES`` holds, at least one."""
    token = 2 * H * positions * value_bytes + (G * positions * W * value_bytes if pairs else 0)
    return max(1, min(T, RUN_BYTES // max(1, token)))
