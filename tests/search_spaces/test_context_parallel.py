"""Which plans may cut sequences over ranks, and which of them a search takes into account."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.schemas.errors import LegalityError
from shardwright.schemas.recipe import BalanceSpec
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces import executable
from shardwright.search_spaces.axes.cp import LONG_TOKENS
from shardwright.search_spaces.legality import violations
from shardwright.search_spaces.space import legal_strategies, suggest

TESTS = Path(__file__).resolve().parents[1]


def judged(build: SimpleNamespace, strategy: ParallelStrategy, profile: Any = None, **recipe: Any) -> dict[str, str]:
    more = recipe.pop("update", {})
    made = build.recipe_of(**{"batch": 4, "tokens": 64, **recipe}).model_copy(update=more)
    found = violations(profile or build.qwen3_30b(), made, build.cluster_of("h200-8"), strategy)
    return {one.rule: one.message for one in found}


def plan(**axes: Any) -> ParallelStrategy:
    mesh = {name: axes.pop(name) for name in ("shard", "ep", "cp") if name in axes}
    return ParallelStrategy(mesh=Mesh(**{"ep": 4, "cp": 2, **mesh}), **axes)


def test_a_named_degree_is_legal_at_any_length(build: SimpleNamespace) -> None:
    assert judged(build, plan()) == {}
    assert judged(build, plan(ep=1, cp=8), batch=1) == {}


def test_what_is_not_proved_is_refused_by_the_kind_of_layer(build: SimpleNamespace) -> None:
    kinds = tuple(kind.model_copy(update={"attention": "dsa"}) for kind in build.qwen3_30b().layer_kinds)
    for family, legal in (("another_moe", False), ("glm5_next", False), ("deepseek_v32", True), ("glm_moe_dsa", True)):
        sparse = build.qwen3_30b().model_copy(update={"layer_kinds": kinds, "model_type": family})
        found = judged(build, plan(), sparse)
        assert ("context-layer" in found) != legal and (legal or family in found["context-layer"])
        assert "context-layer" not in judged(build, ParallelStrategy(mesh=Mesh(ep=4, shard=2)), sparse, batch=8)


def test_a_kind_of_attention_without_a_proof_is_refused(
    build: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(executable.CONTEXT_ATTENTION, "full")
    assert "full attention" in judged(build, plan())["context-layer"]


def test_recipes_that_need_whole_sequences_are_refused(build: SimpleNamespace) -> None:
    assert "context-balance" in judged(build, plan(), update={"balance": BalanceSpec(sequence="0.01")})
    recipe = build.recipe_of(batch=4, tokens=64)
    data = recipe.data.model_copy(update={"images_field": "images"})
    assert "context-images" in judged(build, plan(), update={"data": data})


def test_groups_inside_nodes_are_not_formed(build: SimpleNamespace) -> None:
    cluster, recipe = build.cluster_of("h200-128"), build.recipe_of(batch=64, tokens=64)
    for axes in ({"reshard_scope": "node"}, {"dispatch": "hierarchical"}):
        strategy = plan(ep=64, cp=2, **axes)
        rules = {one.rule for one in violations(build.qwen3_30b(), recipe, cluster, strategy)}
        assert rules & {"node-reshard", "hierarchical-needs-nodes"}, axes


@pytest.mark.parametrize(("tokens", "degrees"), [(LONG_TOKENS, {1, 2, 4, 8}), (LONG_TOKENS // 2, {1})])
def test_a_search_cuts_long_sequences_only(build: SimpleNamespace, tokens: int, degrees: set[int]) -> None:
    found = legal_strategies(build.qwen3_30b(), build.recipe_of(batch=8, tokens=tokens), build.cluster_of("h200-8"))
    assert {one.mesh.cp for one in found} == degrees
    cut = [one for one in found if one.mesh.cp > 1]
    recipe = build.recipe_of(batch=8, tokens=tokens)
    assert all(not violations(build.qwen3_30b(), recipe, build.cluster_of("h200-8"), one) for one in cut[::7])


def test_one_long_sequence_is_legal_on_many_ranks(build: SimpleNamespace) -> None:
    """Every plan that is left cuts it over all of them; a short one is refused as before."""
    cluster = build.cluster_of("h200-8")
    found = legal_strategies(build.qwen3_30b(), build.recipe_of(batch=1, tokens=LONG_TOKENS), cluster)
    assert {one.mesh.cp for one in found} == {8}

    class First:
        def suggest_int(self, name: str, low: int, high: int) -> int:
            return low

        def suggest_categorical(self, name: str, choices: Any) -> Any:
            return choices[0]

    recipe = build.recipe_of(batch=1, tokens=LONG_TOKENS)
    assert suggest(First(), build.qwen3_30b(), recipe, cluster).mesh.cp == 8
    with pytest.raises(LegalityError) as error:
        suggest(First(), build.qwen3_30b(), build.recipe_of(batch=1, tokens=512), cluster)
    assert error.value.code == "legality/global-batch"


def test_what_may_be_cut_names_a_test_that_exists() -> None:
    for proof in {*executable.CONTEXT_ATTENTION.values(), *executable.CONTEXT_FAMILIES.values()}:
        file, _, name = proof.partition("::")
        assert f"def {name}(" in (TESTS.parent / file).read_text(), proof
    for family, proof in executable.CONTEXT_FAMILIES.items():
        assert f'"{family}"' in (TESTS.parent / proof.partition("::")[0]).read_text(), family
