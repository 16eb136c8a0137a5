"""Counted work of query/key norm + RoPE. No torch, no device, no milliseconds.

Legend: T tokens, Q and K heads, D and DK head widths, W rotary width, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.schemas.ops import OpCost, PassCost

NORM_FLOPS, NORM_BACK_FLOPS, WEIGHT_FLOPS, TURN_FLOPS = 4, 8, 2, 3
"""Per value: the norm forward and backward, a learning weight, and the rotation (two products and a sum)."""


def cost(
    T: int,
    Q: int,
    K: int,
    D: int,
    W: int,
    dtype: str,
    *,
    DK: int | None = None,
    pairing: int = 0,
    norm: int = 1,
    weight_gradient: bool = False,
    programs: int = 528,
) -> OpCost:
    """Work of forward and backward over ``q [T, Q, D]``, ``k [T, K, DK]`` and tables ``[T, W]``.

    Floor of the forward: both in, both out, half a table of cos and of sin. Floor of the backward: both
    inputs and both gradients in (without a norm only the gradients), both gradients out, the tables again.
    The kernels read whole tables; rstd is computed again, so nothing is saved.

    Args:
        DK: width of the keys where it is not D.
        pairing: position in ``contract.PAIRINGS``: names the case, moves the same bytes.
        norm: 1 where heads are normalised, else 0.
        weight_gradient: whether the norms' weights learn.
        programs: programs of the backward grid (four on each of 132 multiprocessors).
    """
    b, rows, width = BYTES[dtype], T * (Q + K), D if DK is None else DK
    n, turning = T * (Q * D + K * width), rows * W
    weights = (D + width) * b if norm else 0
    tables, least_tables = 2 * T * W * b, T * W * b
    learns = bool(norm) and weight_gradient
    partial = min(programs, rows) * max(D, width) * 4 if learns else 0
    dweight = weights if learns else 0
    flops = (NORM_FLOPS * n if norm else 0) + TURN_FLOPS * turning
    forward = PassCost(
        flops=flops,
        bytes_read=n * b + weights + tables,
        bytes_written=n * b,
        launches=1,
        floor_flops=flops,
        floor_bytes=2 * n * b + weights + least_tables,
    )
    inward = 2 * n * b if norm else n * b
    back = ((NORM_BACK_FLOPS + (WEIGHT_FLOPS if learns else 0)) * n if norm else 0) + TURN_FLOPS * turning
    backward = PassCost(
        flops=back + (3 * n if norm else 0),
        bytes_read=inward + weights + tables + partial,
        bytes_written=n * b + partial + dweight,
        launches=3 if learns else 1,
        workspace_bytes=partial,
        floor_flops=back,
        floor_bytes=inward + n * b + weights + least_tables + dweight,
    )
    return OpCost(
        op="qk_norm_rope",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "Q": Q, "K": K, "D": D, "W": W, "DK": width, "pairing": pairing, "norm": norm},
        forward=forward,
        backward=backward,
        saved_bytes=0,
    )
