"""What a strategy costs: memory of the fullest rank, time of the slowest, device-hours."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.schemas.canonical import round_significant
from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.cost import CostReport, TimeReport
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.memory import memory_report
from shardwright.search_spaces.cost.startup import gpu_hours, money, time_to_first_step_s
from shardwright.search_spaces.cost.step import step_report
from shardwright.search_spaces.cost.workload import Workload, workload

__all__ = ["estimate", "price", "workload"]


def estimate(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    strategy: ParallelStrategy,
    lora_targets: Sequence[LoraTarget],
    fusions: Sequence[FusionDecision] = (),
    calibration: Calibration | None = None,
) -> CostReport:
    """Predict memory and time of one strategy.

    Args:
        lora_targets: resolved targets; they decide which activations are kept.
        fusions: accepted decisions; everything else is priced eager.
        calibration: measured curves of the cluster's devices, used where present.

    Raises:
        LegalityError: ``not-priced`` for tp, cp or pp above 1.
        ClusterError: ``no-rate`` where the device has no figure for the recipe's dtype.
    """
    return price(workload(profile, recipe, lora_targets), cluster, strategy, fusions, calibration)


def price(
    work: Workload,
    cluster: ClusterSpec,
    strategy: ParallelStrategy,
    fusions: Sequence[FusionDecision] = (),
    calibration: Calibration | None = None,
) -> CostReport:
    """``estimate`` for a model that is counted once and priced many times."""
    mesh = strategy.mesh
    if mesh.tp * mesh.cp * mesh.pp > 1:
        raise LegalityError(
            "not-priced",
            f"{mesh.text()}: the cost model covers tp, cp and pp of 1",
            where="strategy.mesh",
            next_action="use replicate, shard and ep",
        )
    fused = FusedProviders.of(fusions)
    memory = memory_report(work, cluster, strategy, fused)
    time = _rounded(step_report(work, cluster, strategy, fused, calibration))
    first = time_to_first_step_s(work, cluster, strategy, time.step_ms)
    hours = gpu_hours(work, cluster, first, time.step_ms)
    cost = money(cluster, hours)
    return CostReport(
        memory=memory,
        time=time,
        gpu_hours=round_significant(hours),
        money=None if cost is None else round_significant(cost),
        time_to_first_step_s=round_significant(first),
        feasible=memory.fits,
    )


def _rounded(time: TimeReport) -> TimeReport:
    """Six significant digits, as plans store them: a report read back is equal to the one written."""
    components = tuple(
        component.model_copy(update={"milliseconds": round_significant(component.milliseconds)})
        for component in time.components
    )
    return time.model_copy(
        update={
            "components": components,
            "step_ms": round_significant(time.step_ms),
            "tokens_per_s": round_significant(time.tokens_per_s),
        }
    )
