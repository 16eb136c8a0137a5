"""Counted work of latent norm. No torch, no device, no milliseconds.

Legend: T rows, W width of the joint projection, H width of the latent, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.kernels.rms_norm.cost import STATISTIC_BYTES
from shardwright.schemas.ops import OpCost, PassCost


def cost(T: int, W: int, H: int, dtype: str, *, weight_gradient: bool = False, programs: int = 264) -> OpCost:
    """Work of forward and backward over ``joint [T, W]``.

    Forward reads the joint rows and the weight, writes the latent, the rest and rstd. Backward reads both
    gradients, the latent and rstd, and writes the joint gradient once; eager writes the latent's own gradient
    first and joins it with the rest's in another pass. The floor of the forward leaves the rest where it is:
    a view of it needs no copy.

    Args:
        weight_gradient: whether the weight learns; a frozen weight (LoRA) skips dw.
        programs: programs of the backward grid (two on each of 132 multiprocessors).
    """
    b, n, whole = BYTES[dtype], T * H, T * W
    partial = min(programs, T) * H * 4 if weight_gradient else 0
    dweight = H * b if weight_gradient else 0
    forward = PassCost(
        flops=4 * n,
        bytes_read=whole * b + H * b,
        bytes_written=whole * b + T * STATISTIC_BYTES,
        launches=1,
        floor_flops=4 * n,
        floor_bytes=2 * n * b + H * b,
    )
    flops = (10 if weight_gradient else 8) * n
    backward = PassCost(
        flops=flops,
        bytes_read=whole * b + n * b + H * b + T * STATISTIC_BYTES + partial,
        bytes_written=whole * b + partial + dweight,
        launches=2 if weight_gradient else 1,
        workspace_bytes=partial,
        floor_flops=flops,
        floor_bytes=2 * whole * b + n * b + H * b + dweight,
    )
    return OpCost(
        op="latent_norm",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "W": W, "H": H},
        forward=forward,
        backward=backward,
        saved_bytes=T * STATISTIC_BYTES,
    )
