"""Counted work of head and cross-entropy. No torch, no device, no milliseconds.

Legend: T tokens, H hidden, V vocabulary, r LoRA rank, C rows of a chunk, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.kernels.linear_cross_entropy.configs import chunk_rows, stride
from shardwright.schemas.ops import OpCost, PassCost

STATISTIC_BYTES = 4
TARGET_BYTES = 8


def cost(T: int, H: int, V: int, dtype: str, *, r: int = 0, weight_gradient: bool = False) -> OpCost:
    """Work over ``x [T, H]`` with a frozen head ``[V, H]``; both products are in the forward, dx included.

    Forward, for each chunk: the head is read for the logits and again for dx; logits are written, read
    twice, overwritten by their gradient and read again. Backward scales dx. LoRA adds six products of rank r
    (two forward; through B, through A, dA, dB) and a pass over the logits for each of those that meet them.

    Args:
        r: rank of LoRA on the head; 0 without.
        weight_gradient: accepted for the common signature; a head that learns is refused by the contract.
    """
    del weight_gradient
    b, n, product = BYTES[dtype], T * V, 2 * T * H * V
    C = min(max(1, T), chunk_rows(T, V, b))
    chunks = -(-T // C)
    head, x = V * H * b, T * H * b
    low, factors, adapted = 6 * T * r * (H + V), r * (H + V) * b, int(r > 0)
    forward = PassCost(
        flops=2 * product + 8 * n + low,
        bytes_read=2 * chunks * (head + factors) + (1 + 2 * adapted) * x + 3 * (1 + adapted) * n * b + T * TARGET_BYTES,
        bytes_written=(2 + adapted) * n * b + (1 + adapted) * x + T * STATISTIC_BYTES + 2 * chunks * factors,
        launches=(3 + 9 * adapted) * chunks + 3 + 2 * adapted,
        workspace_bytes=C * stride(V) * b,
        floor_flops=2 * product + low,
        floor_bytes=head + factors + 2 * x + T * TARGET_BYTES,
    )
    learned = r * (H + V)
    backward = PassCost(
        flops=T * H + learned,
        bytes_read=x + learned * 4,
        bytes_written=x + learned * b,
        launches=1 + 2 * adapted,
        floor_flops=0,
        floor_bytes=factors,
    )
    return OpCost(
        op="linear_cross_entropy",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "H": H, "V": V, **({"r": r} if r else {})},
        forward=forward,
        backward=backward,
        saved_bytes=x + learned * 4,
    )


def loss_cost(T: int, H: int, V: int, dtype: str, *, r: int = 0, weight_gradient: bool = False) -> OpCost:
    """Work of the loss alone, where nothing wants a gradient: one product, logits written once and read once."""
    whole = cost(T, H, V, dtype, r=r, weight_gradient=weight_gradient)
    b, n, product = BYTES[dtype], T * V, 2 * T * H * V
    C = min(max(1, T), chunk_rows(T, V, b))
    chunks = -(-T // C)
    head, x, low, factors = V * H * b, T * H * b, 2 * T * r * (H + V), r * (H + V) * b
    adapted = int(r > 0)
    forward = whole.forward.model_copy(
        update={
            "flops": product + 5 * n + low,
            "bytes_read": chunks * (head + factors) + (1 + adapted) * (x + n * b) + T * TARGET_BYTES,
            "bytes_written": (1 + adapted) * n * b + T * STATISTIC_BYTES,
            "launches": (2 + 2 * adapted) * chunks + 3,
            "floor_flops": product + low,
            "floor_bytes": head + factors + x + T * TARGET_BYTES,
        }
    )
    return whole.model_copy(update={"forward": forward, "backward": None, "saved_bytes": 0})
