"""The exhaustive scan: every legal strategy priced in columns, in one fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.schemas.canonical import canonical_bytes
from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.cost import evaluate, price
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.plans import Array, Flags, Plans
from shardwright.search_spaces.cost.workload import Workload
from shardwright.search_spaces.space import PlanTable

SAFETY_FRACTION = 0.95
"""Plans are chosen within this share of the budget while any stays within it."""

CHUNK = 16384
"""Plans priced at once: their columns stay in the cache."""

RankKey = tuple[int, float, float, bytes]


@dataclass(frozen=True)
class Pricer:
    """Everything that turns strategies into costs."""

    work: Workload
    cluster: ClusterSpec
    fused: FusedProviders
    calibration: Calibration | None = None

    @classmethod
    def of(
        cls,
        work: Workload,
        cluster: ClusterSpec,
        fusions: Sequence[FusionDecision] = (),
        calibration: Calibration | None = None,
    ) -> Pricer:
        """Without decisions everything is priced eagerly: the joined plan may be cheaper, never dearer."""
        fused = FusedProviders.of(fusions)
        return cls(work, cluster, fused, calibration)

    def report(self, strategy: ParallelStrategy) -> CostReport:
        return price(self.work, self.cluster, strategy, self.fused, self.calibration)

    def columns(self, plans: Plans) -> Columns:
        """Step time, reserved memory and device-hours of every plan, a chunk at a time."""
        parts = []
        for start in range(0, len(plans), CHUNK):
            costs = evaluate(
                self.work, self.cluster, plans.take(slice(start, start + CHUNK)), self.fused, self.calibration
            )
            parts.append((costs.step_ms, costs.reserved, costs.gpu_hours))
        if not parts:
            none = np.zeros(0)
            return Columns(none, none, none, self.cluster.device.usable_memory_bytes)
        step, reserved, hours = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Columns(step, reserved, hours, self.cluster.device.usable_memory_bytes)


@dataclass(frozen=True)
class Columns:
    """What is compared, one entry a plan."""

    step_ms: Array
    reserved: Array
    gpu_hours: Array
    budget: int

    @property
    def feasible(self) -> Flags:
        return self.reserved <= self.budget

    @property
    def within_margin(self) -> Flags:
        return self.reserved / self.budget <= SAFETY_FRACTION

    def order(self) -> NDArray[np.int64]:
        """Positions, best first, as ``Priced.rank_key``; ties by position."""
        tier = np.where(self.within_margin, 0, np.where(self.feasible, 1, 2))
        first = np.where(tier == 0, self.step_ms, self.reserved)
        second = np.where(tier == 0, self.reserved, self.step_ms)
        return np.lexsort((second, first, tier)).astype(np.int64)

    def front(self) -> NDArray[np.int64]:
        """Fitting plans that no fitting plan dominates in time, memory and device-hours; fastest first."""
        order = np.lexsort((self.reserved, self.gpu_hours, self.step_ms))
        kept: list[int] = []
        for position in order[self.feasible[order]]:
            values = (self.step_ms[position], self.reserved[position], self.gpu_hours[position])
            others = np.array(kept, dtype=np.int64)
            if not len(others):
                kept.append(int(position))
                continue
            rivals = np.stack([column[others] for column in (self.step_ms, self.reserved, self.gpu_hours)])
            mine = np.array(values)[:, None]
            dominated = np.all(rivals <= mine, axis=0) & np.any(rivals < mine, axis=0)
            if not dominated.any():
                kept.append(int(position))
        return np.array(kept, dtype=np.int64)


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

    def top(self, count: int) -> tuple[Priced, ...]:
        """The first plans of the ranking."""
        return tuple(self.priced(int(plan)) for plan in self.ranking[:count])

    def meshes(self, count: int, known: Sequence[ParallelStrategy]) -> tuple[ParallelStrategy, ...]:
        """The best fitting plan of each further mesh and base format, up to ``count``, best first.

        These two are all that a fused operator's rule looks at.
        """
        seen = {(plan.mesh, plan.base_format) for plan in known}
        ranking, plans = self.ranking[: self.feasible], self.table.plans
        degrees = (plans.replicate, plans.shard, plans.ep, plans.tp, plans.cp, plans.pp, plans.expert_tp, plans.format)
        code = np.zeros(len(ranking), dtype=np.int64)
        for column in degrees:
            values, position = np.unique(column[ranking], return_inverse=True)
            code = code * max(len(values), 1) + position
        firsts = np.sort(np.unique(code, return_index=True)[1])
        found: list[ParallelStrategy] = []
        for first in firsts:
            if len(found) == count:
                break
            plan = self.table.strategy(int(ranking[first]))
            if (plan.mesh, plan.base_format) not in seen:
                found.append(plan)
        return tuple(found)

    def front(self, count: int) -> tuple[Priced, ...]:
        """Up to ``count`` plans of the front, fastest first."""
        return tuple(self.priced(int(plan)) for plan in self.columns.front()[:count])


def scan(table: PlanTable, pricer: Pricer) -> Scan:
    """Price and rank every plan of a table of at least one."""
    columns = pricer.columns(table.plans)
    return Scan(table, pricer, columns, columns.order())
