"""Launch configurations of attention residuals, by tile width. Data; no torch.

A program keeps the direction ``norm × projection`` and the mix in registers, in fp32: 16 values of each a thread at
7,168. ``stages`` less one rows are on their way meanwhile. Chosen by what the compiler says (no spills, two programs a
multiprocessor); not swept on a device yet.

Legend: H hidden.
"""

from __future__ import annotations

from shardwright.kernels.launch import Launch, columns, rows_for


def forward(H: int) -> Launch:
    """Programs that stay keep the direction for all their tokens."""
    width = columns(H)
    if width <= 1024:
        return Launch(rows=rows_for(H, 2048), warps=4, stages=3, programs_per_sm=4)
    return Launch(rows=1, warps=width // 512, stages=3, programs_per_sm=4 if width <= 4096 else 2)


def backward(H: int) -> Launch:
    """As forward, with the gradient of the mix beside it."""
    width = columns(H)
    if width <= 1024:
        return Launch(rows=rows_for(H, 2048), warps=4, stages=3, programs_per_sm=4)
    return Launch(rows=1, warps=width // 512, stages=3, programs_per_sm=2 if width <= 4096 else 1)
