"""Counted work of Gated DeltaNet. No torch, no device, no milliseconds.

Legend: T tokens of all documents, H key heads, HV value heads, K, V widths, C tokens of a chunk, b bytes a value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.kernels.kda.configs import CHUNK
from shardwright.schemas.ops import OpCost, PassCost

DOUBLINGS = 5
"""Steps of the triangular inverse."""


def cost(
    T: int, H: int, K: int, V: int, dtype: str, *, HV: int = 0, docs: int = 1, weight_gradient: bool = True
) -> OpCost:
    """Work of forward and backward over q, k ``[T, H, K]`` and v ``[T, HV, V]``; the floors as ``kda.cost``.

    A gate is one number a head: running sums and the gate's gradient are not counted beside the widths.
    """
    HV, b, C = HV or H, BYTES[dtype], CHUNK
    chunks = -(-T // C) + docs - 1
    n = chunks * HV
    rows = chunks * C * HV
    keys, values, square, state = rows * K * b, rows * V * b, rows * C * b, n * K * V * b
    states = docs * HV * K * V * 4
    read = T * (2 * H * K + HV * V + 2 * HV) * b
    out = T * HV * V * b

    def product(times: float, m: int, k: int, w: int) -> int:
        return int(times * 2 * m * k * w) * n

    widths = product(1, C, C, V + K)
    inside = product(2, C, K, C) + product(2 * DOUBLINGS, C, C, C) + widths
    chain = product(2, C, K, V)
    least = product(1, C, K, C) + product(1, C, C, V + K) + product(3, C, K, V) + product(0.5, C, C, V)
    tiles, solved = 3 * keys + values, 2 * square + 2 * 4 * chunks * C * HV
    forward = PassCost(
        flops=inside + chain + product(1, C, K, V) + product(1, C, C, V),
        bytes_read=read + tiles + square + states,
        bytes_written=tiles + solved + out + states,
        launches=3,
        workspace_bytes=tiles,
        floor_flops=least,
        floor_bytes=read + out + 2 * states,
    )
    reverse = product(3, C, K, V) + product(1, C, C, V)
    gradients = product(3, C, K, V) + product(3, C, C, V) + product(4, C, C, K)
    backward = PassCost(
        flops=widths + chain + reverse + gradients,
        bytes_read=read + solved - square + 2 * keys + values  # tiles again, states again
        + 3 * keys + square + out + states  # reverse
        + 3 * values + square + out  # values
        + read + 2 * values + out + 2 * state + 2 * square,  # keys
        bytes_written=tiles + values + state
        + state + values + out + values + 2 * square + 2 * T * HV * K * b + states,
        launches=8,
        workspace_bytes=tiles + 2 * state + values,
        floor_flops=2 * least,
        floor_bytes=2 * read + 2 * out + 2 * states,
    )  # fmt: skip
    return OpCost(
        op="gated_delta",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "H": H, "K": K, "V": V, "HV": HV, "docs": docs},
        forward=forward,
        backward=backward,
        saved_bytes=out + solved,
    )
