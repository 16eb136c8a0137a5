"""The whole search: best by the scan, study beside it, same input same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest

from shardwright.agents.strategy.oracle import Priced, scan
from shardwright.agents.strategy.pareto import dominates, front
from shardwright.agents.strategy.run import SearchResult, run_search
from shardwright.agents.strategy.study import run_study
from shardwright.schemas.canonical import canonical_bytes
from shardwright.schemas.cost import CostReport
from shardwright.schemas.errors import InfeasibleError, LegalityError
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import price, workload
from shardwright.search_spaces.legality import violations
from shardwright.search_spaces.space import legal_strategies

Search = Callable[..., SearchResult]


def as_bytes(result: SearchResult) -> bytes:
    return canonical_bytes([result.best, result.cost, result.alternatives, result.record, result.explanation])


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "tokens", "base"),
    [
        ("smol", "cpu-2", 8, 256, "float32"),
        ("smol", "cpu-1", 4, 256, "float32"),
        ("qwen3_30b", "h200-8", 64, 4096, "bfloat16"),
    ],
)
def test_the_best_is_the_fastest_that_fits(
    build: SimpleNamespace, search: Search, model: str, cluster: str, batch: int, tokens: int, base: str
) -> None:
    result = search(model, cluster, batch=batch, tokens=tokens, base=base)
    profile, spec = getattr(build, model)(), build.load_cluster(cluster)
    recipe = build.recipe_of(batch=batch, tokens=tokens, base=base)
    assert violations(profile, recipe, spec, result.best) == ()
    work = workload(profile, recipe, build.targets_of(profile, rank=8))
    costs = [price(work, spec, strategy) for strategy in legal_strategies(profile, recipe, spec)]
    fitting = [cost.time.step_ms for cost in costs if cost.memory.fraction <= 0.95]
    assert result.cost.time.step_ms == result.record.oracle_step_ms == min(fitting)
    assert result.record.legal_strategies == len(costs)
    assert result.record.feasible_strategies == sum(cost.feasible for cost in costs)
    assert result.record.study_step_ms >= result.record.oracle_step_ms


def test_two_searches_are_equal_byte_for_byte(search: Search) -> None:
    assert as_bytes(search("qwen3_30b", "h200-8")) == as_bytes(search("qwen3_30b", "h200-8"))


def test_a_search_that_was_interrupted_ends_as_an_unbroken_one(search: Search, tmp_path: Path) -> None:
    whole = search("qwen3_30b", "h200-8", trials=24)
    journal = tmp_path / "broken.journal"
    search("qwen3_30b", "h200-8", trials=13, journal=journal)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    name = optuna.get_all_study_names(storage)[0]
    optuna.load_study(study_name=name, storage=storage).ask()
    resumed = search("qwen3_30b", "h200-8", trials=24, journal=journal)
    assert as_bytes(resumed) == as_bytes(whole)
    assert as_bytes(search("qwen3_30b", "h200-8", trials=24, journal=journal)) == as_bytes(whole)


def test_the_journal_is_an_optuna_study_with_its_facts(search: Search, tmp_path: Path) -> None:
    journal = tmp_path / "study.journal"
    result = search("qwen3_30b", "h200-8", batch=64, tokens=4096, trials=20, seed=7, journal=journal)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    study = optuna.load_study(study_name=optuna.get_all_study_names(storage)[0], storage=storage)
    assert study.user_attrs["seed"] == 7 and study.user_attrs["optuna"] == optuna.__version__
    assert len(study.trials) == 20
    assert study.best_value == result.record.study_step_ms
    assert any(trial.constraints["memory_excess"] > 0 for trial in study.trials)


def test_seeds_draw_differently_and_each_repeats(build: SimpleNamespace, tmp_path: Path) -> None:
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=64), build.load_cluster("h200-8")
    work, context = workload(profile, recipe, ()), SearchContext(profile, recipe, cluster)

    def drawn(seed: int) -> list[str]:
        seen: list[str] = []

        def priced(strategy: ParallelStrategy) -> CostReport:
            assert violations(profile, recipe, cluster, strategy) == ()
            seen.append(strategy.text())
            return price(work, cluster, strategy)

        journal = tmp_path / f"{seed}-{len(list(tmp_path.iterdir()))}"
        run_study(context, priced, key="k", trials=25, seed=seed, journal=journal)
        return seen

    assert drawn(1) == drawn(1) != drawn(2)


def test_the_study_finds_the_optimum_of_a_small_space(search: Search) -> None:
    result = search("smol", "cpu-2", tokens=256, base="float32", trials=64)
    assert result.record.study_step_ms == result.record.oracle_step_ms


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "base"), [("smol", "cpu-2", 8, "float32"), ("qwen3_30b", "h200-128", 256, "bfloat16")]
)
def test_a_search_of_64_trials_takes_seconds(search: Search, model: str, cluster: str, batch: int, base: str) -> None:
    start = time.perf_counter()
    search(model, cluster, batch=batch, base=base, trials=64)
    assert time.perf_counter() - start < 5


def test_rivals_say_why_they_lost(search: Search) -> None:
    result = search("qwen3_30b", "h200-8", batch=64, tokens=4096)
    assert 1 <= len(result.alternatives) <= 8
    assert any(rival.pareto for rival in result.alternatives)
    for rival in result.alternatives:
        assert rival.strategy != result.best
        slower = rival.step_ms > result.cost.time.step_ms
        assert ("slower" in rival.lost_because) == (slower and rival.feasible)


def test_the_front_holds_what_nothing_dominates(build: SimpleNamespace) -> None:
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=64, tokens=4096), build.load_cluster("h200-8")
    work = workload(profile, recipe, build.targets_of(profile, rank=8))
    ranked = scan(legal_strategies(profile, recipe, cluster), lambda s: price(work, cluster, s)).ranked
    best = front(ranked)
    assert best[0] == ranked[0]
    fitting = [plan for plan in ranked if plan.cost.feasible]
    for plan in fitting:
        assert (plan in best) != any(dominates(other, plan) for other in fitting)


def test_ranking_prefers_the_margin_then_time_then_memory(build: SimpleNamespace) -> None:
    profile, recipe, cluster = build.smol(), build.recipe_of(base="float32"), build.load_cluster("cpu-2")
    strategy = legal_strategies(profile, recipe, cluster)[0]
    cost = price(workload(profile, recipe, ()), cluster, strategy)

    def plan(step_ms: float, fraction: float) -> Priced:
        budget = cost.memory.budget_bytes
        memory = cost.memory.model_copy(update={"reserved_bytes": int(budget * fraction)})
        timed = cost.time.model_copy(update={"step_ms": step_ms})
        report = cost.model_copy(update={"memory": memory, "time": timed, "feasible": memory.fits})
        return Priced(strategy, report)

    order = [plan(10, 0.5), plan(10, 0.6), plan(20, 0.9), plan(1, 0.96), plan(0.5, 0.99), plan(0.1, 1.5), plan(0.1, 2)]
    assert sorted(order[::-1], key=lambda p: p.rank_key) == order


def test_a_base_that_cannot_fit_names_the_smallest_world_that_would(build: SimpleNamespace, tmp_path: Path) -> None:
    """Case B6: 13.4 MB of adapters, 61.06 GB of base, one 24 GB GPU; two ranks would hold 30.5 GB each."""
    profile = build.qwen3_30b()
    targets = build.targets_of(profile, rank=8, experts=False)
    assert sum(target.adapter_parameters for target in targets) == 6_684_672
    cluster = build.with_memory(build.load_cluster("h200-1"), 24 * 10**9)
    recipe = build.recipe_of(batch=1, tokens=2048, targets=("attention",))
    with pytest.raises(InfeasibleError) as error:
        run_search(profile, recipe, cluster, targets, trials=4, seed=0, journal=tmp_path / "journal")
    assert error.value.exit_code == 7 and error.value.code == "infeasible/memory"
    assert "the frozen base (56.87 GiB)" in error.value.what
    world = int(error.value.next_action.split(": ")[1].split(" of these devices")[0])
    assert world in (4, 8)
    bigger = cluster.model_copy(update={"devices_per_node": world})
    batch = recipe.batch.model_copy(update={"global_batch_sequences": world})
    fitting = recipe.model_copy(update={"batch": batch})
    result = run_search(profile, fitting, bigger, targets, trials=4, seed=0, journal=tmp_path / "bigger")
    assert result.cost.feasible
    half = cluster.model_copy(update={"devices_per_node": world // 2})
    with pytest.raises(InfeasibleError):
        run_search(profile, fitting, half, targets, trials=4, seed=0, journal=tmp_path / "half")


def test_a_shorter_sequence_is_offered_where_it_would_fit(build: SimpleNamespace, tmp_path: Path) -> None:
    profile = build.smol()
    recipe = build.recipe_of(batch=1, tokens=65536, base="float32")
    with pytest.raises(InfeasibleError) as error:
        run_search(profile, recipe, build.load_cluster("cpu-1"), (), trials=1, seed=0, journal=tmp_path / "journal")
    tokens = int(error.value.next_action.split("sequence_tokens = ")[1])
    shorter = build.recipe_of(batch=1, tokens=tokens, base="float32")
    assert run_search(
        profile, shorter, build.load_cluster("cpu-1"), (), trials=1, seed=0, journal=tmp_path / "j"
    ).cost.feasible


def test_an_illegal_recipe_is_refused_before_pricing(search: Search) -> None:
    with pytest.raises(LegalityError) as error:
        search("qwen3_30b", "h200-8", batch=12)
    assert error.value.code == "legality/global-batch"


def test_more_memory_keeps_or_improves_the_best(build: SimpleNamespace, tmp_path: Path) -> None:
    profile, recipe = build.qwen3_30b(), build.recipe_of(batch=64, tokens=4096)
    targets = build.targets_of(profile, rank=8)
    steps = []
    for gib in (40, 60, 90, 140, 400):
        cluster = build.with_memory(build.load_cluster("h200-8"), gib << 30)
        found = run_search(profile, recipe, cluster, targets, trials=1, seed=0, journal=tmp_path / str(gib))
        assert found.cost.memory.reserved_bytes <= 0.95 * (gib << 30)
        steps.append(found.cost.time.step_ms)
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]
