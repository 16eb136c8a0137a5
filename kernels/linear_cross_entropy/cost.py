"""Counted work of head and cross-entropy. No torch, no device, no milliseconds.

Legend: T tokens, H hidden, V vocabulary, C rows of a chunk, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.kernels.linear_cross_entropy.configs import chunk_rows, stride
from shardwright.schemas.ops import OpCost, PassCost

STATISTIC_BYTES = 4
TARGET_BYTES = 8


def cost(T: int, H: int, V: int, dtype: str, *, weight_gradient: bool = False) -> OpCost:
    """Work over ``x [T, H]`` with a frozen head ``[V, H]``; both products are in the forward, dx included.

    Forward, for each chunk: the head is read for the logits and again for dx; logits are written, read
    twice, overwritten by their gradient and read again. Backward scales dx. No LoRA on the head counted.

    Args:
        weight_gradient: accepted for the common signature; a head that learns is refused by the contract.
    """
    del weight_gradient
    b, n, product = BYTES[dtype], T * V, 2 * T * H * V
    C = min(max(1, T), chunk_rows(T, V, b))
    chunks = -(-T // C)
    head, x = V * H * b, T * H * b
    forward = PassCost(
        flops=2 * product + 8 * n,
        bytes_read=2 * chunks * head + x + 3 * n * b + T * TARGET_BYTES,
        bytes_written=2 * n * b + x + T * STATISTIC_BYTES,
        launches=3 * chunks + 3,
        workspace_bytes=C * stride(V) * b,
        floor_flops=2 * product,
        floor_bytes=head + 2 * x + T * TARGET_BYTES,
    )
    backward = PassCost(flops=T * H, bytes_read=x, bytes_written=x, launches=1, floor_flops=0, floor_bytes=0)
    return OpCost(
        op="linear_cross_entropy",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "H": H, "V": V},
        forward=forward,
        backward=backward,
        saved_bytes=x,
    )
