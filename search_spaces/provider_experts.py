"""What experts cost that are not stacks for one grouped product: a loop over experts, and neurons in tables.

Weights are frozen. Legend: R routed rows, T tokens, K experts per token, E experts, H hidden, I expert width,
b bytes per value.
"""

from __future__ import annotations

from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.provider_chain import BYTES, Moves, Step, by_kernels, moved, product

FIND_LAUNCHES = 3
"""Kernels that find one expert's rows: count, places, and the copy of the count to the host. Assumed."""


def experts_loop(provider: str, dtype: str, R: int, H: int, I: int, E: int) -> OpCost:
    """Each expert with rows: find them, gather, three products with a gate between, weight, add.

    Bytes are those of all experts together. Compiled, what stands between two products is one kernel; the loop itself
    stays in Python.
    """
    b, eager, hit = BYTES[dtype], provider == "eager", min(E, R)
    x, n = R * H * b, R * I * b
    entrance, leaving = product(R, H, I, b, stacks=hit), product(R, I, H, b, stacks=hit)
    gate: Moves = [(n, n), (2 * n, n)] if eager else [(2 * n, n)]
    added: Moves = [(x, x), (2 * x, x)] if eager else [(2 * x, x)]
    back_gate: Moves = [(3 * n, 2 * n), (2 * n, n)] if eager else [(3 * n, 2 * n)]
    back_added: Moves = [(x, x), (2 * x, x)] if eager else [(2 * x, x)]
    sums: Moves = [(2 * x, x), (2 * x, x)] if eager else [(3 * x, x)]
    forward = [Step(x, x), entrance, entrance, *moved(gate), leaving, *moved(added)]
    backward = [*moved(back_added), entrance, *moved(back_gate), leaving, leaving, *moved(sums)]
    flops, floor = 6 * R * H * I, hit * 3 * H * I * b + 2 * x
    return by_kernels(
        "experts_loop",
        provider,
        dtype,
        {"R": R, "H": H, "I": I, "E": E},
        (_each(forward, hit, FIND_LAUNCHES), _each(backward, hit, 0)),
        floor_bytes=(floor, floor),
        floor_flops=(flops, flops),
        saved=2 * x + 3 * n,
    )


def _each(steps: list[Step], times: int, more: int) -> list[Step]:
    """The same work in ``times`` portions, with ``more`` kernels in each that move next to nothing."""
    return [*steps, *[Step(0, 0)] * (times * (len(steps) + more) - len(steps))]


def experts_embedding(provider: str, dtype: str, T: int, K: int, H: int, E: int) -> OpCost:
    """Two tables looked up, a product with each, an activation and a weight between.

    The looked-up rows are written out and read again: both products are library calls, compiled too.
    """
    b, eager = BYTES[dtype], provider == "eager"
    rows, x, small, numbers = T * K * H * b, T * H * b, T * K * b, 8 * T * K
    looked_up = [Step(rows + numbers, rows)] * 2
    gate: Moves = [(small, small), (2 * small, small)] if eager else [(2 * small, small)]
    back_gate: Moves = [(3 * small, 2 * small), (2 * small, small)] if eager else [(3 * small, 2 * small)]
    dots, mixed = Step(rows + x, small, 2 * T * K * H), Step(rows + small, x, 2 * T * K * H)
    flops, floor = 4 * T * K * H, 2 * min(E, T * K) * H * b + 2 * x
    return by_kernels(
        "experts_embedding",
        provider,
        dtype,
        {"T": T, "K": K, "H": H, "E": E},
        ([*looked_up, dots, *moved(gate), mixed], [dots, *moved(back_gate), mixed]),
        floor_bytes=(floor, floor),
        floor_flops=(flops, flops),
        saved=2 * rows + 2 * small,
    )
