"""All legal strategies, listed exactly or drawn one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces import executable
from shardwright.search_spaces.axes import AXES
from shardwright.search_spaces.axes.base import Trial
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.executable import Value
from shardwright.search_spaces.legality import recipe_violations, refuse

MESH_AXES = ("replicate", "shard", "ep", "tp", "cp", "pp")


def legal_strategies(
    profile: CheckpointProfile, recipe: Recipe, cluster: ClusterSpec, *, explore: bool = False
) -> tuple[ParallelStrategy, ...]:
    """Every legal strategy, in a fixed order; empty where none is legal.

    Args:
        explore: also list values that the runtime does not run.
    """
    context = SearchContext(profile, recipe, cluster, explore)
    if recipe_violations(context):
        return ()
    return tuple(_strategy(draws) for draws in _walk(context, {}, 0))


def suggest(
    trial: Trial, profile: CheckpointProfile, recipe: Recipe, cluster: ClusterSpec, *, explore: bool = False
) -> ParallelStrategy:
    """Draw one strategy; every draw is legal because each range holds only what can be completed.

    Args:
        trial: anything with ``suggest_int(name, low, high)`` and ``suggest_categorical(name, choices)``.

    Raises:
        LegalityError: where no strategy is legal, naming the rule and the nearest legal values.
    """
    return suggest_in(trial, SearchContext(profile, recipe, cluster, explore))


def suggest_in(trial: Trial, context: SearchContext) -> ParallelStrategy:
    """``suggest`` on a context that is kept between trials."""
    if recipe_violations(context) or not _completable(context, {}, 0):
        raise refuse(context)
    draws: dict[str, Any] = {}
    for position, axis in enumerate(AXES):
        draws[axis.name] = axis.draw(trial, _allowed(context, draws, position))
    return _strategy(draws)


def parameters_of(context: SearchContext, strategy: ParallelStrategy) -> dict[str, Any]:
    """The trial parameters that ``suggest_in`` would draw for this strategy: to enqueue a known plan."""
    draws: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for position, axis in enumerate(AXES):
        allowed, value = _allowed(context, draws, position), axis.read(strategy)
        if len(allowed) > 1:
            if axis.encoding == "categorical" and allowed == axis.fixed:
                parameters[axis.name] = value
            else:
                parameters[f"{axis.name}_index"] = allowed.index(value)
        draws[axis.name] = value
    return parameters


def _values(context: SearchContext, draws: dict[str, Any], position: int) -> tuple[Value, ...]:
    axis = AXES[position]
    values = axis.choices(context, draws)
    if context.explore:
        return values
    return tuple(value for value in values if executable.runs(axis.name, value))


def _allowed(context: SearchContext, draws: dict[str, Any], position: int) -> tuple[Value, ...]:
    name = AXES[position].name
    return tuple(
        value
        for value in _values(context, draws, position)
        if _completable(context, {**draws, name: value}, position + 1)
    )


def _completable(context: SearchContext, draws: dict[str, Any], position: int) -> bool:
    if position == len(AXES):
        return True
    key = tuple(draws.values())
    if key not in context.memo:
        name = AXES[position].name
        context.memo[key] = any(
            _completable(context, {**draws, name: value}, position + 1) for value in _values(context, draws, position)
        )
    return context.memo[key]


def _walk(context: SearchContext, draws: dict[str, Any], position: int) -> Iterator[dict[str, Any]]:
    if position == len(AXES):
        yield draws
        return
    for value in _values(context, draws, position):
        yield from _walk(context, {**draws, AXES[position].name: value}, position + 1)


def _strategy(draws: dict[str, Any]) -> ParallelStrategy:
    mesh = Mesh(**{name: draws[name] for name in MESH_AXES})
    return ParallelStrategy(mesh=mesh, **{name: value for name, value in draws.items() if name not in MESH_AXES})
