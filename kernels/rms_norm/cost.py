"""Counted work of RMSNorm. No torch, no device, no milliseconds.

Legend: T rows, H hidden, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.schemas.ops import OpCost, PassCost

STATISTIC_BYTES = 4
"""``rstd`` is fp32, one value a row."""


def cost(T: int, H: int, dtype: str, *, weight_gradient: bool = False, programs: int = 264) -> OpCost:
    """Work of forward and backward over ``x [T, H]``.

    Forward reads x and the weight, writes y and rstd. Backward reads x, dy, rstd and the weight and
    writes dx; a learning weight adds one fp32 partial row a program, written once and read once.

    Args:
        weight_gradient: whether the weight learns; a frozen weight (LoRA) skips dw.
        programs: programs of the backward grid (two on each of 132 multiprocessors).
    """
    b, n = BYTES[dtype], T * H
    partial = min(programs, T) * H * 4 if weight_gradient else 0
    dweight = H * b if weight_gradient else 0
    forward = PassCost(
        flops=4 * n,
        bytes_read=n * b + H * b,
        bytes_written=n * b + T * STATISTIC_BYTES,
        launches=1,
        floor_flops=4 * n,
        floor_bytes=2 * n * b + H * b,
    )
    flops = (10 if weight_gradient else 8) * n
    backward = PassCost(
        flops=flops,
        bytes_read=2 * n * b + H * b + T * STATISTIC_BYTES + partial,
        bytes_written=n * b + partial + dweight,
        launches=2 if weight_gradient else 1,
        workspace_bytes=partial,
        floor_flops=flops,
        floor_bytes=3 * n * b + H * b + dweight,
    )
    return OpCost(
        op="rms_norm",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "H": H},
        forward=forward,
        backward=backward,
        saved_bytes=T * STATISTIC_BYTES,
    )
