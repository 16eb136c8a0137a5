"""Enumeration and suggestion give the same, legal, space."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.schemas.errors import LegalityError
from shardwright.search_spaces import executable
from shardwright.search_spaces.axes import AXES
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost.plans import plans_of
from shardwright.search_spaces.legality import violations, violations_in
from shardwright.search_spaces.space import enumerate_plans, legal_strategies, parameters_of, suggest, suggest_in

TESTS = Path(__file__).resolve().parents[1]
SLOW_FIXTURE = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


class RandomTrial:
    """Draws uniformly."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def suggest_int(self, name: str, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self.random.choice(list(choices))


class ReplayTrial:
    """Gives back recorded parameters."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters = dict(parameters)

    def suggest_int(self, name: str, low: int, high: int) -> int:
        value = self.parameters.pop(name)
        assert low <= value <= high
        return value

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        value = self.parameters.pop(name)
        assert value in choices
        return value


@given(
    experts=st.sampled_from([0, 4, 6, 8, 14, 30, 896]),
    nodes=st.sampled_from([1, 2, 3, 7]),
    per_node=st.sampled_from([1, 2, 4, 6, 8]),
    times=st.integers(1, 4),
    explore=st.booleans(),
    seed=st.integers(0, 9999),
)
@SLOW_FIXTURE
def test_every_strategy_is_legal_however_it_is_made(
    build: SimpleNamespace, experts: int, nodes: int, per_node: int, times: int, explore: bool, seed: int
) -> None:
    cluster = build.cluster_of("h200-128", nodes=nodes, devices_per_node=per_node)
    profile = build.tiny(max(experts, 1), top=1)
    if experts == 0:
        profile = profile.model_copy(update={"shape": profile.shape.model_copy(update={"num_experts": 0})})
    recipe = build.recipe_of(batch=cluster.world_size * times)
    table = enumerate_plans(SearchContext(profile, recipe, cluster, explore))
    listed = [table.strategy(plan) for plan in range(0, len(table), max(1, len(table) // 300) if explore else 1)]
    names = {strategy.model_dump_json() for strategy in listed}
    assert listed and len(names) == len(listed)
    for strategy in listed[:: max(1, len(listed) // 20)]:
        assert violations(profile, recipe, cluster, strategy, explore=explore) == ()
        assert strategy.global_batch_sequences() == recipe.batch.global_batch_sequences
        assert strategy.mesh.world_size == cluster.world_size
    for number in range(5):
        drawn = suggest(RandomTrial(seed + number), profile, recipe, cluster, explore=explore)
        assert violations(profile, recipe, cluster, drawn, explore=explore) == ()
        assert explore or drawn.checkpointing == "layers" or drawn.model_dump_json() in names


def test_the_table_is_what_a_plain_walk_of_the_axes_finds(build: SimpleNamespace) -> None:
    """Every combination of every axis' choices, but for those that only refine."""
    context = SearchContext(build.tiny(4), build.recipe_of(batch=4), build.cluster_of("h200-2"), explore=True)

    def walk(draws: dict[str, Any], position: int) -> Iterator[dict[str, Any]]:
        if position == len(AXES):
            yield draws
            return
        axis = AXES[position]
        values = axis.choices(context, draws)
        for value in values[:1] if axis.refines else values:
            if value != "layers":
                yield from walk({**draws, axis.name: value}, position + 1)

    table = enumerate_plans(context)
    listed = [{**table.heads[h], **table.tails[t]} for h, t in zip(table.head_of, table.tail_of, strict=True)]
    assert sorted(map(str, listed)) == sorted(map(str, walk({}, 0)))
    columns = plans_of([table.strategy(plan) for plan in range(len(table))], context.profile)
    for field in fields(columns):
        assert np.array_equal(getattr(columns, field.name), getattr(table.plans, field.name)), field.name


def test_a_world_with_a_factor_of_seven(build: SimpleNamespace) -> None:
    """896 = 2⁷·7 experts on seven nodes of eight: expert groups of 7, 14, 28 and 56."""
    context = SearchContext(build.tiny(896, top=8), build.recipe_of(batch=56), build.cluster_of("h200-128", nodes=7))
    degrees = {int(ep) for ep in enumerate_plans(context).plans.ep}
    assert degrees == {1, 2, 4, 7, 8, 14, 28, 56}


def test_the_executable_space_is_part_of_the_explored_one(build: SimpleNamespace) -> None:
    arguments = (
        build.qwen3_30b(),
        build.recipe_of(batch=16, tokens=1024),
        build.cluster_of("h200-8", devices_per_node=2),
    )
    listed, explored = legal_strategies(*arguments), legal_strategies(*arguments, explore=True)
    context = SearchContext(*arguments, explore=True)
    assert all(violations_in(context, one) == () for one in listed)
    plain = {str(one) for one in listed if one.overlap_chunks == 1}
    assert plain < set(map(str, explored)), "the explored scan leaves the finer axes to refinement"
    assert all(executable.runs(axis.name, axis.read(s)) for s in listed for axis in AXES)
    assert any(not executable.runs(axis.name, axis.read(s)) for s in explored for axis in AXES)


def test_the_count_on_two_cpu_ranks_is_exact(build: SimpleNamespace) -> None:
    """ep {1, 2} × micro-batch {1, 2, 4} × checkpointing 2 × reshard 2; two replicas have nothing to reshard."""
    found = legal_strategies(build.smol(), build.recipe_of(batch=8, base="float32"), build.cluster_of("cpu-2"))
    replicas = [s for s in found if s.mesh.replicate == 2]
    assert len(found) - len(replicas) == 2 * 3 * 2 * 2
    assert len(replicas) == (3 * 2 if executable.runs("replicate", 2) else 0)


def test_one_rank_has_nothing_to_shard(build: SimpleNamespace) -> None:
    found = legal_strategies(build.smol(), build.recipe_of(batch=2, base="float32"), build.cluster_of("cpu-1"))
    assert {s.mesh.text() for s in found} == {"replicate1·shard1·ep1"}
    assert {s.reshard_after_forward for s in found} == {True}


def test_parameters_of_a_strategy_draw_it_again(build: SimpleNamespace) -> None:
    context = SearchContext(build.qwen3_30b(), build.recipe_of(batch=16), build.cluster_of("h200-8"), explore=True)
    table = enumerate_plans(context)
    for strategy in [table.strategy(plan) for plan in range(0, len(table), 997)]:
        trial = ReplayTrial(parameters_of(context, strategy))
        assert suggest_in(trial, context) == strategy
        assert trial.parameters == {}


def test_some_layers_are_drawn_by_kind_and_drawn_again(build: SimpleNamespace) -> None:
    context = SearchContext(build.qwen3_30b(), build.recipe_of(batch=16), build.cluster_of("h200-8"), explore=True)
    drawn = [suggest_in(RandomTrial(seed), context) for seed in range(12)]
    some = [strategy for strategy in drawn if strategy.checkpointing == "layers"]
    assert some and len({len(strategy.checkpointed_layers) for strategy in some}) > 1
    for strategy in some:
        trial = ReplayTrial(parameters_of(context, strategy))
        assert suggest_in(trial, context) == strategy and trial.parameters == {}


def test_suggest_refuses_where_nothing_is_legal(build: SimpleNamespace) -> None:
    with pytest.raises(LegalityError) as error:
        suggest(RandomTrial(0), build.tiny(8), build.recipe_of(batch=3), build.cluster_of("h200-8"))
    assert error.value.code == "legality/global-batch"


def test_every_axis_says_what_runs() -> None:
    assert set(executable.EXECUTABLE) == {axis.name for axis in AXES}


def test_every_executable_value_names_a_test_that_exists() -> None:
    proofs = {proof for axis in executable.EXECUTABLE.values() for proof in axis.proof.values()}
    proofs |= set(executable.BASE_PACKINGS.values()) | {executable.PRESERVED_ROUTING or executable.PARITY}
    for proof in sorted(proofs):
        file, _, name = proof.partition("::")
        tree = ast.parse((TESTS.parent / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not name or name.split("[")[0] in names, proof


def test_degrees_below_one_never_run() -> None:
    assert executable.runs("ep", 64) and not executable.runs("ep", 0)
    assert not executable.runs("replicate", 0)
    assert not executable.runs("overlap_chunks", 0)
