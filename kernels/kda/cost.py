"""Counted work of KDA. No torch, no device, no milliseconds.

Legend: T tokens of all documents, H key heads, HV value heads, K, V widths, C tokens of a chunk, b bytes a value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.kernels.kda.configs import CHUNK
from shardwright.schemas.ops import OpCost, PassCost

LEVELS, DOUBLINGS = 3, 5
"""Pair products of a chunk with a bounded gate, and steps of the triangular inverse."""


def cost(
    T: int,
    H: int,
    K: int,
    V: int,
    dtype: str,
    *,
    HV: int = 0,
    docs: int = 1,
    weight_gradient: bool = True,
    keep: bool = False,
) -> OpCost:
    """Work of forward and backward over q, k ``[T, H, K]`` and v ``[T, HV, V]``.

    The floors are the inputs and gradients once, and the recurrence's products in chunks: no pair product twice, no
    intermediate. ``weight_gradient`` changes nothing that is counted: the sums over chunks are small.

    Args:
        HV: value heads; H where 0.
        docs: documents; each has its own last chunk, and an initial and a final state.
        keep: whether the forward leaves its tiles and states for the backward.
    """
    HV, b, C = HV or H, BYTES[dtype], CHUNK
    chunks = -(-T // C) + docs - 1
    n = chunks * HV
    rows = chunks * C * HV
    keys, values, square, state = rows * K * b, rows * V * b, rows * C * b, n * K * V * b
    total = rows * K * 4
    states = docs * HV * K * V * 4
    read = T * (2 * H * K + HV * V + HV * K + HV) * b
    out = T * HV * V * b

    def product(times: float, m: int, k: int, w: int) -> int:
        return int(times * 2 * m * k * w) * n

    pairs = product(2 * LEVELS, C, K, C)
    solve = product(2 * DOUBLINGS, C, C, C)
    widths = product(1, C, C, V) + product(1, C, C, K)
    chain = product(2, C, K, V)
    forward_flops = pairs + solve + widths + chain + product(1, C, K, V) + product(1, C, C, V)
    least = product(1, C, K, C) + product(1, C, C, V + K) + product(3, C, K, V) + product(0.5, C, C, V)
    prepared = 3 * keys + values + square
    gate_read, gate_written = T * HV * K * b, total
    forward = PassCost(
        flops=forward_flops,
        bytes_read=gate_read + read - gate_read + 2 * total + prepared + states,
        bytes_written=gate_written + prepared + out + states,
        launches=3,
        workspace_bytes=prepared + total,
        floor_flops=least,
        floor_bytes=read + out + 2 * states,
    )
    again = pairs + solve + widths + chain
    reverse = product(3, C, K, V) + product(1, C, C, V)
    inside = product(3, C, K, V) + product(3, C, C, V) + product(4 * LEVELS, C, C, K)
    backward = PassCost(
        flops=again + reverse + inside,
        bytes_read=read + out
        + 2 * total + 2 * keys + values  # prepared again, states again
        + 3 * keys + square + out + states  # reverse
        + 3 * values + square + out  # values
        + read + total + 2 * values + out + 2 * state + 2 * square,  # keys
        bytes_written=gate_written + prepared + square + values + state
        + state + 2 * values + T * HV * V * b + 2 * square + 3 * T * HV * K * b + states,
        launches=8,
        workspace_bytes=prepared + total + square + 2 * state + values,
        floor_flops=2 * least,
        floor_bytes=2 * read + 2 * out + 2 * states,
    )  # fmt: skip
    saved = out
    if keep:
        more = square + values + state
        forward = forward.model_copy(
            update={"bytes_written": forward.bytes_written + more, "workspace_bytes": 0},
        )
        backward = backward.model_copy(
            update={
                "flops": backward.flops - again,
                "bytes_read": backward.bytes_read - read - 2 * total - 2 * keys - values,
                "bytes_written": backward.bytes_written - gate_written - prepared - more,
                "launches": backward.launches - 3,
                "workspace_bytes": state + values,
            },
        )
        saved += prepared + total + square + state
    return OpCost(
        op="kda",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "H": H, "K": K, "V": V, "HV": HV, "docs": docs},
        forward=forward,
        backward=backward,
        saved_bytes=saved,
    )
