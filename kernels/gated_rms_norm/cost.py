"""Counted work of gated RMSNorm. No torch, no device, no milliseconds.

Legend: T tokens, H heads, D row width, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.kernels.rms_norm.cost import STATISTIC_BYTES
from shardwright.schemas.ops import OpCost, PassCost

FORWARD_FLOPS, BACKWARD_FLOPS, WEIGHT_FLOPS = 9, 18, 2
"""Per value. Forward: square and sum 2, scale 1, weight 1, activation 4, gate 1; backward the chain of
both factors and the norm's own 8; a learning weight adds a product and a sum."""


def cost(T: int, H: int, D: int, dtype: str, *, weight_gradient: bool = False, programs: int = 264) -> OpCost:
    """Work of forward and backward over ``x, gate [T, H, D]``.

    Floor of the forward: x, gate and the weight in, y out. Floor of the backward: x, gate and dy in, dx and
    dgate out. The kernels also write and read rstd, one fp32 value a row, and with a learning weight one
    fp32 partial row a program.

    Args:
        weight_gradient: whether the weight learns; a frozen weight (LoRA) skips dw.
        programs: programs of the backward grid (two on each of 132 multiprocessors).
    """
    b, rows = BYTES[dtype], T * H
    n = rows * D
    partial = min(programs, rows) * D * 4 if weight_gradient else 0
    dweight = D * b if weight_gradient else 0
    forward = PassCost(
        flops=FORWARD_FLOPS * n,
        bytes_read=2 * n * b + D * b,
        bytes_written=n * b + rows * STATISTIC_BYTES,
        launches=1,
        floor_flops=FORWARD_FLOPS * n,
        floor_bytes=3 * n * b + D * b,
    )
    flops = (BACKWARD_FLOPS + (WEIGHT_FLOPS if weight_gradient else 0)) * n
    backward = PassCost(
        flops=flops,
        bytes_read=3 * n * b + D * b + rows * STATISTIC_BYTES + partial,
        bytes_written=2 * n * b + partial + dweight,
        launches=2 if weight_gradient else 1,
        workspace_bytes=partial,
        floor_flops=flops,
        floor_bytes=5 * n * b + D * b + dweight,
    )
    return OpCost(
        op="gated_rms_norm",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "H": H, "D": D},
        forward=forward,
        backward=backward,
        saved_bytes=rows * STATISTIC_BYTES,
    )
