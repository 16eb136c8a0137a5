"""The search once more: every strategy with the fused operators that are certified for it.

The first search runs beside the structure agent and prices without them. Which operators a strategy may have depends on
its mesh and base format, so the fastest without need not be the fastest as run, and some fit only with them. So the
scan, the refinement and the study are repeated: a plan that fits only with fused operators is legal for all three.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.agents.strategy.complete import Completion
from shardwright.agents.strategy.heuristics import warm
from shardwright.agents.strategy.infeasible import infeasible
from shardwright.agents.strategy.oracle import Priced, scan
from shardwright.agents.strategy.pareto import alternatives
from shardwright.agents.strategy.pricing import ByMesh, Certified, Pricer
from shardwright.agents.strategy.refine import refine
from shardwright.agents.strategy.study import cached, run_study
from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import workload
from shardwright.search_spaces.cost.routing import Loads
from shardwright.search_spaces.space import enumerate_plans

TRIALS = 64
"""Of the study, kept in memory: it repeats from its seed."""


@dataclass(frozen=True)
class FusedSearch:
    """Strategies worth certifying whole, the best as run first, and how many fit."""

    strategies: tuple[ParallelStrategy, ...]
    feasible: int


def search_fused(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    lora_targets: tuple[LoraTarget, ...],
    certified: Certified,
    found: ParallelStrategy,
    *,
    calibration: Calibration | None = None,
    explore: bool = False,
    loads: Loads = (),
    trials: int = TRIALS,
) -> FusedSearch | None:
    """Scan, refine and study with fused operators; ``None`` where no strategy may have any.

    Args:
        certified: the decisions for a strategy; only its degrees of ep, tp and cp and its base format matter.
        found: the first search's best, which may hold what only its study reaches.

    Raises:
        InfeasibleError: no strategy fits, with the smallest changes that would.
    """
    context = SearchContext(profile, recipe, cluster, explore, loads)
    table, by_mesh = enumerate_plans(context), ByMesh(certified)
    pricer = Pricer(workload(profile, recipe, lora_targets, loads), cluster, calibration=calibration, by_mesh=by_mesh)
    if not by_mesh.any_fused(table.plans):
        alone = Priced(found, pricer.report(found))
        if not alone.cost.feasible:
            counted = "without fused operators, and none is certified here"
            raise infeasible(profile, recipe, cluster, lora_targets, alone, counted)
        return None
    again, complete = scan(table, pricer), Completion(context, pricer)
    known = complete(found.model_copy(update={"expert_slots": ()}))
    best = min(refine(context, again, complete), Priced(known, pricer.report(known)), key=lambda plan: plan.rank_key)
    if not best.cost.feasible:
        raise infeasible(profile, recipe, cluster, lora_targets, best, "with the fused operators it may have", by_mesh)
    study = run_study(
        context,
        cached(pricer.report),
        key="as run",
        trials=trials,
        seed=recipe.seeds.search,
        journal=None,
        complete=complete,
        start=(*warm(context, again, best), known),
    )
    if study.best is not None:
        best = min(best, Priced(study.best, pricer.report(study.best)), key=lambda plan: plan.rank_key)
    rivals = alternatives(best, again)
    return FusedSearch((best.strategy, *(rival.strategy for rival in rivals)), again.feasible)
