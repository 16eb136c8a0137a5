"""The whole search: best by the scan, study beside it, same input same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest

from shardwright.agents.strategy.complete import Completion, with_layers
from shardwright.agents.strategy.explain import unproved_choices
from shardwright.agents.strategy.infeasible import fits, grown, smallest_world
from shardwright.agents.strategy.neighbours import Known, neighbours, steps
from shardwright.agents.strategy.oracle import Priced, scan
from shardwright.agents.strategy.pareto import dominates, front, objectives
from shardwright.agents.strategy.pricing import Pricer
from shardwright.agents.strategy.refine import refine
from shardwright.agents.strategy.run import SearchResult, run_search
from shardwright.agents.strategy.study import run_study
from shardwright.schemas.canonical import canonical_bytes
from shardwright.schemas.cost import CostReport
from shardwright.schemas.errors import InfeasibleError, LegalityError
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.axes.base import draws_of
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import price, workload
from shardwright.search_spaces.legality import violations, violations_in
from shardwright.search_spaces.space import enumerate_plans, legal_strategies

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
    assert result.cost.time.step_ms == result.record.oracle_step_ms
    if result.best.checkpointing == "layers":
        assert result.record.oracle_step_ms < min(fitting), "recomputing some layers is finer than what is enumerated"
    else:
        assert result.record.oracle_step_ms == min(fitting)
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
    assert all("memory_excess" in trial.constraints for trial in study.trials)
    assert all(set(trial.user_attrs) == {"drawn", "strategy", "label"} for trial in study.trials)


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
    start = time.process_time()
    search(model, cluster, batch=batch, base=base, trials=64)
    assert time.process_time() - start < 10


def test_rivals_say_why_they_lost(search: Search) -> None:
    result = search("qwen3_30b", "h200-8", batch=64, tokens=4096)
    assert 1 <= len(result.alternatives) <= 8
    assert any(rival.pareto for rival in result.alternatives)
    for rival in result.alternatives:
        assert rival.strategy != result.best
        slower = rival.step_ms > result.cost.time.step_ms
        assert ("slower" in rival.lost_because) == (slower and rival.feasible)


def test_no_rival_differs_in_what_changes_nothing(search: Search) -> None:
    """Prefetching further, where a gather is hidden anyway, would fill the list three times over."""
    result = search("qwen3_30b", "h200-8", batch=64, tokens=4096)
    shown = [(rival.strategy.mesh, rival.step_ms) for rival in result.alternatives]
    shown.append((result.best.mesh, result.cost.time.step_ms))
    assert len(set(map(str, shown))) == len(shown) > 4


def test_the_front_holds_what_nothing_dominates(build: SimpleNamespace) -> None:
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=64, tokens=4096), build.load_cluster("h200-8")
    table = enumerate_plans(SearchContext(profile, recipe, cluster))
    found = scan(table, Pricer.of(workload(profile, recipe, build.targets_of(profile, rank=8)), cluster))
    plans = [found.priced(plan) for plan in range(len(table))]
    assert [plan.rank_key[:3] for plan in found.top(10)] == sorted(plan.rank_key[:3] for plan in plans)[:10]
    on_front = {int(plan) for plan in found.columns.front()}
    assert int(found.ranking[0]) in on_front
    fitting = [plan for plan in plans if plan.cost.feasible]
    for position, plan in enumerate(plans):
        beaten = not plan.cost.feasible or any(dominates(other, plan) for other in fitting)
        assert (position in on_front) != beaten or objectives(plan) in [objectives(plans[i]) for i in on_front]
    whole = found.columns.front()
    assert len(whole) > 3 and found.columns.front(3).tolist() == whole[:3].tolist()
    assert front(tuple(plans[i] for i in sorted(on_front))) == tuple(plans[i] for i in sorted(on_front))


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


def test_three_nodes_are_named_where_two_are_too_few(build: SimpleNamespace) -> None:
    """9 GB a rank: sixteen ranks need 9.4, twenty-four 8.7. Doubling alone would ask for thirty-two."""
    profile = build.qwen3_30b()
    targets = build.targets_of(profile, rank=8, experts=False)
    recipe = build.recipe_of(batch=8, tokens=1024, targets=("attention",))
    cluster = build.with_memory(build.load_cluster("h200-8"), 9 * 10**9)
    assert smallest_world(profile, recipe, cluster, targets) == 24
    assert not fits(
        profile, build.recipe_of(batch=16, tokens=1024, targets=("attention",)), grown(cluster, 16), targets
    )


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


def test_recomputed_layers_are_chosen_exactly(build: SimpleNamespace) -> None:
    """The completion's choice is the fastest count that keeps the margin; the next smaller one does not."""
    profile, recipe = build.qwen3_30b(), build.recipe_of(batch=64, tokens=4096)
    cluster = build.with_memory(build.load_cluster("h200-8"), 60 << 30)
    context = SearchContext(profile, recipe, cluster, admitted=(("checkpointing", "layers"),))
    pricer = Pricer.of(workload(profile, recipe, build.targets_of(profile, rank=8)), cluster)
    complete = Completion(context, pricer)
    drawn = ParallelStrategy(mesh=Mesh(shard=8), micro_batch_sequences=2, accumulation_steps=4)
    chosen = complete(drawn)
    some = len(chosen.checkpointed_layers)
    assert chosen.checkpointing == "layers" and 0 < some < 48
    assert violations_in(context, chosen) == ()

    def fits(count: int) -> bool:
        return bool(pricer.report(with_layers(context, drawn, (count,))).memory.fraction <= 0.95)

    assert fits(some) and not fits(some - 1)
    assert complete(drawn) is chosen


def test_refining_beats_the_scan_where_some_layers_are_enough(build: SimpleNamespace) -> None:
    profile, recipe = build.qwen3_30b(), build.recipe_of(batch=8, tokens=4096)
    cluster = build.with_memory(build.load_cluster("h200-8"), 40 << 30)
    context = SearchContext(profile, recipe, cluster, admitted=(("checkpointing", "layers"),))
    pricer = Pricer.of(workload(profile, recipe, build.targets_of(profile, rank=8)), cluster)
    found = scan(enumerate_plans(context), pricer)
    best = refine(context, found, Completion(context, pricer))
    assert best.strategy.checkpointing == "layers"
    assert best.cost.time.step_ms < found.best.cost.time.step_ms
    assert best.within_margin


def test_neighbours_are_legal_and_one_step_away(build: SimpleNamespace) -> None:
    context = SearchContext(build.qwen3_30b(), build.recipe_of(batch=64), build.load_cluster("h200-8"), explore=True)
    plan = ParallelStrategy(mesh=Mesh(shard=4, ep=2), accumulation_steps=8)
    around = list(neighbours(context, plan, ("checkpointing",)))
    assert len({str(one) for one in around}) > 30 and plan not in around[:20]
    for one in around:
        assert violations_in(context, one) == ()
    assert all(one.global_batch_sequences() == 64 and one.mesh.world_size == 8 for one in around)
    meshes = {(one.mesh.shard, one.mesh.ep, one.mesh.replicate) for one in around}
    assert {(2, 4, 1), (8, 1, 1), (2, 2, 2), (4, 1, 2)} <= meshes, "a factor of 2 from shard or ep to another degree"


def test_legal_values_that_are_remembered_are_those_that_are_not(build: SimpleNamespace) -> None:
    """The memory of a search is keyed by all that a schedule may see of the mesh."""
    context = SearchContext(build.qwen3_30b(), build.recipe_of(batch=64), build.load_cluster("h200-8"), explore=True)
    known: Known = {}
    for position in range(0, 32_000, 4001):
        draws = draws_of(enumerate_plans(context).strategy(position))
        kept = list(steps(context, draws, ("checkpointing",), known))
        assert kept == list(steps(context, draws, ("checkpointing",)))
    assert known


def test_a_step_keeps_the_micro_batch_or_the_number_of_them(build: SimpleNamespace) -> None:
    """From shard 4 to cp 2: half as many ranks read sequences, so each has twice as many."""
    context = SearchContext(build.qwen3_30b(), build.recipe_of(batch=64), build.load_cluster("h200-8"), explore=True)
    plan = ParallelStrategy(mesh=Mesh(shard=8), micro_batch_sequences=2, accumulation_steps=4)
    cut = {
        (one.micro_batch_sequences, one.accumulation_steps)
        for one in neighbours(context, plan, ("checkpointing",))
        if one.mesh == Mesh(shard=4, cp=2)
    }
    assert {(2, 8), (4, 4)} <= cut


def test_exploring_finds_no_slower_plan_and_says_what_does_not_run(build: SimpleNamespace, tmp_path: Path) -> None:
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=16, tokens=2048), build.load_cluster("h200-2")
    results = [
        run_search(profile, recipe, cluster, (), trials=4, seed=0, journal=tmp_path / str(explore), explore=explore)
        for explore in (False, True)
    ]
    assert results[1].cost.time.step_ms <= results[0].cost.time.step_ms
    marked = any("does not run" in sentence for sentence in results[1].explanation)
    assert marked == bool(unproved_choices(results[1].best))
    assert not unproved_choices(results[0].best)


def test_a_time_budget_ends_the_study(build: SimpleNamespace, tmp_path: Path) -> None:
    profile, recipe, cluster = build.smol(), build.recipe_of(batch=8, base="float32"), build.load_cluster("cpu-2")
    told: list[tuple[int, int]] = []
    arguments = {"trials": 500, "seed": 0, "progress": lambda done, wanted: told.append((done, wanted))}
    result = run_search(profile, recipe, cluster, (), journal=tmp_path / "j", time_budget_s=0.3, **arguments)
    assert 0 < result.record.trials < 500
    assert told == [(n + 1, 500) for n in range(result.record.trials)]
