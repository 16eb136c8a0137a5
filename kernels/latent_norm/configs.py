"""Launch configurations of latent norm, by the width of both tiles. Data; no torch.

They follow RMSNorm's measured shapes; not timed on a device yet.

Legend: W width of the joint projection, H width of the latent.
"""

from __future__ import annotations

from shardwright.kernels.launch import Launch, columns


def tile_width(W: int, H: int) -> int:
    """Columns of a row's two tiles, each padded to a power of two."""
    return columns(H) + columns(W - H)


def rows(width: int, elements: int) -> int:
    """Rows of about ``elements`` values: a power of two, at least 1."""
    return 1 << max(0, (elements // width).bit_length() - 1)


def forward(width: int) -> Launch:
    """One tile a program: many small independent programs hide the reduction's latency."""
    if width <= 1024:
        return Launch(rows=rows(width, 2048), warps=4, stages=1, programs_per_sm=0)
    return Launch(rows=1, warps=min(16, max(4, columns(width) // 512)), stages=1, programs_per_sm=0)


def backward(width: int) -> Launch:
    """Programs that stay: each keeps its share of dw in registers while copies of the next rows fly."""
    if width <= 2560:
        return Launch(rows=rows(width, 2560), warps=4, stages=3, programs_per_sm=2)
    if width <= 5120:
        return Launch(rows=1, warps=8, stages=3, programs_per_sm=1)
    return Launch(rows=1, warps=16, stages=3, programs_per_sm=1)
