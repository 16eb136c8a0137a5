"""Counted work of attention residuals. No torch, no device, no milliseconds.

Legend: T tokens, R rows, H hidden, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.schemas.ops import OpCost, PassCost

STATISTIC_BYTES = 4


def cost(T: int, R: int, H: int, dtype: str, *, weight_gradient: bool = False, programs: int = 132) -> OpCost:
    """Work of forward and backward over R rows ``[T, H]``.

    Forward reads every row once and writes the mix, a length and a logit of each row and token, and one sum a token.
    Backward reads every row twice, for the mix and for its own gradient (the second time from cache: the floor counts
    one), the gradient of the mix, and writes the gradient of every row.

    Args:
        weight_gradient: whether norm and projection learn; frozen ones (LoRA) cost nothing.
        programs: programs of the backward grid.
    """
    b = BYTES[dtype]
    y, vectors, kept = T * H * b, 2 * H * b, (2 * R + 1) * T * STATISTIC_BYTES
    n = R * y
    partial = min(programs, T) * H * 4 if weight_gradient else 0
    flops = 8 * T * R * H
    forward = PassCost(
        flops=flops,
        bytes_read=n + vectors,
        bytes_written=y + kept,
        launches=1,
        floor_flops=flops,
        floor_bytes=n + y + vectors,
    )
    backward = PassCost(
        flops=2 * flops,
        bytes_read=2 * n + y + vectors + kept + partial,
        bytes_written=n + partial + (vectors if weight_gradient else 0),
        launches=4 if weight_gradient else 1,
        workspace_bytes=partial,
        floor_flops=2 * flops,
        floor_bytes=2 * n + y + vectors,
    )
    return OpCost(
        op="attention_residual",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "R": R, "H": H},
        forward=forward,
        backward=backward,
        saved_bytes=kept,
    )
