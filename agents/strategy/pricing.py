"""From strategies to costs: plain, or each with the fused operators that its mesh and base format may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.cost import evaluate, price
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.plans import FORMATS, Array, Flags, Plans
from shardwright.search_spaces.cost.workload import Workload

SAFETY_FRACTION = 0.95
"""Plans are chosen within this share of the budget while any stays within it."""

CHUNK = 16384
"""Plans priced at once: their columns stay in the cache."""

Certified = Callable[[ParallelStrategy], Sequence[FusionDecision]]
"""The fused operators that a strategy may have, each certified for it."""

Situation = tuple[int, int, int, str]
"""(ep, tp, cp, base format): all of a strategy that a fused operator's rule looks at (``structure.choose.fits``)."""

WIDEST = 1 << 16
"""Above any degree of a mesh axis."""


@dataclass(frozen=True)
class ByMesh:
    """Fused operators by situation, certified once for each."""

    certified: Certified
    known: dict[Situation, FusedProviders] = field(default_factory=dict, repr=False, compare=False)

    def of(self, strategy: ParallelStrategy) -> FusedProviders:
        mesh = strategy.mesh
        return self._at((mesh.ep, mesh.tp, mesh.cp, strategy.base_format))

    def groups(self, plans: Plans) -> Iterator[tuple[FusedProviders, NDArray[np.int64]]]:
        """(operators, positions of the plans that have just these), every plan in one group."""
        code = plans.format.astype(np.int64)
        for degree in (plans.ep, plans.tp, plans.cp):
            code = code * WIDEST + degree.astype(np.int64)
        _, first, which = np.unique(code, return_index=True, return_inverse=True)
        alike: dict[str, list[int]] = {}
        operators: dict[str, FusedProviders] = {}
        for number, plan in enumerate(first):
            degrees = (int(plans.ep[plan]), int(plans.tp[plan]), int(plans.cp[plan]))
            fused = self._at((*degrees, FORMATS[int(plans.format[plan])]))
            alike.setdefault(repr(fused), []).append(number)
            operators[repr(fused)] = fused
        for name, numbers in alike.items():
            yield operators[name], np.flatnonzero(np.isin(which.reshape(-1), numbers)).astype(np.int64)

    def any_fused(self, plans: Plans) -> bool:
        """Whether at least one of these plans may have a fused operator."""
        return any(fused.chosen for fused, _ in self.groups(plans))

    def _at(self, situation: Situation) -> FusedProviders:
        if situation not in self.known:
            ep, tp, cp, base_format = situation
            example = ParallelStrategy.model_validate(
                {"mesh": Mesh(ep=ep, tp=tp, cp=cp).model_dump(), "base_format": base_format}
            )
            self.known[situation] = FusedProviders.of(self.certified(example))
        return self.known[situation]


@dataclass(frozen=True)
class Pricer:
    """Everything that turns strategies into costs."""

    work: Workload
    cluster: ClusterSpec
    fused: FusedProviders = field(default_factory=FusedProviders)
    """The same operators for every strategy."""
    calibration: Calibration | None = None
    by_mesh: ByMesh | None = None
    """Where given, each strategy's own operators in place of ``fused``."""

    @classmethod
    def of(
        cls,
        work: Workload,
        cluster: ClusterSpec,
        fusions: Sequence[FusionDecision] = (),
        calibration: Calibration | None = None,
    ) -> Pricer:
        """With the same decisions for every strategy; without any everything is priced eagerly."""
        return cls(work, cluster, FusedProviders.of(fusions), calibration)

    def operators(self, strategy: ParallelStrategy) -> FusedProviders:
        """The fused operators that a strategy is priced with."""
        return self.fused if self.by_mesh is None else self.by_mesh.of(strategy)

    def report(self, strategy: ParallelStrategy) -> CostReport:
        return price(self.work, self.cluster, strategy, self.operators(strategy), self.calibration)

    def columns(self, plans: Plans) -> Columns:
        """Step time, reserved memory and device-hours of every plan, a chunk at a time."""
        step, reserved, hours = (np.zeros(len(plans)) for _ in range(3))
        for fused, positions in self.groups(plans):
            for start in range(0, len(positions), CHUNK):
                some = positions[start : start + CHUNK]
                costs = evaluate(self.work, self.cluster, plans.take(some), fused, self.calibration)
                step[some], reserved[some], hours[some] = costs.step_ms, costs.reserved, costs.gpu_hours
        return Columns(step, reserved, hours, self.cluster.device.usable_memory_bytes)

    def groups(self, plans: Plans) -> Iterator[tuple[FusedProviders, NDArray[np.int64]]]:
        """(operators, positions of the plans priced with just these)."""
        if self.by_mesh is None:
            return iter([(self.fused, np.arange(len(plans), dtype=np.int64))])
        return self.by_mesh.groups(plans)


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

    def front(self, most: int | None = None) -> NDArray[np.int64]:
        """Fitting plans that no fitting plan dominates in time, memory and device-hours; fastest first.

        Args:
            most: no more than so many, the first ones.
        """
        columns = np.stack([self.step_ms, self.reserved, self.gpu_hours])
        order = np.lexsort((self.reserved, self.gpu_hours, self.step_ms))
        kept: list[int] = []
        for position in order[self.feasible[order]]:
            if len(kept) == most:
                break
            rivals, mine = columns[:, kept], columns[:, [position]]
            dominated = np.all(rivals <= mine, axis=0) & np.any(rivals < mine, axis=0)
            if not dominated.any():
                kept.append(int(position))
        return np.array(kept, dtype=np.int64)
