"""Counted work of KDA. No torch, no device, no milliseconds.

Legend: T tokens of all documents, H key heads, HV value heads, K, V widths, C tokens of a chunk, b bytes a value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.kernels.kda.configs import CHUNK
from shardwright.schemas.ops import OpCost, PassCost

LEVELS = 3
"""Pair products of a chunk in the keys kernel, with a bounded gate."""
BLOCK = 32
"""Key channels of a program of the keys kernel, each of which leaves a part of beta's gradient."""
TRIANGLE = 10 / 16
"""Blocks of 16 tokens on and below a chunk's diagonal, of all."""
SOLVE_PRODUCTS = 40
"""Products of blocks of 16 tokens in a chunk's inverse: 6 for each of 4 on the diagonal, 16 for the rest."""


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
        keep: whether the forward leaves its tiles and states for the backward, beside pairs and inverse.
    """
    HV, b, C = HV or H, BYTES[dtype], CHUNK
    chunks = -(-T // C) + docs - 1
    n = chunks * HV
    rows = chunks * C * HV
    keys, values, square, state = rows * K * b, rows * V * b, rows * C * b, n * K * V * b
    total = rows * K * 4
    shares = (1 + K // BLOCK) * rows * 4
    states = docs * HV * K * V * 4
    read = T * (2 * H * K + HV * V + HV * K + HV) * b
    out = T * HV * V * b

    def product(times: float, m: int, k: int, w: int) -> int:
        return int(times * 2 * m * k * w) * n

    pairs = product(2 * TRIANGLE, C, K, C)
    solve = product(SOLVE_PRODUCTS / 64, C, C, C)
    widths = product(2, C, C, V) + product(1, C, C, K)
    chain = product(2, C, K, V)
    forward_flops = pairs + solve + widths + chain + product(1, C, K, V) + product(1, C, C, V)
    least = product(1, C, K, C) + product(1, C, C, V + K) + product(3, C, K, V) + product(0.5, C, C, V)
    norms, ends = 2 * 4 * chunks * C * HV, total // C
    solved = 2 * square + norms
    tiles = 3 * keys + values
    gated = T * HV * K * b
    narrow = T * (2 * H * K + HV) * b
    widths_read = read - gated + total + square + norms
    forward = PassCost(
        flops=forward_flops,
        bytes_read=gated  # gate
        + narrow + total  # pairs
        + widths_read
        + tiles + square + ends + states,  # scan
        bytes_written=total + solved + tiles + out + states,
        launches=4,
        workspace_bytes=tiles + total,
        floor_flops=least,
        floor_bytes=read + out + 2 * states,
    )  # fmt: skip
    again = widths + chain
    again_read = gated + widths_read + 2 * keys + values + ends
    again_written = total + tiles + values + state
    reverse = product(3, C, K, V) + product(1, C, C, V)
    inside = product(3, C, K, V) + product(5, C, C, V) + product(6 * LEVELS, C, C, K)
    backward = PassCost(
        flops=again + reverse + inside,
        bytes_read=again_read
        + 3 * keys + square + out + ends + states  # reverse
        + 3 * values + square + 2 * out  # values
        + read + total + 2 * values + out + 2 * state + 3 * square  # keys
        + shares + T * HV * b,
        bytes_written=again_written
        + state + 2 * values + 2 * out + 3 * square + 3 * T * HV * K * b + shares + states,
        launches=9,
        workspace_bytes=tiles + total + 2 * state + values,
        floor_flops=2 * least,
        floor_bytes=2 * read + 2 * out + 2 * states,
    )  # fmt: skip
    saved = out + solved
    if keep:
        forward = forward.model_copy(
            update={"bytes_written": forward.bytes_written + values + state, "workspace_bytes": 0},
        )
        backward = backward.model_copy(
            update={
                "flops": backward.flops - again,
                "bytes_read": backward.bytes_read - again_read,
                "bytes_written": backward.bytes_written - again_written,
                "launches": backward.launches - 3,
                "workspace_bytes": state + values,
            },
        )
        saved += tiles + total + state
    return OpCost(
        op="kda",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "H": H, "K": K, "V": V, "HV": HV, "docs": docs},
        forward=forward,
        backward=backward,
        saved_bytes=saved,
    )
