"""Padding of received rows: legal where a plan says so behind a dispatch, drawn only where exploring asks for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.axes.expert_padding import AXIS, VALUES
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.executable import runs
from shardwright.search_spaces.legality import violations
from shardwright.search_spaces.space import legal_strategies, parameters_of


@pytest.mark.parametrize("padding", VALUES)
def test_tiles_are_legal_behind_a_dispatch(build: SimpleNamespace, padding: int) -> None:
    arguments = build.tiny(8), build.recipe_of(batch=8), build.cluster_of("h200-8")
    strategy = ParallelStrategy(mesh=Mesh(shard=2, ep=4), expert_padding_tokens=padding)
    assert violations(*arguments, strategy) == () and runs("expert_padding_tokens", padding)


def test_elsewhere_it_is_refused_with_what_is_nearest(build: SimpleNamespace) -> None:
    arguments = build.tiny(8), build.recipe_of(batch=8), build.cluster_of("h200-8")
    whole = ParallelStrategy(mesh=Mesh(shard=8), expert_padding_tokens=16)
    (alone,) = violations(*arguments, whole)
    assert (alone.rule, alone.nearest_legal) == ("expert-padding", ("1",)) and "dispatch" in alone.message
    (odd,) = violations(*arguments, ParallelStrategy(mesh=Mesh(ep=8), expert_padding_tokens=24))
    assert odd.rule == "expert-padding" and set(odd.nearest_legal[:2]) == {"16", "32"}


def test_a_search_leaves_it_alone_unless_it_explores(build: SimpleNamespace) -> None:
    """No cost falls with it; a plan that has it still has parameters to start a study from."""
    arguments = build.qwen3_30b(), build.recipe_of(batch=16), build.cluster_of("h200-8")
    assert {one.expert_padding_tokens for one in legal_strategies(*arguments)} == {1}
    draws = {"shard": 2, "ep": 4}
    context, explored = (SearchContext(*arguments, explore=explore) for explore in (False, True))
    assert AXIS.choices(context, draws) == (1,) and AXIS.choices(explored, draws) == VALUES
    assert AXIS.choices(explored, {"shard": 8, "ep": 1}) == (1,)
    padded = ParallelStrategy(mesh=Mesh(shard=2, ep=4), accumulation_steps=2, expert_padding_tokens=16)
    assert "expert_padding_tokens_index" not in parameters_of(context, padded)
    assert parameters_of(explored, padded)["expert_padding_tokens_index"] == VALUES.index(16)
