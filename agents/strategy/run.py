"""Search the strategies of one checkpoint, recipe and cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import optuna

from shardwright.agents.strategy.explain import explain
from shardwright.agents.strategy.infeasible import infeasible
from shardwright.agents.strategy.oracle import Price, scan
from shardwright.agents.strategy.pareto import alternatives
from shardwright.agents.strategy.study import SAMPLER, run_study
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
from shardwright.search_spaces.cost import price, workload
from shardwright.search_spaces.legality import refuse
from shardwright.search_spaces.space import legal_strategies


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
) -> SearchResult:
    """Find the fastest strategy that fits, by the exhaustive scan, with a study beside it.

    The result depends on the arguments alone: not on the clock, the machine or a journal left by
    an interrupted run of the same search.

    Raises:
        LegalityError: no strategy is legal, with the rule and the nearest legal values.
        InfeasibleError: none fits, with the smallest changes that would.
    """
    strategies = legal_strategies(profile, recipe, cluster)
    context = SearchContext(profile, recipe, cluster)
    if not strategies:
        raise refuse(context)
    pricing = _cached_price(profile, recipe, cluster, lora_targets, calibration)
    found = scan(strategies, pricing)
    if not found.feasible:
        raise infeasible(profile, recipe, cluster, lora_targets, found.best)
    key = sha256_of(
        {
            "profile": profile.fingerprint.digest,
            "recipe": sha256_of(recipe),
            "cluster": cluster_digest(cluster),
            "targets": sha256_of([target.model_dump(mode="json") for target in lora_targets]),
            "calibration": calibration_digest(calibration) if calibration else None,
            "costs": sha256_of([plan.cost.model_dump(mode="json") for plan in found.ranked]),
        }
    )
    study = run_study(context, pricing, key=key, trials=trials, seed=seed, journal=journal)
    record = SearchRecord(
        sampler=SAMPLER,
        seed=seed,
        trials=study.trials,
        legal_strategies=len(strategies),
        feasible_strategies=len(found.feasible),
        oracle_step_ms=found.best.cost.time.step_ms,
        study_step_ms=study.best_step_ms or 0.0,
        versions={"optuna": optuna.__version__},
    )
    return SearchResult(
        best=found.best.strategy,
        cost=found.best.cost,
        alternatives=alternatives(found.ranked),
        record=record,
        explanation=explain(found, record, cluster),
    )


def _cached_price(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    targets: tuple[LoraTarget, ...],
    calibration: Calibration | None,
) -> Price:
    """Prices by strategy, each computed once: a study repeats itself."""
    work = workload(profile, recipe, targets)
    known: dict[str, CostReport] = {}

    def priced(strategy: ParallelStrategy) -> CostReport:
        name = strategy.model_dump_json()
        if name not in known:
            known[name] = price(work, cluster, strategy, (), calibration)
        return known[name]

    return priced
