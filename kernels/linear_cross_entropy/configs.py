"""Chunk length and launch configurations of head and cross-entropy. Data, chosen on one H200; no torch.

Legend: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

CHUNK_BYTES = 384 * 1024**2
"""Most memory for the logits of one chunk."""

TILE_ROWS = 128
"""Chunks are multiples of this where they can be: the row tile of the matrix products."""

COUNT_BLOCK, COUNT_WARPS = 1024, 4
SCALE_BLOCK, SCALE_WARPS = 4096, 8


def stride(V: int) -> int:
    """Length of a stored row of logits: ``V`` rounded up so that every row starts on 128 bytes."""
    return -(-V // 64) * 64


def chunk_rows(T: int, V: int, value_bytes: int) -> int:
    """Rows of logits alive at once: equal chunks of whole tiles within ``CHUNK_BYTES``, at least one row."""
    most = max(1, CHUNK_BYTES // (stride(V) * value_bytes))
    if most >= T:
        return max(1, T)
    if most < TILE_ROWS:
        return most
    return most // TILE_ROWS * TILE_ROWS


WIDTH = 8
"""Neighbouring values of a thread: 16 bytes in 16-bit types."""


def loss_groups(V: int) -> tuple[int, int]:
    """Groups of ``WIDTH`` values that a program takes a step, and its warps: about four steps a row or more.

    At V 163,840: 32 warps, 2 groups a thread; 0.27 ms for 1,152 rows, what two reads and one write take at the
    copy bandwidth of one H200.
    """
    quarter = max(1, V // (4 * WIDTH))
    groups = min(2048, max(32, 1 << (quarter.bit_length() - 1)))
    return groups, max(1, min(32, groups // 64))
