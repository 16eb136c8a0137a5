"""Chunk length and launch configurations of head and cross-entropy. Data, chosen on one H200; no torch.

Legend: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.kernels import tuned

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


VOCABULARY_BLOCK = 8192
"""Words of one piece of a product over the vocabulary in fp32.

A plain fp32 product adds V terms to one sum, and once the label's own term, far the largest, is in, every later
addition rounds at that term's step: the error grows with the root of V. Pieces bound it by the root of this."""


def vocabulary_pieces(V: int, value_bytes: int) -> tuple[tuple[int, int], ...]:
    """Where products over the vocabulary are cut: nowhere in 16-bit types, whose own rounding is far larger."""
    step = VOCABULARY_BLOCK if value_bytes == 4 else V
    return tuple((start, min(start + step, V)) for start in range(0, V, step))


WIDTH = 8
"""Neighbouring values of a thread: 16 bytes in 16-bit types."""


@dataclass(frozen=True)
class LossLaunch:
    """One program a row: ``groups`` of ``WIDTH`` values a step."""

    groups: int
    warps: int


def loss(V: int) -> LossLaunch:
    """About four steps a row or more.

    At V 163,840: 32 warps, 2 groups a thread; 0.27 ms for 1,152 rows, what two reads and one write take at the
    copy bandwidth of one H200.
    """
    quarter = max(1, V // (4 * WIDTH))
    groups = min(2048, max(32, 1 << (quarter.bit_length() - 1)))
    default = LossLaunch(groups, max(1, min(32, groups // 64)))
    return tuned.lookup("linear_cross_entropy", "cross_entropy", tuned.bucket(V=V), default)
