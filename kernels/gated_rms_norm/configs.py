"""Launch configurations of gated RMSNorm, by tile width. Data; no torch.

They follow RMSNorm's measured shapes, with one tensor more in flight; not timed on a device yet:
``python -m shardwright.kernels.sweep gated_rms_norm --hidden 128`` does it.

Legend: D row width.
"""

from __future__ import annotations

from shardwright.kernels.launch import Launch, columns, rows_for


def forward(D: int) -> Launch:
    """One tile a program: many small independent programs hide the reduction's latency."""
    width = columns(D)
    if width <= 256:
        return Launch(rows=rows_for(D, 4096), warps=8, stages=1, programs_per_sm=0)
    if width <= 1024:
        return Launch(rows=rows_for(D, 2048), warps=4, stages=1, programs_per_sm=0)
    return Launch(rows=1, warps=max(4, width // 512), stages=1, programs_per_sm=0)


def backward(D: int) -> Launch:
    """Programs that stay, three tensors in flight, each with its share of dw in registers."""
    width = columns(D)
    if width <= 256:
        return Launch(rows=rows_for(D, 2048), warps=4, stages=3, programs_per_sm=2)
    if width <= 2048:
        return Launch(rows=rows_for(D, 2048), warps=4, stages=3, programs_per_sm=2)
    if width <= 4096:
        return Launch(rows=1, warps=8, stages=3, programs_per_sm=2)
    return Launch(rows=1, warps=16, stages=3, programs_per_sm=1)
