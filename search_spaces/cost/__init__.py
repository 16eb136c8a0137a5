"""What a strategy costs: memory of the fullest rank, time of the slowest, device-hours.

The model is written once, over columns of plans (``evaluate``); ``estimate`` and ``price`` are columns of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.schemas.canonical import round_significant
from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.memory import Memory, memory_of
from shardwright.search_spaces.cost.plans import Array, Flags, Plans, plans_of
from shardwright.search_spaces.cost.routing import Loads
from shardwright.search_spaces.cost.startup import gpu_hours, money, time_to_first_step_s
from shardwright.search_spaces.cost.step import Times, times_of
from shardwright.search_spaces.cost.workload import Workload, workload

__all__ = ["Costs", "estimate", "evaluate", "price", "workload"]


@dataclass(frozen=True)
class Costs:
    """The model's answer for every plan."""

    work: Workload
    cluster: ClusterSpec
    plans: Plans
    memory: Memory
    times: Times

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def step_ms(self) -> Array:
        """As reports give it, six significant digits."""
        return round_all(self.times.step_ms)

    @property
    def reserved(self) -> Array:
        return self.memory.reserved

    @property
    def feasible(self) -> Flags:
        return self.memory.fits

    @property
    def gpu_hours(self) -> Array:
        step = self.step_ms
        first = time_to_first_step_s(self.work, self.cluster, self.plans, step)
        return round_all(np.asarray(gpu_hours(self.work, self.cluster, first, step)))

    def report(self, plan: int) -> CostReport:
        """The whole report of one plan."""
        memory, time = self.memory.report(plan), self.times.report(plan)
        one = self.plans.take(slice(plan, plan + 1))
        first = float(np.ravel(time_to_first_step_s(self.work, self.cluster, one, time.step_ms))[0])
        hours = float(gpu_hours(self.work, self.cluster, first, time.step_ms))
        cost = money(self.cluster, hours)
        return CostReport(
            memory=memory,
            time=time,
            gpu_hours=round_significant(hours),
            money=None if cost is None else round_significant(cost),
            time_to_first_step_s=round_significant(first),
            feasible=memory.fits,
        )


def round_all(values: Array, digits: int = 6) -> Array:
    """``round_significant`` of positive numbers, column by column."""
    safe = np.where(values > 0, values, 1.0)
    power = digits - 1 - np.floor(np.log10(safe))
    up, down = 10.0 ** np.maximum(power, 0), 10.0 ** np.maximum(-power, 0)
    return np.where(values > 0, np.rint(values * up / down) / up * down, 0.0)


def evaluate(
    work: Workload,
    cluster: ClusterSpec,
    plans: Plans,
    fusions: Sequence[FusionDecision] | FusedProviders = (),
    calibration: Calibration | None = None,
) -> Costs:
    """Price every plan.

    Raises:
        ClusterError: ``no-rate`` where the device has no figure for the recipe's dtype.
    """
    fused = fusions if isinstance(fusions, FusedProviders) else FusedProviders.of(fusions)
    memory = memory_of(work, cluster, plans, fused)
    return Costs(work, cluster, plans, memory, times_of(work, cluster, plans, fused, calibration))


def estimate(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    strategy: ParallelStrategy,
    lora_targets: Sequence[LoraTarget],
    fusions: Sequence[FusionDecision] = (),
    calibration: Calibration | None = None,
    loads: Loads = (),
) -> CostReport:
    """Predict memory and time of one strategy.

    Args:
        lora_targets: resolved targets; they decide which activations are kept.
        fusions: accepted decisions; everything else is priced eager.
        calibration: measured curves of the cluster's devices, used where present.
        loads: measured share of rows by layer and expert; a stated prior where empty.

    Raises:
        ClusterError: ``no-rate`` where the device has no figure for the recipe's dtype.
    """
    return price(workload(profile, recipe, lora_targets, loads), cluster, strategy, fusions, calibration)


def price(
    work: Workload,
    cluster: ClusterSpec,
    strategy: ParallelStrategy,
    fusions: Sequence[FusionDecision] | FusedProviders = (),
    calibration: Calibration | None = None,
) -> CostReport:
    """``estimate`` for a model that is counted once and priced many times."""
    return evaluate(work, cluster, plans_of([strategy], work.profile), fusions, calibration).report(0)
