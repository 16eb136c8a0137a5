"""All legal strategies, as columns or one by one, or drawn one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.axes import AXES, MESH, SCHEDULE, checkpointed_layers
from shardwright.search_spaces.axes.base import Axis, Trial, exchanges, gathers, whole_domains
from shardwright.search_spaces.axes.reshard_scope import domains_divide
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost.plans import FORMATS, OFFLOADS, Plans
from shardwright.search_spaces.executable import Value
from shardwright.search_spaces.legality import recipe_violations, refuse

MESH_AXES = ("replicate", "shard", "ep", "tp", "cp", "pp", "expert_tp")

Draws = dict[str, Any]


@dataclass(frozen=True)
class PlanTable:
    """Every combination of a head (mesh and batch) with a tail (everything else), as columns.

    ``checkpointing = layers`` is not among them: which layers is chosen by the refinement and the study.
    """

    context: SearchContext
    plans: Plans
    heads: tuple[Draws, ...]
    tails: tuple[Draws, ...]
    head_of: NDArray[np.int64]
    tail_of: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.plans)

    def strategy(self, plan: int) -> ParallelStrategy:
        """One plan as the schema has it."""
        return strategy_from({**self.heads[int(self.head_of[plan])], **self.tails[int(self.tail_of[plan])]})


def enumerate_plans(context: SearchContext) -> PlanTable:
    """Every legal strategy as columns; empty where none is legal.

    In the explored space axes that only refine stand at their default.
    """
    heads = [] if recipe_violations(context) else list(_walk(context, MESH, {}, 0, scan=True))
    tails: list[Draws] = []
    ranges: dict[tuple[object, ...], tuple[int, int]] = {}
    for head in heads:
        key = signature(context, head)
        if key not in ranges:
            start = len(tails)
            found = _walk(context, SCHEDULE, dict(head), 0, scan=True)
            tails += [{axis.name: draws[axis.name] for axis in SCHEDULE} for draws in found]
            ranges[key] = (start, len(tails))
    spans = [ranges[signature(context, head)] for head in heads]
    sizes = np.array([stop - start for start, stop in spans], dtype=np.int64)
    head_of = np.repeat(np.arange(len(heads), dtype=np.int64), sizes)
    tail_of = (
        np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in spans])
        if spans
        else np.zeros(0, dtype=np.int64)
    )
    return PlanTable(
        context, _columns(context, heads, tails, head_of, tail_of), tuple(heads), tuple(tails), head_of, tail_of
    )


def signature(context: SearchContext, draws: Draws) -> tuple[object, ...]:
    """All that the axes after the mesh may see of it."""
    each = context.experts // draws["ep"] if context.experts else 0
    return (
        gathers(draws),
        exchanges(draws),
        domains_divide(context, draws),
        whole_domains(context, draws, draws["ep"]),
        min(each, 4),
        draws["shard"] > 1,
        draws["cp"] > 1,
    )


def _columns(
    context: SearchContext,
    heads: list[Draws],
    tails: list[Draws],
    head_of: NDArray[np.int64],
    tail_of: NDArray[np.int64],
) -> Plans:
    def head(name: str) -> NDArray[np.float64]:
        return np.array([draws[name] for draws in heads], dtype=np.float64)[head_of]

    def tail(values: list[Any], dtype: Any) -> Any:
        return np.array(values, dtype=dtype)[tail_of]

    counts = [len(kind.layer_indices) for kind in context.profile.layer_kinds]
    full = tail([draws["checkpointing"] == "full" for draws in tails], np.float64)
    return Plans(
        **{name: head(name) for name in MESH_AXES},
        micro=head("micro_batch_sequences"),
        accumulation=head("accumulation_steps"),
        recomputed=np.array(counts, dtype=np.float64)[:, None] * full[None, :],
        reshard=tail([draws["reshard_after_forward"] for draws in tails], np.bool_),
        node_scope=tail([draws["reshard_scope"] == "node" for draws in tails], np.bool_),
        prefetch=tail([draws["prefetch_depth"] for draws in tails], np.float64),
        padding=tail([draws["expert_padding_tokens"] for draws in tails], np.float64),
        chunks=tail([draws["overlap_chunks"] for draws in tails], np.float64),
        shared=tail([draws["overlap"] == "shared" for draws in tails], np.bool_),
        hierarchical=tail([draws["dispatch"] == "hierarchical" for draws in tails], np.bool_),
        offload=tail([OFFLOADS.index(draws["offload"]) for draws in tails], np.int64),
        format=tail([FORMATS.index(draws["base_format"]) for draws in tails], np.int64),
        balanced=tail([draws["expert_placement"] == "balanced" for draws in tails], np.bool_),
        redundant=tail([draws["redundant_experts"] for draws in tails], np.float64),
    )


def legal_strategies(
    profile: CheckpointProfile, recipe: Recipe, cluster: ClusterSpec, *, explore: bool = False
) -> tuple[ParallelStrategy, ...]:
    """Every strategy of ``enumerate_plans``, in its order; empty where none is legal.

    Args:
        explore: also list values that the runtime does not run.
    """
    table = enumerate_plans(SearchContext(profile, recipe, cluster, explore))
    return tuple(table.strategy(plan) for plan in range(len(table)))


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


def suggest_in(trial: Trial, context: SearchContext, default: tuple[str, ...] = ()) -> ParallelStrategy:
    """``suggest`` on a context that is kept between trials.

    Args:
        default: axes that are not drawn but take their first value.
    """
    if recipe_violations(context) or not _completable(context, {}, 0):
        raise refuse(context)
    draws: Draws = {}
    for position, axis in enumerate(AXES):
        allowed = allowed_values(context, draws, position)
        draws[axis.name] = allowed[0] if axis.name in default else axis.draw(trial, allowed)
    if draws["checkpointing"] == "layers":
        draws[checkpointed_layers.NAME] = checkpointed_layers.draw(trial, context)
    return strategy_from(draws)


def parameters_of(context: SearchContext, strategy: ParallelStrategy, default: tuple[str, ...] = ()) -> dict[str, Any]:
    """The trial parameters that ``suggest_in`` would draw for this strategy: to enqueue a known plan."""
    draws: Draws = {}
    parameters: dict[str, Any] = {}
    for position, axis in enumerate(AXES):
        allowed, value = allowed_values(context, draws, position), axis.read(strategy)
        if len(allowed) > 1 and axis.name not in default:
            if axis.encoding == "categorical" and allowed == axis.fixed:
                parameters[axis.name] = value
            else:
                parameters[f"{axis.name}_index"] = allowed.index(value)
        draws[axis.name] = value
    if strategy.checkpointing == "layers" and "checkpointing" not in default:
        kinds = context.profile.layer_kinds
        counts = checkpointed_layers.counts_of(kinds, strategy.checkpointed_layers)
        parameters |= {checkpointed_layers.parameter(k): n for k, n in zip(kinds, counts, strict=True)}
    return parameters


def values_of(context: SearchContext, axis: Axis, draws: Draws) -> tuple[Value, ...]:
    """Legal values of an axis after these draws; without ``explore`` only those that the runtime runs."""
    return tuple(value for value in axis.choices(context, draws) if context.admits(axis.name, value))


def _scanned(context: SearchContext, axis: Axis, draws: Draws) -> tuple[Value, ...]:
    """What the exhaustive scan lists of an axis."""
    values = values_of(context, axis, draws)
    if axis.name == "checkpointing":
        return tuple(value for value in values if value != "layers")
    return values[:1] if context.explore and axis.refines else values


def allowed_values(context: SearchContext, draws: Draws, position: int) -> tuple[Value, ...]:
    """Values of ``AXES[position]`` after these draws that can be completed to a legal strategy."""
    name = AXES[position].name
    return tuple(
        value
        for value in values_of(context, AXES[position], draws)
        if _completable(context, {**draws, name: value}, position + 1)
    )


def _completable(context: SearchContext, draws: Draws, position: int) -> bool:
    """Only the mesh can be a dead end: every later axis has a value whatever came before."""
    if position >= len(MESH):
        return True
    key = tuple(draws.values())
    if key not in context.memo:
        name = AXES[position].name
        context.memo[key] = any(
            _completable(context, {**draws, name: value}, position + 1)
            for value in values_of(context, AXES[position], draws)
        )
    return context.memo[key]


def _walk(
    context: SearchContext, axes: tuple[Axis, ...], draws: Draws, position: int, *, scan: bool
) -> Iterator[Draws]:
    if position == len(axes):
        yield draws
        return
    axis = axes[position]
    values = _scanned(context, axis, draws) if scan else values_of(context, axis, draws)
    for value in values:
        yield from _walk(context, axes, {**draws, axis.name: value}, position + 1, scan=scan)


def strategy_from(draws: Draws) -> ParallelStrategy:
    """Values of all axes, by axis name, as the schema has them."""
    mesh = Mesh(**{name: draws[name] for name in MESH_AXES})
    return ParallelStrategy(mesh=mesh, **{name: value for name, value in draws.items() if name not in MESH_AXES})
