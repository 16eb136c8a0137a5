"""Strategies priced with the fused operators that each may have: the scan, what fits only so, and when to give up."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.agents.strategy import as_run
from shardwright.agents.strategy.as_run import search_fused
from shardwright.agents.strategy.bounds import SAVING, might_fit
from shardwright.agents.strategy.pricing import ByMesh, Pricer
from shardwright.agents.strategy.run import run_search
from shardwright.agents.strategy.study import Price, StudyOutcome, run_study
from shardwright.schemas.cost import CostReport
from shardwright.schemas.errors import InfeasibleError
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import price, workload
from shardwright.search_spaces.cost.fusion import EXPERT_OPERATORS, FusedProviders
from shardwright.search_spaces.cost.memory import memory_of
from shardwright.search_spaces.space import enumerate_plans

H = "0" * 64
MODELS = Path(__file__).resolve().parents[3] / "benchmarks" / "models.py"


def decision(op: str) -> FusionDecision:
    return FusionDecision(
        proposal_id=op,
        pattern=op.replace("_", "-"),
        variant="fused",
        provider="shardwright",
        op=op,
        modules=("layers.0",),
        roles={},
        source_sha256=H,
    )


LOSS, WHOLE, RECEIVED = map(decision, ("linear_cross_entropy", "moe_layer", "grouped_lora_mlp"))


def certified(strategy: ParallelStrategy) -> tuple[FusionDecision, ...]:
    """The whole layer at ep 1, received rows otherwise, the loss everywhere."""
    return (LOSS, WHOLE if strategy.mesh.ep == 1 else RECEIVED)


@pytest.fixture(scope="module")
def case(build: SimpleNamespace) -> SimpleNamespace:
    """Qwen3-30B-A3B on eight GPUs: 32 sequences of 4,096 tokens."""
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=32, tokens=4096), build.load_cluster("h200-8")
    targets = build.targets_of(profile, rank=8)
    table = enumerate_plans(SearchContext(profile, recipe, cluster))
    return SimpleNamespace(
        profile=profile,
        recipe=recipe,
        cluster=cluster,
        targets=targets,
        table=table,
        work=workload(profile, recipe, targets),
        limited=lambda size: build.with_memory(cluster, size),
    )


def test_columns_are_the_reports_of_each_plan_with_its_own_operators(case: SimpleNamespace) -> None:
    calls: list[ParallelStrategy] = []

    def counted(strategy: ParallelStrategy) -> tuple[FusionDecision, ...]:
        calls.append(strategy)
        return certified(strategy)

    pricer = Pricer(case.work, case.cluster, by_mesh=ByMesh(counted))
    columns = pricer.columns(case.table.plans)
    for position in range(0, len(case.table), len(case.table) // 40):
        strategy = case.table.strategy(position)
        cost = price(case.work, case.cluster, strategy, certified(strategy))
        assert cost == pricer.report(strategy)
        assert (columns.step_ms[position], columns.reserved[position]) == (
            cost.time.step_ms,
            cost.memory.reserved_bytes,
        )
    meshes = {(int(ep), int(cp)) for ep, cp in zip(case.table.plans.ep, case.table.plans.cp, strict=True)}
    assert len(calls) == len(meshes), "one certification for each that differs in what a rule looks at"


def test_plans_with_equal_operators_are_priced_together(case: SimpleNamespace) -> None:
    groups = list(ByMesh(certified).groups(case.table.plans))
    assert len(groups) == 2, "ep 1 and all others"
    positions = np.sort(np.concatenate([some for _, some in groups]))
    assert np.array_equal(positions, np.arange(len(case.table)))
    assert not ByMesh(lambda strategy: ()).any_fused(case.table.plans)


def fused_search(case: SimpleNamespace, size: int, journal: Path) -> tuple[ParallelStrategy, ParallelStrategy]:
    """(best without fused operators, best with), on devices of that size."""
    cluster = case.limited(size)
    arguments = case.profile, case.recipe, cluster, case.targets
    found = run_search(*arguments, trials=2, seed=0, journal=journal, may_fuse=True)
    again = search_fused(*arguments, certified, found.best)
    assert again is not None
    return found.best, again.strategies[0]


def reserved(case: SimpleNamespace, strategy: ParallelStrategy, fused: bool) -> int:
    fusions = certified(strategy) if fused else ()
    return int(price(case.work, case.cluster, strategy, fusions).memory.reserved_bytes)


def test_the_best_as_run_may_fit_only_with_its_operators(case: SimpleNamespace, tmp_path: Path) -> None:
    """No plan of the scan is faster as run, and the one chosen needs more than there is when it runs eager."""
    size = 60 << 30
    plain, fused = fused_search(case, size, tmp_path / "journal")
    assert reserved(case, plain, fused=False) <= size < reserved(case, fused, fused=False)
    assert reserved(case, fused, fused=True) <= 0.95 * size
    columns = Pricer(case.work, case.limited(size), by_mesh=ByMesh(certified)).columns(case.table.plans)
    best = price(case.work, case.cluster, fused, certified(fused)).time.step_ms
    assert best <= float(columns.step_ms[columns.within_margin].min())
    assert best < 0.95 * price(case.work, case.cluster, plain, certified(plain)).time.step_ms


def test_the_study_prices_each_plan_with_its_operators(case: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some plans that it tries fit with them alone."""
    size, tried = 60 << 30, []

    def told(context: SearchContext, report: Price, **more: Any) -> StudyOutcome:
        def priced(strategy: ParallelStrategy) -> CostReport:
            tried.append(strategy)
            return report(strategy)

        return run_study(context, priced, **more)

    monkeypatch.setattr(as_run, "run_study", told)
    arguments = case.profile, case.recipe, case.limited(size), case.targets
    leanest = int(Pricer(case.work, case.cluster).columns(case.table.plans).reserved.argmin())
    again = search_fused(*arguments, certified, case.table.strategy(leanest), trials=24)
    assert again is not None and len(tried) == 24
    only_fused = [
        one for one in tried if reserved(case, one, fused=True) <= 0.95 * size < reserved(case, one, fused=False)
    ]
    assert only_fused
    best = price(case.work, case.cluster, again.strategies[0], certified(again.strategies[0])).time.step_ms
    steps = (price(case.work, case.cluster, one, certified(one)).time.step_ms for one in only_fused)
    assert best <= min(steps)


def test_where_nothing_fits_without_fused_operators_the_search_waits_for_them(
    case: SimpleNamespace, tmp_path: Path
) -> None:
    pricer = Pricer(case.work, case.cluster)
    fused = Pricer(case.work, case.cluster, by_mesh=ByMesh(certified))
    eager_least, fused_least = (int(one.columns(case.table.plans).reserved.min()) for one in (pricer, fused))
    size = (eager_least + fused_least) // 2
    assert fused_least < size < eager_least
    with pytest.raises(InfeasibleError) as caught:
        run_search(
            case.profile, case.recipe, case.limited(size), case.targets, trials=2, seed=0, journal=tmp_path / "no"
        )
    assert "no legal plan fits without fused operators" in caught.value.what
    found, best = fused_search(case, size, tmp_path / "journal")
    assert reserved(case, found, fused=False) > size >= reserved(case, best, fused=True)


def test_where_no_operator_could_help_nobody_waits(case: SimpleNamespace, tmp_path: Path) -> None:
    cluster = case.limited(4 << 30)
    with pytest.raises(InfeasibleError, match="with or without fused operators") as caught:
        run_search(
            case.profile, case.recipe, cluster, case.targets, trials=2, seed=0, journal=tmp_path / "j", may_fuse=True
        )
    assert caught.value.exit_code == 7 and "GiB usable memory" in caught.value.next_action
    with pytest.raises(InfeasibleError, match="no legal plan fits with the fused operators it may have"):
        search_fused(case.profile, case.recipe, cluster, case.targets, certified, case.table.strategy(0))


def test_without_any_fused_operator_there_is_no_second_search(case: SimpleNamespace) -> None:
    arguments = case.profile, case.recipe, case.cluster, case.targets
    leanest = int(Pricer(case.work, case.cluster).columns(case.table.plans).reserved.argmin())
    assert search_fused(*arguments, lambda strategy: (), case.table.strategy(leanest)) is None
    small = case.profile, case.recipe, case.limited(4 << 30), case.targets
    with pytest.raises(InfeasibleError, match="none is certified here"):
        search_fused(*small, lambda strategy: (), case.table.strategy(leanest))


@pytest.fixture(scope="module")
def published(build: SimpleNamespace) -> tuple[CheckpointProfile, ...]:
    """Softmax, linear and sparse attention."""
    spec = importlib.util.spec_from_file_location("published_models", MODELS)
    assert spec is not None and spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = models
    spec.loader.exec_module(models)
    return build.qwen3_30b(), models.kimi_linear(), models.glm_5()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_choice_of_operators_needs_less_than_the_bound(
    build: SimpleNamespace, published: tuple[CheckpointProfile, ...], data: st.DataObject
) -> None:
    """Whatever is certified, a plan that fits with it makes the bound say that it might."""
    profile = data.draw(st.sampled_from(published))
    recipe = build.recipe_of(batch=128, tokens=data.draw(st.sampled_from((1024, 8192))))
    cluster = build.load_cluster("h200-128")
    work = workload(profile, recipe, build.targets_of(profile, rank=8))
    table = enumerate_plans(SearchContext(profile, recipe, cluster))
    some = table.plans.take(np.arange(data.draw(st.integers(0, 96)), len(table), 97))
    ops = data.draw(st.sets(st.sampled_from((*SAVING, "add_rms_norm", "rms_norm"))))
    expert = data.draw(st.sampled_from((None, *EXPERT_OPERATORS)))
    chosen = {op: ("shardwright", ("norm",) * profile.shape.num_layers) for op in ops}
    kernels = {op: op for op in ops}
    if expert is not None:
        chosen["experts"], kernels["experts"] = ("shardwright", ("experts",)), expert
    least = int(memory_of(work, cluster, some, FusedProviders(chosen, kernels)).reserved.min())
    assert might_fit(work, build.with_memory(cluster, least), some)
