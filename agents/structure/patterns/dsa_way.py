"""Which way sparse attention runs rows of one length, dense or sparse, and why: in words for the decision.

What is exact decides first: a query that sees no more keys than it selects attends to all of them, so dense attention
is the same function. Beyond that the times of both ways are told, measured where the kernels' crossover file has this
device and these sizes, else counted work over the device's rates.
Legend: T tokens a row, H heads, N indexer heads, D indexer width, K selected keys, V latent width, R rotated width.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.kernels.dsa.attention.choose import MEASURED, TIMES, Measured, between, choose
from shardwright.kernels.dsa.cost import cost, dense_cost
from shardwright.schemas.cluster import DeviceSpec
from shardwright.search_spaces.cost.compute import op_time_ms

PASSES = "fwd+dx"
STEP, LAST = 1024, 1 << 18
"""Lengths between which the times are compared, in whole steps."""


@dataclass(frozen=True)
class LayerSizes:
    """Of one layer."""

    H: int
    N: int
    """0 where the choice is handed in or its scores are not counted."""
    D: int
    K: int
    V: int
    R: int
    key: int
    """Width of a head's key in dense attention."""
    value: int


MEASURED_SIZES = LayerSizes(H=64, N=64, D=128, K=2048, V=512, R=64, key=192, value=128)
"""What the crossover file's times are of."""
Times = Callable[[int], tuple[float, float]]
"""Tokens a row → milliseconds of a forward and backward, dense and sparse with the choice that is counted."""


def told(sizes: LayerSizes, tokens: int, device: DeviceSpec, dtype: str) -> str:
    """The way of rows of so many tokens, what decided, and where the times cross."""
    limit = f"dense up to {sizes.K} tokens a row, where a query selects all that it sees"
    if tokens <= sizes.K:
        return f"rows of {tokens} tokens run dense ({limit}: the same function, and no indexer runs)"
    times, basis = _times(sizes, device, dtype)
    dense, sparse = times(tokens)
    counted = "sparse with its indexer" if sizes.N else "sparse without what chooses"
    seen = crossing(times)
    where = f"from {seen} tokens a row on" if seen else f"at no length up to {LAST}"
    return (
        f"rows of {tokens} tokens run sparse ({limit}; longer ones would be another function dense). Forward and "
        f"backward: {dense:.3g} ms dense, {sparse:.3g} ms {counted}; sparse is faster {where} ({basis})"
    )


def faster(sizes: LayerSizes, tokens: int, device: DeviceSpec) -> str:
    """The way where the recipe lets rows attend to all keys when that takes less time: what workers choose by."""
    found = choose(tokens, sizes.K, device.name, training=True, dense_is_meant=True)
    return f"rows of {tokens} tokens run {found.path}, the faster way that the recipe allows: {found.reason}"


def crossing(times: Times) -> int:
    """The shortest row, in steps of 1,024 tokens, from which on the sparse way takes less time; 0 for none.

    Dense attention grows by the square and the sparse way by less, so they cross once: doubling finds where about,
    halving the step.
    """

    def faster(steps: int) -> bool:
        dense, sparse = times(steps * STEP)
        return sparse < dense

    last = LAST // STEP
    above = next((1 << power for power in range(last.bit_length()) if faster(1 << power)), 0)
    return (bisect_left(range(above + 1), True, lo=above // 2 + 1, key=faster) if above > 1 else above) * STEP


def _times(sizes: LayerSizes, device: DeviceSpec, dtype: str) -> tuple[Times, str]:
    seen = MEASURED.get(device.name)
    alike = sizes in (MEASURED_SIZES, _handed(MEASURED_SIZES))
    if seen is not None and alike and dtype == "bfloat16":
        basis = json.loads(TIMES.read_bytes())[device.name]["basis"]
        return _measured(seen, indexer=bool(sizes.N)), f"measured on {device.name}: {basis}"
    return _modelled(sizes, device, dtype), f"modelled: counted work over the rates of {device.name}"


def _handed(sizes: LayerSizes) -> LayerSizes:
    """The same layer with a choice of another."""
    return LayerSizes(**{**vars(sizes), "N": 0, "D": 0})


def _measured(seen: Measured, *, indexer: bool) -> Times:
    def times(T: int) -> tuple[float, float]:
        dense, sparse = (sum(between({t: ms[at] for t, ms in way.items()}, T) for at in (0, 1)) for way in ways)
        return dense, sparse + (between(seen.indexer, T) if indexer else 0.0)

    ways = (seen.dense, seen.sparse)
    return times


def _modelled(sizes: LayerSizes, device: DeviceSpec, dtype: str) -> Times:
    def times(T: int) -> tuple[float, float]:
        dense = dense_cost(T, sizes.H, dtype, D=sizes.key, V=sizes.value)
        few = min(T, sizes.K)
        sparse = cost(T, sizes.H, dtype, N=sizes.N, D=sizes.D, K=few, V=sizes.V, R=sizes.R)
        return op_time_ms(dense, device, PASSES), op_time_ms(sparse, device, PASSES)

    return times
