"""Search the strategies of one checkpoint, recipe and cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import optuna

from shardwright.agents.strategy.bounds import might_fit
from shardwright.agents.strategy.complete import Completion
from shardwright.agents.strategy.explain import explain
from shardwright.agents.strategy.heuristics import warm
from shardwright.agents.strategy.infeasible import infeasible
from shardwright.agents.strategy.oracle import Priced, scan
from shardwright.agents.strategy.pareto import alternatives
from shardwright.agents.strategy.pricing import Pricer
from shardwright.agents.strategy.refine import refine
from shardwright.agents.strategy.study import SAMPLER, Progress, cached, run_study
from shardwright.agents.strategy.words import gib
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import Alternative, SearchRecord
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.calibration import calibration_digest
from shardwright.search_spaces.catalogue import cluster_digest
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import workload
from shardwright.search_spaces.cost.routing import Loads
from shardwright.search_spaces.legality import refuse
from shardwright.search_spaces.placement import with_places
from shardwright.search_spaces.space import enumerate_plans


@dataclass(frozen=True)
class SearchResult:
    """The chosen strategy, its rivals, and how it was found."""

    best: ParallelStrategy
    cost: CostReport
    alternatives: tuple[Alternative, ...]
    record: SearchRecord
    explanation: tuple[str, ...]


def run_search(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    lora_targets: tuple[LoraTarget, ...],
    *,
    trials: int = 64,
    seed: int = 0,
    journal: Path,
    calibration: Calibration | None = None,
    explore: bool = False,
    loads: Loads = (),
    time_budget_s: float | None = None,
    warm_start: bool = True,
    advised: tuple[ParallelStrategy, ...] = (),
    may_fuse: bool = False,
    progress: Progress | None = None,
) -> SearchResult:
    """Find the fastest strategy that fits: scan all, refine the best, and study the joint space beside it.

    Without a time budget the result depends on the arguments alone: not on the clock, the machine or a
    journal left by an interrupted run of the same search.

    Args:
        explore: also consider values that the runtime does not run; such a plan cannot be applied.
        loads: measured share of rows by MoE layer and expert; a stated prior where empty.
        advised: legal plans that the study also starts from; the scan does not depend on them.
        warm_start: begin the study with common habits and the scan's best.
        may_fuse: fused operators are certified later, and the search repeated with them (``as_run``). Where nothing
            fits without, and something might with, the result is the leanest strategy, which does not fit.
        progress: told (trials done, trials wanted).

    Raises:
        LegalityError: no strategy is legal, with the rule and the nearest legal values.
        InfeasibleError: none fits, with the smallest changes that would.
    """
    context = SearchContext(profile, recipe, cluster, explore, loads)
    table = enumerate_plans(context)
    if not len(table):
        raise refuse(context)
    pricer = Pricer.of(workload(profile, recipe, lora_targets, loads), cluster, (), calibration)
    found = scan(table, pricer)
    complete = Completion(context, pricer)
    best = refine(context, found, complete)
    if not best.cost.feasible:
        if may_fuse and might_fit(pricer.work, cluster, table.plans):
            return _waiting(best, seed, len(found))
        counted = "with or without fused operators" if may_fuse else "without fused operators"
        raise infeasible(profile, recipe, cluster, lora_targets, best, counted)
    key = sha256_of(
        {
            "profile": profile.fingerprint.digest,
            "recipe": sha256_of(recipe),
            "cluster": cluster_digest(cluster),
            "targets": sha256_of([target.model_dump(mode="json") for target in lora_targets]),
            "calibration": calibration_digest(calibration) if calibration else None,
            "loads": sha256_of([list(map(str, layer)) for layer in loads]),
            "explore": explore,
            "costs": [float(found.columns.step_ms.sum()), float(found.columns.reserved.sum()), len(found)],
        }
    )
    start = (*advised, *(warm(context, found, best) if warm_start else ()))
    study = run_study(
        context,
        cached(pricer.report),
        key=key,
        trials=trials,
        seed=seed,
        journal=journal,
        complete=complete,
        start=start,
        time_budget_s=time_budget_s,
        progress=progress,
    )
    oracle_ms = best.cost.time.step_ms
    if study.best is not None:
        best = min(best, Priced(study.best, pricer.report(study.best)), key=lambda plan: plan.rank_key)
    rivals = alternatives(best, found)
    record = SearchRecord(
        sampler=SAMPLER,
        seed=seed,
        trials=study.trials,
        legal_strategies=len(found),
        feasible_strategies=found.feasible,
        oracle_step_ms=oracle_ms,
        study_step_ms=study.best_step_ms or 0.0,
        versions={"optuna": optuna.__version__},
    )
    return SearchResult(
        best=with_places(best.strategy, loads),
        cost=best.cost,
        alternatives=rivals,
        record=record,
        explanation=explain(best, rivals, record, cluster),
    )


def _waiting(leanest: Priced, seed: int, legal: int) -> SearchResult:
    """Nothing fits without fused operators: no study, no rivals, and a strategy to start from with them."""
    record = SearchRecord(
        sampler="none: no strategy fits without fused operators",
        seed=seed,
        trials=0,
        legal_strategies=legal,
        feasible_strategies=0,
        oracle_step_ms=0.0,
        study_step_ms=0.0,
        versions={"optuna": optuna.__version__},
    )
    memory = leanest.cost.memory
    words = (
        f"No strategy fits without fused operators: the leanest needs {gib(memory.reserved_bytes)} a rank and "
        f"{gib(memory.budget_bytes)} are usable."
    )
    return SearchResult(leanest.strategy, leanest.cost, (), record, (words,))
