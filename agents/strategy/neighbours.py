"""Plans one step from a given one: what a study tries beside its sampler's draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes import AXES
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.space import allowed_values, strategy_from


def neighbours(
    context: SearchContext, plan: ParallelStrategy, default: tuple[str, ...] = ()
) -> Iterator[ParallelStrategy]:
    """Legal plans that differ in one axis, axes in sampling order, then in two that stand next to each other.

    Whatever the change makes illegal takes the nearest legal value. A plan may come twice.
    """
    old = {axis.name: axis.read(plan) for axis in AXES}
    single = [
        (axis.name, value) for axis in AXES if axis.name not in default for value in _others(context, old, axis.name)
    ]
    for change in single:
        yield _moved(context, old, dict([change]), default)
    for first in single:
        for second in single:
            if first[0] < second[0]:
                yield _moved(context, old, dict([first, second]), default)


def _others(context: SearchContext, old: dict[str, Any], name: str) -> tuple[Any, ...]:
    position = next(i for i, axis in enumerate(AXES) if axis.name == name)
    before = {axis.name: old[axis.name] for axis in AXES[:position]}
    return tuple(value for value in allowed_values(context, before, position) if value != old[name])


def _moved(
    context: SearchContext, old: dict[str, Any], change: dict[str, Any], default: tuple[str, ...]
) -> ParallelStrategy:
    draws: dict[str, Any] = {}
    for position, axis in enumerate(AXES):
        allowed = allowed_values(context, draws, position)
        wanted = allowed[0] if axis.name in default else change.get(axis.name, old[axis.name])
        if wanted not in allowed:
            wanted = _nearest(allowed, wanted)
        draws[axis.name] = wanted
    return strategy_from(draws)


def _nearest(allowed: tuple[Any, ...], wanted: Any) -> Any:
    """The number closest to the wanted one; for other values the default."""
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return min(allowed, key=lambda one: (abs(one - wanted), one))
    return allowed[0]
