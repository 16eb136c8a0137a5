"""The exhaustive scan: every legal strategy priced in columns, in one fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.agents.strategy.pricing import SAFETY_FRACTION, Columns, Pricer
from shardwright.schemas.canonical import canonical_bytes
from shardwright.schemas.cost import CostReport
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.space import PlanTable

RankKey = tuple[int, float, float, bytes]


@dataclass(frozen=True)
class Priced:
    """A strategy and what it costs."""

    strategy: ParallelStrategy
    cost: CostReport

    @property
    def within_margin(self) -> bool:
        return self.cost.memory.fraction <= SAFETY_FRACTION

    @property
    def rank_key(self) -> RankKey:
        """Smaller is better; never equal for two strategies.

        Within the margin: step time, then memory. Beyond it: memory, then step time. Last, the
        strategy's canonical bytes.
        """
        memory, step = float(self.cost.memory.reserved_bytes), self.cost.time.step_ms
        name = canonical_bytes(self.strategy, floats=False)
        if self.within_margin:
            return (0, step, memory, name)
        return (1 if self.cost.feasible else 2, memory, step, name)


@dataclass(frozen=True)
class Scan:
    """All strategies of a table, priced and ranked."""

    table: PlanTable
    pricer: Pricer
    columns: Columns
    ranking: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.table)

    def priced(self, plan: int) -> Priced:
        """One plan with its whole report."""
        strategy = self.table.strategy(plan)
        return Priced(strategy, self.pricer.report(strategy))

    @property
    def best(self) -> Priced:
        return self.priced(int(self.ranking[0]))

    @property
    def feasible(self) -> int:
        """How many plans fit."""
        return int(self.columns.feasible.sum())

    def top(self, count: int) -> Iterator[Priced]:
        """The first plans of the ranking, each priced when it is asked for."""
        return (self.priced(int(plan)) for plan in self.ranking[:count])

    def front(self, count: int) -> tuple[Priced, ...]:
        """Up to ``count`` plans of the front, fastest first."""
        return tuple(self.priced(int(plan)) for plan in self.columns.front(count))


def scan(table: PlanTable, pricer: Pricer) -> Scan:
    """Price and rank every plan of a table of at least one."""
    columns = pricer.columns(table.plans)
    return Scan(table, pricer, columns, columns.order())
