"""Launch configurations of query/key norm + RoPE, by tile width. Data; no torch.

They follow RMSNorm's measured shapes for narrow rows; not timed on a device yet.

Legend: D head width, W rotary width.
"""

from __future__ import annotations

from shardwright.kernels.launch import Launch, rows_for


def power_of_two(n: int) -> int:
    """``n`` rounded up to a power of two; 0 stays 0."""
    return 1 << (n - 1).bit_length() if n else 0


def tile_width(D: int, W: int) -> int:
    """Columns of a row's tile: both rotating halves and the rest, each padded to a power of two."""
    return 2 * power_of_two(W // 2) + power_of_two(D - W)


def forward(width: int) -> Launch:
    """One tile a program."""
    return Launch(rows=rows_for(width, 2048), warps=4, stages=1, programs_per_sm=0)


def backward(width: int) -> Launch:
    """Programs that stay: each keeps its share of one weight's gradient in registers."""
    return Launch(rows=rows_for(width, 2048), warps=4, stages=2, programs_per_sm=4)
