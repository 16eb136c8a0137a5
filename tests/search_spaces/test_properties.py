"""Rules that hold for every plan of the cost model."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.schemas.canonical import round_significant
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import estimate, evaluate, round_all, workload
from shardwright.search_spaces.cost.plans import plans_of
from shardwright.search_spaces.cost.routing import rank_imbalance, routed_rows
from shardwright.search_spaces.space import legal_strategies, suggest_in

RULES = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
MODELS = st.sampled_from(["smol", "qwen3_30b", "mixtral_8x7b"])


@given(model=MODELS, pick=st.integers(0, 10**6), tokens=st.sampled_from([128, 512, 2048, 8192]))
@RULES
def test_memory_and_time_never_fall_with_longer_sequences(
    build: SimpleNamespace, model: str, pick: int, tokens: int
) -> None:
    profile, cluster = getattr(build, model)(), build.cluster_of("h200-8")
    targets = build.targets_of(profile, rank=8)
    strategies = legal_strategies(profile, build.recipe_of(batch=16), cluster)
    strategy = strategies[pick % len(strategies)]
    short, longer = (
        estimate(profile, build.recipe_of(batch=16, tokens=size), cluster, strategy, targets)
        for size in (tokens, tokens + 64)
    )
    assert longer.memory.peak_bytes >= short.memory.peak_bytes
    assert longer.memory.reserved_bytes >= short.memory.reserved_bytes
    assert all(longer.memory.by_moment[m] >= short.memory.by_moment[m] for m in short.memory.by_moment)
    assert longer.time.step_ms >= short.time.step_ms


@given(model=MODELS, pick=st.integers(0, 10**6), budget=st.integers(1, 200), more=st.integers(0, 200))
@RULES
def test_more_memory_never_makes_a_feasible_plan_infeasible(
    build: SimpleNamespace, model: str, pick: int, budget: int, more: int
) -> None:
    profile, recipe, cluster = getattr(build, model)(), build.recipe_of(batch=16), build.cluster_of("h200-8")
    strategies = legal_strategies(profile, recipe, cluster)
    strategy = strategies[pick % len(strategies)]
    small, large = (
        estimate(profile, recipe, build.with_memory(cluster, size << 30), strategy, ())
        for size in (budget, budget + more)
    )
    assert large.feasible or not small.feasible
    assert large.memory.peak_bytes == small.memory.peak_bytes


@given(
    tokens=st.integers(1, 1 << 16),
    experts=st.sampled_from([4, 8, 64, 128, 256, 896]),
    top=st.integers(1, 16),
    power=st.integers(0, 7),
)
@RULES
def test_expert_parallelism_does_not_shrink_routed_rows(tokens: int, experts: int, top: int, power: int) -> None:
    top = min(top, experts)
    ep = 2**power
    if experts % ep:
        return
    rows = routed_rows(tokens, top, experts, ep)
    assert tokens * top <= rows <= tokens * ep * min(top, experts // ep)


@given(model=MODELS, pick=st.integers(0, 10**6))
@RULES
def test_checkpointing_and_reshard_trade_time_for_memory(build: SimpleNamespace, model: str, pick: int) -> None:
    profile, recipe, cluster = (
        getattr(build, model)(),
        build.recipe_of(batch=16, tokens=2048),
        build.cluster_of("h200-8"),
    )
    strategies = legal_strategies(profile, recipe, cluster)
    strategy = strategies[pick % len(strategies)]
    targets = build.targets_of(profile, rank=8)

    def priced(**change: object) -> tuple[int, float]:
        report = estimate(profile, recipe, cluster, strategy.model_copy(update=change), targets)
        return report.memory.by_moment["loss"], report.time.step_ms

    kept, recomputed = priced(checkpointing="none"), priced(checkpointing="full")
    assert recomputed[0] < kept[0] and recomputed[1] > kept[1]
    gathered, dropped = priced(reshard_after_forward=False), priced(reshard_after_forward=True)
    assert dropped[0] <= gathered[0] and dropped[1] >= gathered[1]


def test_the_same_input_gives_the_same_report(build: SimpleNamespace) -> None:
    profile, strategy = build.mixtral_8x7b(), ParallelStrategy(mesh=Mesh(shard=4, ep=2))
    reports = {
        estimate(
            profile, build.recipe_of(), build.cluster_of("h200-8"), strategy, build.targets_of(profile, rank=8)
        ).model_dump_json()
        for _ in range(3)
    }
    assert len(reports) == 1


def test_imbalance_prior_by_hand() -> None:
    """E 128, e 8, T·K → ∞: 1 + sqrt(2 ln 8)·0.5·sqrt(8/128) = 1.2549; one rank is always balanced."""
    assert abs(rank_imbalance(1 << 30, 8, 128, 8) - 1.2549) < 1e-3
    assert rank_imbalance(100, 8, 128, 1) == 1
    assert rank_imbalance(1, 4, 4, 4) == 1


@given(seed=st.integers(0, 10**6), model=MODELS, cluster=st.sampled_from(["h200-8", "h200-128"]))
@settings(parent=RULES, max_examples=25)
def test_columns_agree_with_single_estimates_to_the_last_digit(
    build: SimpleNamespace, seed: int, model: str, cluster: str
) -> None:
    """Random plans of the whole explored space, priced together and alone."""
    profile, spec = getattr(build, model)(), build.cluster_of(cluster)
    recipe, targets = build.recipe_of(batch=spec.world_size, tokens=2048), build.targets_of(profile, rank=8)
    context = SearchContext(profile, recipe, spec, explore=True)
    draw = random.Random(seed)
    strategies = [suggest_in(Uniform(draw), context) for _ in range(6)]
    costs = evaluate(workload(profile, recipe, targets), spec, plans_of(strategies, profile))
    for plan, strategy in enumerate(strategies):
        alone = estimate(profile, recipe, spec, strategy, targets)
        assert costs.report(plan) == alone
        assert costs.step_ms[plan] == alone.time.step_ms
        assert costs.reserved[plan] == alone.memory.reserved_bytes
        assert costs.gpu_hours[plan] == alone.gpu_hours
        assert bool(costs.feasible[plan]) == alone.feasible


class Uniform:
    """Draws uniformly."""

    def __init__(self, source: random.Random) -> None:
        self.source = source

    def suggest_int(self, name: str, low: int, high: int) -> int:
        return self.source.randint(low, high)

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self.source.choice(list(choices))


def test_columns_are_rounded_as_reports_are() -> None:
    values = np.array([random.Random(i).lognormvariate(3, 6) for i in range(2000)])
    assert [round_significant(v) for v in values] == list(round_all(values))
    assert list(round_all(np.array([0.0]))) == [0.0]


@given(rows=st.integers(1, 10**7), top=st.integers(1, 16), power=st.integers(1, 7))
@RULES
def test_memory_is_planned_for_a_quantile_above_the_expectation(rows: int, top: int, power: int) -> None:
    mean, planned = (routed_rows(rows, top, 896, 2**power, 1, quantile) for quantile in (None, 0.95))
    assert rows * top <= mean <= planned
