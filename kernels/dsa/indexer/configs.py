"""Chunks and launch configurations of the lightning indexer. Data, chosen on one H200; no torch.

Legend: T queries, S keys, N indexer heads, D head width, k chosen keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

SCORE_BYTES = 256 * 1024**2
"""Most memory for the scores of one chunk of queries."""

ALIGN = 128
"""Rows of scores begin on multiples of this many values."""

QUERIES = 64
"""Queries that one program scores against its keys; chunks are multiples of it where they can be."""


def round_up(n: int, to: int) -> int:
    """``n`` rounded up to a multiple of ``to``."""
    return -(-n // to) * to


def power(n: int, least: int = 1) -> int:
    """``n`` rounded up to a power of two, at least ``least``."""
    return max(least, 1 << (max(1, n) - 1).bit_length())


@dataclass(frozen=True)
class Chunk:
    """Queries whose scores are alive at once: ``rows`` from ``first`` on, ``stride`` values a row."""

    first: int
    rows: int
    stride: int


@lru_cache(maxsize=64)
def chunks(T: int, query_start: int, score_bytes: int = SCORE_BYTES) -> tuple[Chunk, ...]:
    """Chunks of about equal area, each within ``score_bytes`` of fp32 scores; a row is as long as its chunk needs.

    Early queries see few keys, so their chunks hold more of them: 11 chunks at T 32,768, not 16 of 2,048 rows.
    A single row longer than ``score_bytes`` is a chunk of its own.
    """
    most = score_bytes // 4
    fewest = _cut(T, query_start, most)
    low, high = 0, most
    while high - low > max(1, most // 256):
        middle = (low + high) // 2
        if len(_cut(T, query_start, middle)) > len(fewest):
            low = middle
        else:
            high = middle
    return tuple(_cut(T, query_start, high))


def _cut(T: int, query_start: int, area: int) -> list[Chunk]:
    found: list[Chunk] = []
    first = 0
    while first < T:
        rows = min(T - first, QUERIES)
        while rows > 1 and rows * round_up(query_start + first + rows, ALIGN) > area:
            rows //= 2
        if rows == QUERIES:
            rows = _most_rows(T - first, query_start + first, area)
        found.append(Chunk(first, rows, round_up(query_start + first + rows, ALIGN)))
        first += rows
    return found


def _most_rows(left: int, before: int, area: int) -> int:
    """Most rows, a multiple of ``QUERIES`` or all that are left, whose rectangle fits the area."""
    low, high = 1, -(-left // QUERIES)
    while low < high:
        middle = (low + high + 1) // 2
        rows = min(left, middle * QUERIES)
        if rows * round_up(before + rows, ALIGN) <= area:
            low = middle
        else:
            high = middle - 1
    return min(left, low * QUERIES)


@dataclass(frozen=True)
class Tile:
    """Keys of a tile, warps, stages."""

    keys: int
    warps: int
    stages: int


SCORE = Tile(keys=128, warps=4, stages=3)
"""16.9 ms at T 32,768, N 64 (518 TFLOP/s), 0.99 ms at T 8,192, one H200."""

ROW_LIMIT = 32_768
"""Longest row of scores that stays in registers while its threshold is sought."""

LEAST_COLUMNS = 64


@dataclass(frozen=True)
class Selecting:
    """How a row's best keys are sought: ``columns`` in registers, 0 for pieces from memory; written by pieces."""

    columns: int
    piece: int
    warps: int


def selecting(longest: int) -> Selecting:
    """For rows of at most ``longest`` scores: 64 values a thread, as far as registers go without spills."""
    if longest > ROW_LIMIT:
        return Selecting(0, 8192, 16)
    columns = power(longest, LEAST_COLUMNS)
    piece = min(columns, 8192 if columns > 8192 else 4096)
    return Selecting(columns, piece, {16_384: 8, 32_768: 16}.get(columns, 4))


def heads(N: int) -> int:
    """Heads of a tile: a power of two that the matrix units take."""
    return power(N, 16)


SCATTERED_GRADIENT, GRADIENT = Tile(keys=32, warps=4, stages=3), Tile(keys=64, warps=8, stages=2)
"""With fp32 atomics for dk: 4.6 ms at T 8,192, N 64, k 2,048 (64 keys, 8 warps: 6.2 ms); and without. One H200."""

PAIRS = Tile(keys=64, warps=4, stages=2)
KEYS_GRADIENT = Tile(keys=128, warps=8, stages=2)
SPLITS = 8
"""Parts of the queries whose sums for a key are made apart, then added in order."""

ROPE_ROWS, ROPE_WARPS = 32, 4
QUANTISE_ROWS, QUANTISE_WARPS = 16, 4
