"""Counted work of the router. No torch, no device, no milliseconds.

Legend: T tokens, E experts, k chosen experts, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.schemas.ops import OpCost, PassCost

PICK_BYTES = 4 + 8
"""One chosen expert: fp32 weight, int64 index."""


def cost(T: int, E: int, k: int, dtype: str, *, weight_gradient: bool = False, programs: int = 2112) -> OpCost:
    """Work over ``logits [T, E]``; statistics included.

    Forward reads the logits, writes weights and experts, and one fp32 row of probability sums a program,
    which a second launch reads. Backward reads logits, experts and dweights and writes dlogits.

    Args:
        weight_gradient: accepted for the common signature; the router has no weight of its own.
        programs: programs of a pass (16 on each of 132 multiprocessors).
    """
    del weight_gradient
    b, n, partial = BYTES[dtype], T * E, min(programs, max(T, 1)) * E * 4
    picks, statistics = T * k * PICK_BYTES, E * 8
    operations = 8 * n + 6 * n * k
    return OpCost(
        op="router",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "E": E, "k": k},
        forward=PassCost(
            flops=operations,
            bytes_read=n * b + partial,
            bytes_written=picks + partial + statistics,
            launches=3,
            workspace_bytes=partial,
            floor_flops=8 * n,
            floor_bytes=n * b + picks + statistics,
        ),
        backward=PassCost(
            flops=8 * n + 3 * n * k,
            bytes_read=n * b + picks,
            bytes_written=n * b,
            launches=1,
            floor_flops=8 * n,
            floor_bytes=2 * n * b + picks,
        ),
        saved_bytes=T * k * 8,
    )
