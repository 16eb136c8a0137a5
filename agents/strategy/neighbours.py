"""Plans one step from a given one: what a study tries beside its sampler's draws.

The world is the product of the mesh's degrees, so none of them changes alone: the step that leaves everything else as
it is passes a prime factor from one degree to another. It changes how many sequences a rank has. One version keeps
the micro-batch, the other the number of micro-batches, which suits a sequence that is cut into more or fewer pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes import AXES
from shardwright.search_spaces.axes.micro_batch import sequences_per_rank
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.space import allowed_values, strategy_from

DEGREES = ("pp", "cp", "tp", "replicate", "ep", "shard")
"""Axes whose product is the world."""

MICRO = "micro_batch_sequences"

Change = dict[str, Any]
Promise = Callable[[str, Any], float]
"""(axis, value) → how it has done so far, less is better."""


def neighbours(
    context: SearchContext, plan: ParallelStrategy, default: tuple[str, ...] = (), promise: Promise | None = None
) -> Iterator[ParallelStrategy]:
    """Legal plans one step away, then those that differ in two axes.

    Whatever a change makes illegal takes the nearest legal value. A plan may come twice.

    Args:
        default: axes that stay at their first value.
        promise: within each group the most promising changes come first; without it, axes in sampling order.
    """
    old = {axis.name: axis.read(plan) for axis in AXES}

    def worst(change: Change) -> float:
        return 0.0 if promise is None else max(promise(axis, value) for axis, value in change.items())

    single = sorted(_single(context, old, default), key=worst)
    for change in sorted((*_transfers(old), *single), key=worst):
        yield _moved(context, old, change, default)
        if any(degree in change for degree in DEGREES):
            yield _moved(context, old, change, default, keep_steps=True)
    pairs = ({**one, **other} for one, other in combinations(single, 2) if one.keys() != other.keys())
    for change in sorted(pairs, key=worst):
        yield _moved(context, old, change, default)


def _single(context: SearchContext, old: Change, default: tuple[str, ...]) -> Iterator[Change]:
    """Every other value of one axis."""
    for position, axis in enumerate(AXES):
        if axis.name not in default:
            before = {earlier.name: old[earlier.name] for earlier in AXES[:position]}
            allowed = allowed_values(context, before, position)
            yield from ({axis.name: value} for value in allowed if value != old[axis.name])


def _transfers(old: Change) -> Iterator[Change]:
    """A prime factor from one degree of the mesh to another."""
    for giver in DEGREES:
        for prime in _primes(old[giver]):
            for taker in DEGREES:
                if taker != giver:
                    yield {giver: old[giver] // prime, taker: old[taker] * prime}


def _primes(number: int) -> list[int]:
    """The different primes that divide a number."""
    found, rest = [], number
    for candidate in range(2, number + 1):
        if rest % candidate == 0:
            found.append(candidate)
        while rest % candidate == 0:
            rest //= candidate
    return found


def _moved(
    context: SearchContext, old: Change, change: Change, default: tuple[str, ...], *, keep_steps: bool = False
) -> ParallelStrategy:
    """The plan with a change.

    Args:
        keep_steps: the number of micro-batches stays, not their size.
    """
    draws: dict[str, Any] = {}
    for position, axis in enumerate(AXES):
        allowed = allowed_values(context, draws, position)
        wanted = allowed[0] if axis.name in default else change.get(axis.name, old[axis.name])
        if axis.name == MICRO and keep_steps:
            wanted = max(1, (sequences_per_rank(context, draws) or 1) // old["accumulation_steps"])
        draws[axis.name] = wanted if wanted in allowed else _nearest(allowed, wanted)
    return strategy_from(draws)


def _nearest(allowed: tuple[Any, ...], wanted: Any) -> Any:
    """The number closest to the wanted one; for other values the default."""
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return min(allowed, key=lambda one: (abs(one - wanted), one))
    return allowed[0]
