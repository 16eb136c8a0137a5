"""How many layers of each kind a plan recomputes: chosen exactly, given everything else.

Recomputing a layer adds time and takes memory away, so the best counts are those that cost least time and
still keep the safety margin. All counts per kind are priced at once; a study then searches the other axes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.agents.strategy.pricing import Pricer
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes import checkpointed_layers
from shardwright.search_spaces.axes.checkpointing import routing_is_kept
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost.plans import Plans, plans_of

MOST_COUNTS = 40_000
"""Counts that are priced for one plan; above it every second, fourth, … count of a kind is left out."""


@dataclass
class Completion:
    """Chooses recomputed layers for plans of one search; remembers what it chose."""

    context: SearchContext
    pricer: Pricer
    known: dict[str, ParallelStrategy] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.counts = possible_counts(self.context)

    def best_counts(self, plan: Plans) -> tuple[tuple[int, ...], float, bool]:
        """(count of each kind, step time, whether it keeps the margin) of the best for one plan.

        Where none keeps the margin: the leanest.
        """
        columns = self.pricer.columns(with_counts(plan, self.counts))
        winner = int(columns.order()[0])
        counts = tuple(int(n) for n in self.counts[winner])
        return counts, float(columns.step_ms[winner]), bool(columns.within_margin[winner])

    def __call__(self, strategy: ParallelStrategy) -> ParallelStrategy:
        """The strategy with its best recomputation."""
        bare = with_layers(self.context, strategy, tuple(0 for _ in self.context.profile.layer_kinds))
        name = bare.model_dump_json()
        if name not in self.known:
            counts, _, _ = self.best_counts(plans_of([bare], self.context.profile))
            self.known[name] = with_layers(self.context, bare, counts)
        return self.known[name]


def possible_counts(context: SearchContext) -> NDArray[np.int64]:
    """[combinations, kinds]: every count of recomputed layers of each kind that is considered."""
    sizes, step = [len(kind.layer_indices) for kind in context.profile.layer_kinds], 1
    ends = [[0] * len(sizes)]
    if routing_is_kept(context) and context.admits("checkpointing", "full"):
        ends.append(sizes)
    if not routing_is_kept(context) or not context.admits("checkpointing", "layers"):
        return np.array(ends, dtype=np.int64)

    def values(size: int) -> list[int]:
        return sorted({*range(0, size + 1, step), size})

    while np.prod([len(values(size)) for size in sizes]) > MOST_COUNTS:
        step *= 2
    return np.array(list(itertools.product(*(values(size) for size in sizes))), dtype=np.int64)


def with_counts(plan: Plans, counts: NDArray[np.int64]) -> Plans:
    """One plan with each of these counts."""
    many = plan.take(np.zeros(len(counts), dtype=np.int64))
    return replace(many, recomputed=counts.T.astype(np.float64))


def with_layers(context: SearchContext, strategy: ParallelStrategy, counts: tuple[int, ...]) -> ParallelStrategy:
    """The strategy with these counts of recomputed layers."""
    kinds = context.profile.layer_kinds
    layers: tuple[int, ...] = ()
    if counts == tuple(len(kind.layer_indices) for kind in kinds):
        how = "full"
    elif any(counts):
        how, layers = "layers", checkpointed_layers.layers_of(kinds, counts)
    else:
        how = "none"
    changed = strategy.model_dump() | {"checkpointing": how, "checkpointed_layers": layers}
    return ParallelStrategy.model_validate(changed)
