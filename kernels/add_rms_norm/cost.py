"""Counted work of residual add + RMSNorm. No torch, no device, no milliseconds.

Legend: T rows, H hidden, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.kernels.rms_norm.cost import STATISTIC_BYTES
from shardwright.schemas.ops import OpCost, PassCost


def cost(T: int, H: int, dtype: str, *, weight_gradient: bool = False, programs: int = 264) -> OpCost:
    """Work of forward and backward over ``x, residual [T, H]``.

    Forward reads both and writes y, the sum and rstd. Backward reads the sum and the gradients of both
    outputs and writes one tensor, the gradient of x and of the residual.

    Args:
        weight_gradient: whether the weight learns; a frozen weight (LoRA) skips dw.
        programs: programs of the backward grid.
    """
    b, n = BYTES[dtype], T * H
    partial = min(programs, T) * H * 4 if weight_gradient else 0
    dweight = H * b if weight_gradient else 0
    forward = PassCost(
        flops=5 * n,
        bytes_read=2 * n * b + H * b,
        bytes_written=2 * n * b + T * STATISTIC_BYTES,
        launches=1,
        floor_flops=5 * n,
        floor_bytes=4 * n * b + H * b,
    )
    flops = (11 if weight_gradient else 9) * n
    backward = PassCost(
        flops=flops,
        bytes_read=3 * n * b + H * b + T * STATISTIC_BYTES + partial,
        bytes_written=n * b + partial + dweight,
        launches=2 if weight_gradient else 1,
        workspace_bytes=partial,
        floor_flops=flops,
        floor_bytes=4 * n * b + H * b + dweight,
    )
    return OpCost(
        op="add_rms_norm",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "H": H},
        forward=forward,
        backward=backward,
        saved_bytes=T * STATISTIC_BYTES,
    )
