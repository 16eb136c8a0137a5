"""Launch configurations of residual add + RMSNorm, by tile width. Data, chosen by sweeps on one H200; no torch.

Measured at T·H = 117M values in bf16 and the widths 576, 2048 (forward) and 7168; the others follow RMSNorm.

Legend: H hidden.
"""

from __future__ import annotations

from shardwright.kernels.launch import Launch, columns, rows_for


def forward(H: int) -> Launch:
    """One tile a program: many small independent programs hide the reduction's latency."""
    width = columns(H)
    if width <= 1024:
        return Launch(rows=rows_for(H, 4096), warps=4, stages=1, programs_per_sm=0)
    return Launch(rows=1, warps=width // 512, stages=1, programs_per_sm=0)


def backward(H: int) -> Launch:
    """Programs that stay, as in RMSNorm, with three tensors in flight."""
    width = columns(H)
    if width <= 256:
        return Launch(rows=rows_for(H, 2048), warps=4, stages=4, programs_per_sm=2)
    if width <= 2048:
        return Launch(rows=rows_for(H, 4096), warps=4, stages=4, programs_per_sm=2)
    if width <= 4096:
        return Launch(rows=2, warps=8, stages=3, programs_per_sm=1)
    return Launch(rows=1, warps=16, stages=3, programs_per_sm=1)
