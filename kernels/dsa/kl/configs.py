"""Chunks and launch configurations of the indexer's loss. Data, chosen on one H200; no torch.

Legend: T queries, H attention heads, G key heads, k chosen keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.kernels.dsa.indexer.configs import SCORE_BYTES, Tile, power

ROW_BYTES = SCORE_BYTES // 2
"""Most memory for a chunk's scores, and as much again for its target."""

SPARSE_TARGET, TARGET = Tile(keys=64, warps=4, stages=2), Tile(keys=64, warps=8, stages=2)
"""Chosen keys and one tile of heads: 5.0 ms at T 8,192, 64 heads of 576, k 2,048 (8 warps: 7.6 ms); and all others.
One H200."""

TARGET_HEADS = 64
"""Heads of a tile: 64 heads of 576 values and two stages of 64 keys fill shared memory."""

ROW_BLOCK, ROW_WARPS = 2048, 4
SCALE_BLOCK, SCALE_WARPS = 4096, 8


@dataclass(frozen=True)
class HeadTiles:
    """How a key head's query heads are cut: ``parts`` tiles of ``heads``."""

    heads: int
    parts: int


def head_tiles(H: int, G: int) -> HeadTiles:
    """Tiles over the H / G query heads of one key head."""
    each = H // G
    heads = min(TARGET_HEADS, power(each, 16))
    return HeadTiles(heads, -(-each // heads))


def chunk_rows(T: int, k: int) -> int:
    """Queries alive at once in the sparse stage."""
    return max(1, min(T, ROW_BYTES // (4 * k)))
