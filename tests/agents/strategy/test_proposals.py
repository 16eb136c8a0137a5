"""Chains of steps: what they cross, that they stay legal, and that they repeat."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwright.agents.strategy import proposals
from shardwright.agents.strategy.complete import Completion
from shardwright.agents.strategy.pricing import SAFETY_FRACTION, Pricer
from shardwright.agents.strategy.study import StudyOutcome, run_study
from shardwright.schemas.cost import CostReport
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import workload
from shardwright.search_spaces.legality import violations_in
from shardwright.search_spaces.space import enumerate_plans

Cost = Callable[[Any], tuple[float, float]]
"""Mesh, micro-batch and the like of one plan → (step time, share of memory)."""


def ridge(plan: Any) -> tuple[float, float]:
    """Weights over ep, activations over cp: either alone makes the step slower, or does not fit; both pay.

    Least at cp = ep with as much of both as the world holds, micro-batches of one, and offloaded activations.
    """
    cp, ep, offloads = math.log2(plan.mesh.cp), math.log2(plan.mesh.ep), plan.offload == "activations"
    others = math.log2(plan.mesh.pp * plan.mesh.tp * plan.mesh.replicate * plan.mesh.expert_tp)
    step = 100 * 1.3 ** (2 * abs(cp - ep) + others - (cp + ep) + 0.5 * math.log2(plan.micro_batch_sequences))
    memory = 0.6 + 0.15 * max(0.0, cp + ep - 2) - 0.5 * offloads
    return step * (1.0 + 0.25 * offloads), memory


def trade(plan: Any) -> tuple[float, float]:
    """Bigger micro-batches are faster and fill memory, which pp and shard empty again; pp and tp cost time."""
    micro, mesh = math.log2(plan.micro_batch_sequences), plan.mesh
    step = 100 * 1.25 ** (-1.5 * micro + math.log2(mesh.pp) + 2 * math.log2(mesh.tp) + 0.5 * math.log2(mesh.shard))
    kept = 0.5 * 2 ** (micro - math.log2(mesh.pp * mesh.cp)) + 0.8 / (mesh.shard * mesh.ep) ** 0.5
    return step * (1 + 0.1 * (plan.offload != "none") + 0.02 * plan.prefetch_depth), kept


def invented(cost: Cost, told: list[ParallelStrategy]) -> Callable[[ParallelStrategy], CostReport]:
    def priced(strategy: ParallelStrategy) -> Any:
        told.append(strategy)
        step, share = cost(strategy)
        return SimpleNamespace(
            time=SimpleNamespace(step_ms=step),
            memory=SimpleNamespace(budget_bytes=10**9, reserved_bytes=int(share * 10**9)),
        )

    return priced


def studied(
    context: SearchContext, cost: Cost, *, seed: int, trials: int, told: list[ParallelStrategy] | None = None
) -> StudyOutcome:
    price = invented(cost, [] if told is None else told)
    return run_study(context, price, key="k", trials=trials, seed=seed, journal=None, complete=lambda plan: plan)


@pytest.fixture(scope="module")
def context(build: SimpleNamespace) -> SearchContext:
    return SearchContext(build.qwen3_30b(), build.recipe_of(batch=64), build.load_cluster("h200-8"), explore=True)


def least(context: SearchContext, cost: Cost) -> float:
    """The optimum, by every plan of the space that differs in what these costs look at."""
    table = enumerate_plans(context)
    looked_at = np.stack([table.head_of, table.plans.offload, table.plans.prefetch.astype(np.int64)])
    _, different = np.unique(looked_at, axis=1, return_index=True)
    costs = [cost(table.strategy(int(plan))) for plan in different]
    return min(step for step, share in costs if share <= SAFETY_FRACTION)


@pytest.mark.parametrize("cost", [ridge, trade])
def test_coupled_axes_are_crossed(context: SearchContext, cost: Cost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median seed finds the optimum of every plan; with the sampler alone the same trials do no better for any."""
    best = least(context, cost)
    found = [studied(context, cost, seed=seed, trials=90).best_step_ms or math.inf for seed in range(3)]
    monkeypatch.setattr(proposals, "FREE_TRIALS", 90)
    alone = [studied(context, cost, seed=seed, trials=90).best_step_ms or math.inf for seed in range(3)]
    assert all(ours <= theirs for ours, theirs in zip(found, alone, strict=True))
    assert statistics.median(found) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("cost", [ridge, trade])
def test_every_plan_that_is_tried_is_legal(context: SearchContext, cost: Cost) -> None:
    told: list[ParallelStrategy] = []
    studied(context, cost, seed=3, trials=70, told=told)
    assert len(told) == 70 and all(violations_in(context, plan) == () for plan in told)
    proposed = told[proposals.FREE_TRIALS :: 2]
    assert len(set(map(str, proposed))) == len(proposed), "a walk proposes what was not tried"
    assert not set(map(str, proposed)) & set(map(str, told[: proposals.FREE_TRIALS]))


def test_a_seed_repeats(context: SearchContext) -> None:
    runs: list[list[ParallelStrategy]] = [[], [], []]
    for told, seed in zip(runs, (5, 5, 6), strict=True):
        studied(context, ridge, seed=seed, trials=70, told=told)
    assert runs[0] == runs[1] != runs[2]


def test_an_interrupted_study_proposes_what_an_unbroken_one_does(context: SearchContext, tmp_path: Any) -> None:
    def run(trials: int, journal: Any) -> list[ParallelStrategy]:
        told: list[ParallelStrategy] = []
        price = invented(ridge, told)
        run_study(context, price, key="k", trials=trials, seed=1, journal=journal, complete=lambda plan: plan)
        return told

    assert [*run(47, tmp_path / "broken"), *run(54, tmp_path / "broken")] == run(54, None)


def test_where_nothing_fits_walks_go_to_less_memory(context: SearchContext) -> None:
    """The least share of any plan is 1.2: the excess falls until it is reached."""

    def heavy(plan: Any) -> tuple[float, float]:
        return 1.0, 1.2 + 0.3 * abs(math.log2(plan.mesh.ep) - 1) + 0.2 * math.log2(plan.micro_batch_sequences)

    told: list[ParallelStrategy] = []
    assert studied(context, heavy, seed=0, trials=70, told=told).best is None
    assert min(heavy(plan)[1] for plan in told) == 1.2


def test_layers_that_are_drawn_stay_as_they_are_along_a_walk(build: SimpleNamespace) -> None:
    """Without a completion each trial draws which layers to recompute; steps change everything else."""
    context = SearchContext(build.qwen3_30b(), build.recipe_of(batch=64), build.load_cluster("h200-8"))
    told: list[ParallelStrategy] = []

    def leaner(plan: Any) -> tuple[float, float]:
        return 200.0 - len(plan.checkpointed_layers) + math.log2(plan.mesh.shard), 0.5

    run_study(context, invented(leaner, told), key="k", trials=60, seed=0, journal=None)
    assert all(violations_in(context, plan) == () for plan in told)
    assert any(plan.checkpointing == "layers" for plan in told[proposals.FREE_TRIALS :: 2])


def test_on_an_exact_space_no_seed_is_worse_than_the_sampler_alone(
    build: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real cost model, 40 GiB a rank, recomputed layers chosen exactly; optimum by pricing every plan."""
    profile, recipe = build.qwen3_30b(), build.recipe_of(batch=64, tokens=4096)
    cluster = build.with_memory(build.load_cluster("h200-8"), 40 << 30)
    context = SearchContext(profile, recipe, cluster)
    pricer = Pricer.of(workload(profile, recipe, build.targets_of(profile, rank=8)), cluster)
    complete, table = Completion(context, pricer), enumerate_plans(context)
    bare = np.flatnonzero(table.plans.recomputed.sum(axis=0) == 0)
    best, bounds = math.inf, pricer.columns(table.plans).step_ms
    for position in sorted(bare, key=lambda plan: float(bounds[plan])):
        if bounds[position] >= best:
            break
        _, step_ms, fits = complete.best_counts(table.plans.take(slice(position, position + 1)))
        best = min(best, step_ms) if fits else best

    def found(seed: int) -> float:
        outcome = run_study(context, pricer.report, key="k", trials=90, seed=seed, journal=None, complete=complete)
        return outcome.best_step_ms or math.inf

    ours = [found(seed) for seed in range(3)]
    monkeypatch.setattr(proposals, "FREE_TRIALS", 90)
    alone = [found(seed) for seed in range(3)]
    assert all(best <= one <= other for one, other in zip(ours, alone, strict=True))
    assert statistics.median(ours) == best
