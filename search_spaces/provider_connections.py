"""What a hyper-connection's weights, and the sum of streams that they give, cost eagerly and compiled.

Legend: T tokens, N residual streams, H hidden, M = 2·N + N² numbers a token, S Sinkhorn steps, b bytes per value.
"""

from __future__ import annotations

from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.provider_chain import BYTES, Moves, Step, by_kernels, moved

SMALL = 11, 4
"""Kernels on M numbers a token beside Sinkhorn's steps, (forward, backward), eager."""

COMPILED_STEPS = 2, 4
"""Kernels of one Sinkhorn step, (forward, backward), compiled; assumed: sums over four values are unrolled, but not all
steps into one kernel (on one H200 twenty compiled steps, forward and backward, take 0.45 of eager's 122 kernels)."""


def hyper_connection(provider: str, dtype: str, T: int, N: int, H: int, S: int) -> OpCost:
    """Normalised streams times M directions, in fp32; weights by token; N streams summed to one."""
    b, M = BYTES[dtype], 2 * N + N * N
    n, f, y = T * N * H * b, 4 * T * N * H, T * H * b
    wide_y, small, numbers, weights = 4 * T * H, 4 * T, 4 * T * M, 4 * M * N * H
    matrix, vector = 4 * T * N * N, 4 * T * N
    flops = 2 * T * N * H * M
    product = Step(f + weights, numbers, flops), Step(numbers + weights, f, flops)
    if provider == "eager":
        half: Moves = [(matrix, vector), (vector, vector), (matrix + vector, matrix)]
        back: Moves = [(matrix + vector, matrix)] * 7
        before: Moves = [(n, f), (f, f), (f, small), (f + small, f)]
        after: Moves = [(n + vector, f), (f, wide_y), (wide_y, y)]
        forward = [*moved(before), product[0], *moved([(vector, vector)] * SMALL[0] + 2 * S * half), *moved(after)]
        summed: Moves = [(y, wide_y), (wide_y + vector, f), (wide_y + n, f), (f, vector), (f, n)]
        normed: Moves = [(2 * f, f), (f + small, f), (f, small), (small, f), (f, f), (f, f), (2 * f, f), (2 * f, f)]
        steps = moved([(vector, vector)] * SMALL[1] + 2 * S * back)
        backward = [*moved(summed), *steps, product[1], *moved(normed), *moved([(f, n), (2 * n, n)])]
        saved = 3 * f
    else:
        steps_forward, steps_backward = (S * times * [(matrix, matrix)] for times in COMPILED_STEPS)
        forward = [*moved([(n, f)]), product[0], *moved(steps_forward), *moved([(n + vector, y)])]
        backward = [*moved([(y + n, vector)]), *moved(steps_backward), product[1]]
        backward += moved([(f + n, small), (f + n + y + small, n)])
        saved = f
    least = (n + y + numbers + weights, 2 * n + y + numbers + weights)
    sizes = {"T": T, "N": N, "H": H, "S": S}
    return by_kernels(
        "hyper_connection",
        provider,
        dtype,
        sizes,
        (forward, backward),
        floor_bytes=least,
        floor_flops=(flops, flops),
        saved=saved,
    )
