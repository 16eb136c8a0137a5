"""Plans one step from a given one: what a study tries beside its sampler's draws.

The world is the product of the mesh's degrees, so none of them changes alone: the step that leaves everything else as
it is passes a prime factor from one degree to another. It changes how many sequences a rank has. One version keeps
the micro-batch, the other the number of micro-batches, which suits a sequence that is cut into more or fewer pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes import AXES, MESH, checkpointed_layers
from shardwright.search_spaces.axes.base import draws_of
from shardwright.search_spaces.axes.micro_batch import sequences_per_rank
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.space import allowed_values, signature, strategy_from

DEGREES = ("pp", "cp", "tp", "replicate", "ep", "shard")
"""Axes whose product is the world."""

MICRO = "micro_batch_sequences"
WITH_LAYERS = ("checkpointing", "layers")

Change = dict[str, Any]


Known = dict[tuple[Any, ...], tuple[Any, ...]]
"""Legal values of an axis after the mesh, by all that they may depend on."""


def neighbours(
    context: SearchContext, plan: ParallelStrategy, default: tuple[str, ...] = ()
) -> Iterator[ParallelStrategy]:
    """Legal plans one step away; one may come twice.

    Whatever a change makes illegal takes the nearest legal value.

    Args:
        default: axes that stay at their first value.
    """
    for draws in steps(context, draws_of(plan), default):
        yield strategy_from(draws)


def steps(
    context: SearchContext, old: Change, default: tuple[str, ...] = (), known: Known | None = None
) -> Iterator[Change]:
    """``neighbours`` as values by axis name.

    Args:
        known: filled by earlier calls of the same search, which it makes quicker.
    """
    known = {} if known is None else known
    for change in (*_transfers(old), *_single(context, old, default)):
        yield _moved(context, old, change, default, known)
        if any(degree in change for degree in DEGREES):
            yield _moved(context, old, change, default, known, keep_steps=True)


def _single(context: SearchContext, old: Change, default: tuple[str, ...]) -> Iterator[Change]:
    """Every other value of one axis, but not which layers are recomputed: that takes more than a value."""
    for position, axis in enumerate(AXES):
        if axis.name not in default:
            before = {earlier.name: old[earlier.name] for earlier in AXES[:position]}
            for value in allowed_values(context, before, position):
                if value != old[axis.name] and (axis.name, value) != WITH_LAYERS:
                    yield {axis.name: value}


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
    context: SearchContext,
    old: Change,
    change: Change,
    default: tuple[str, ...],
    known: Known,
    *,
    keep_steps: bool = False,
) -> Change:
    """The plan with a change.

    Args:
        keep_steps: the number of micro-batches stays, not their size.
    """
    first = next(place for place, axis in enumerate(AXES) if axis.name in change)
    draws: dict[str, Any] = {axis.name: old[axis.name] for axis in AXES[:first]}
    seen: tuple[Any, ...] = ()
    for position, axis in enumerate(AXES[first:], first):
        if position < len(MESH):
            allowed = allowed_values(context, draws, position)
        else:
            seen = seen or (signature(context, draws), *(draws[one.name] for one in AXES[len(MESH) : position]))
            if seen not in known:
                known[seen] = allowed_values(context, draws, position)
            allowed = known[seen]
        wanted = allowed[0] if axis.name in default else change.get(axis.name, old[axis.name])
        if axis.name == MICRO and keep_steps:
            wanted = max(1, (sequences_per_rank(context, draws) or 1) // old["accumulation_steps"])
        draws[axis.name] = wanted if wanted in allowed else _nearest(allowed, wanted)
        seen = (*seen, draws[axis.name]) if seen else ()
    if ("checkpointing", draws["checkpointing"]) == WITH_LAYERS:
        draws[checkpointed_layers.NAME] = old[checkpointed_layers.NAME]
    return draws


def _nearest(allowed: tuple[Any, ...], wanted: Any) -> Any:
    """The number closest to the wanted one; for other values the default."""
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return min(allowed, key=lambda one: (abs(one - wanted), one))
    return allowed[0]
