"""LoRA targets: roles, patterns, ranks; cases E1 to E5 of the public bug reports."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.checkpoints.layouts import expert_layout
from shardwright.checkpoints.targets import parameter_shapes, resolve_targets, role_of, scaling
from shardwright.schemas.errors import LegalityError, RecipeError
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.recipe import LoraSpec

Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def shapes(t_lora: tuple[Path, Any]) -> Shapes:
    found = parameter_shapes(t_lora[0])
    assert sum(map(math.prod, found.values())) == 22_976
    return found


def resolve(shapes: Shapes, *targets: str, model_type: str = "qwen3_moe", **more: Any) -> tuple[LoraTarget, ...]:
    return resolve_targets(shapes, LoraSpec(targets=targets, **{"rank": 2, **more}), model_type=model_type)


def trainable(targets: tuple[LoraTarget, ...]) -> int:
    return sum(target.adapter_parameters for target in targets)


def test_e1_the_router_is_left_out_unless_asked_for(shapes: Shapes) -> None:
    """``all-linear`` elsewhere trains ``mlp.gate`` unseen (144 of 3,856 parameters)."""
    for targets in (("all-linear",), ("*",)):
        assert not [t for t in resolve(shapes, *targets) if t.role == "router"]
    allowed = resolve(shapes, "all-linear", "router", allow_router=True)
    routers = [target for target in allowed if target.role == "router"]
    assert [t.parameter for t in routers] == [f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)]
    assert trainable(allowed) - trainable(resolve(shapes, "all-linear")) == 2 * 2 * (32 + 4)
    for target in ("router", "*.mlp.gate"):
        with pytest.raises(LegalityError) as caught:
            resolve(shapes, target)
        assert caught.value.code == "legality/router-target"


def test_e2_a_target_that_matches_nothing_is_named(shapes: Shapes) -> None:
    with pytest.raises(LegalityError, match=r"mlp\.experts\.up_proj") as caught:
        resolve(shapes, "attention", "mlp.experts.up_proj")
    assert caught.value.code == "legality/target-matches-nothing"
    assert "gate_up_proj" in caught.value.what
    with pytest.raises(LegalityError) as caught:
        resolve(shapes, "attention", rank_pattern={"*.down": 4})
    assert caught.value.code == "legality/rank-pattern-matches-nothing"
    with pytest.raises(LegalityError, match=r"the nearest names are gate_up_proj, "):
        resolve(shapes, "attention", "up_projj")


def test_e3_true_ranks_and_counts(shapes: Shapes) -> None:
    targets = resolve(shapes, "attention", "experts")
    assert trainable(targets) == 2_688
    (gate_up,) = [t for t in targets if t.parameter == "model.layers.0.mlp.experts.gate_up_proj"]
    assert (gate_up.rank, gate_up.num_experts, gate_up.in_features, gate_up.out_features) == (2, 4, 32, 32)
    (down,) = [t for t in targets if t.parameter == "model.layers.0.mlp.experts.down_proj"]
    assert (down.in_features, down.out_features) == (16, 32)
    assert [t.parameter for t in targets] == [name for name in shapes if name in {t.parameter for t in targets}]


def test_e4_dropout_on_experts_is_refused(shapes: Shapes) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve(shapes, "experts", dropout=0.05)
    assert caught.value.code == "recipe/expert-dropout"
    assert resolve(shapes, "attention", dropout=0.05)


def test_what_peft_does_not_load_is_no_target() -> None:
    """A Mamba layer's output projection; any other family's may be called so."""
    layer = {"model.layers.0.mixer.in_proj.weight": (8, 4), "model.layers.0.mixer.out_proj.weight": (4, 8)}
    shapes = {**layer, "model.layers.1.mixer.o_proj.weight": (4, 4)}
    found = {target.parameter for target in resolve(shapes, "all-linear", model_type="nemotron_h")}
    assert found == set(shapes) - {"model.layers.0.mixer.out_proj.weight"}
    with pytest.raises(LegalityError, match=r"'out_proj' names model.layers.0.mixer.out_proj.weight: fused kernels"):
        resolve(shapes, "out_proj", model_type="nemotron_h")
    assert {target.parameter for target in resolve(shapes, "all-linear", model_type="jamba")} == set(shapes)


def test_dropout_on_a_router_is_refused(shapes: Shapes) -> None:
    with pytest.raises(RecipeError, match=r"router-dropout.*mlp\.gate\.weight"):
        resolve(shapes, "attention", "router", allow_router=True, dropout="0.1")
    assert resolve(shapes, "attention", dropout="0.1")


def test_one_pair_for_all_experts_of_a_stack(shapes: Shapes) -> None:
    """A pair of the same rank and sizes, counted once; dense targets are what they were."""
    each, shared = resolve(shapes, "attention", "experts"), resolve(shapes, "attention", "experts", experts="shared")
    dense = trainable(tuple(t for t in each if t.kind == "dense"))
    assert trainable(shared) - dense == (trainable(each) - dense) // 4
    assert [t.model_copy(update={"shared": False}) for t in shared] == list(each)
    assert {t.pairs for t in shared} == {1} and {t.pairs for t in each if t.kind == "experts"} == {4}
    with pytest.raises(LegalityError) as caught:
        resolve(shapes, "attention", experts="shared")
    assert caught.value.code == "legality/shared-matches-nothing" and "4" not in caught.value.next_action


def test_e5_ungated_experts() -> None:
    shapes = {
        "model.layers.0.mixer.experts.up_proj": (8, 48, 32),
        "model.layers.0.mixer.experts.down_proj": (8, 32, 48),
        "model.layers.0.mixer.gate.weight": (8, 32),
        "model.layers.0.mixer.gate.e_score_correction_bias": (8,),
        "model.layers.1.mixer.q_proj.weight": (32, 32),
        "model.layers.2.mixer.in_proj.weight": (64, 32),
        "model.layers.2.mixer.conv1d.weight": (48, 1, 4),
        "model.embeddings.weight": (64, 32),
    }
    targets = resolve(shapes, "attention", "experts", model_type="nemotron_h")
    by_role = {role: trainable(tuple(t for t in targets if t.role == role)) for role in ("experts", "attention")}
    assert by_role == {"experts": 8 * 2 * (32 + 48) * 2, "attention": 2 * 64 + 2 * 96}
    assert not expert_layout("nemotron_h").gated
    assert len(resolve(shapes, "*", model_type="nemotron_h")) == 4


def test_a9_orientation_comes_from_the_architecture() -> None:
    """With 2·I = H a stack is square; nothing but the family can tell in from out."""
    stem = "model.layers.0.mlp.experts"
    square = {f"{stem}.gate_up_proj": (2, 32, 32), f"{stem}.down_proj": (2, 32, 16)}
    assert [t.layout for t in resolve(square, "experts")] == ["out_in", "out_in"]
    turned = {**square, f"{stem}.down_proj": (2, 16, 32)}
    down = resolve(turned, "experts", model_type="gpt_oss")[1]
    assert (down.layout, down.in_features, down.out_features) == ("in_out", 16, 32)
    with pytest.raises(LegalityError) as caught:
        resolve(square, "experts", model_type="never_heard_of")
    assert caught.value.code == "legality/unknown-expert-layout"


def test_rank_patterns_and_each_weight_once(shapes: Shapes) -> None:
    targets = resolve(shapes, "attention", "q_proj", "*.self_attn.*", rank_pattern={"q_proj": 8, "*.layers.1.*": 4})
    assert len(targets) == len({t.parameter for t in targets}) == 8
    ranks = {t.parameter.removeprefix("model.layers.").removesuffix("_proj.weight"): t.rank for t in targets}
    assert ranks["0.self_attn.q"] == ranks["1.self_attn.q"] == 8
    assert (ranks["0.self_attn.k"], ranks["1.self_attn.k"]) == (2, 4)


def test_norms_embeddings_and_tied_heads_are_no_targets(shapes: Shapes) -> None:
    for target in ("*norm*", "embed_tokens", "model.norm"):
        with pytest.raises(LegalityError):
            resolve(shapes, target)
    assert resolve(shapes, "head")[0].role == "head"
    tied = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    with pytest.raises(LegalityError):
        resolve(tied, "head")


@pytest.mark.parametrize(
    ("parameter", "rank", "role"),
    [
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 2, "attention"),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", 2, "attention"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", 2, "shared_experts"),
        ("model.layers.0.mlp.shared_expert_gate.weight", 2, "router"),
        ("model.layers.0.mlp.router.weight", 2, "router"),
        ("model.layers.0.mlp.gate_proj.weight", 2, "dense_mlp"),
        ("model.layers.0.block_sparse_moe.experts.gate_up_proj", 3, "experts"),
        ("model.layers.0.self_attn.indexer.wq_b.weight", 2, "other"),
        ("model.visual.blocks.0.attn.qkv.weight", 2, "vision"),
        ("lm_head.weight", 2, "head"),
    ],
)
def test_roles(parameter: str, rank: int, role: str) -> None:
    assert role_of(parameter, rank) == ("other" if role == "vision" else role)


@given(alpha=st.integers(1, 512), rank=st.integers(1, 512), stabilised=st.booleans())
def test_scaling_text_is_the_exact_double(alpha: int, rank: int, stabilised: bool) -> None:
    expected = alpha / math.sqrt(rank) if stabilised else alpha / rank
    assert float(scaling(str(alpha), rank, stabilised)) == expected


def test_a_matrix_of_groups_is_no_target() -> None:
    """DeepSeek-V4's ``o_a_proj`` multiplies groups of its input: the role goes without it, its name is refused."""
    layer = "model.layers.0.self_attn"
    shapes = {f"{layer}.o_a_proj.weight": (8, 4), f"{layer}.o_b_proj.weight": (4, 8)}
    found = {target.parameter for target in resolve(shapes, "attention", model_type="deepseek_v4")}
    assert found == {f"{layer}.o_b_proj.weight"}
    with pytest.raises(
        LegalityError, match=r"target-left-out.*'o_a_proj' names .*o_a_proj.weight: it multiplies groups"
    ):
        resolve(shapes, "o_a_proj", model_type="deepseek_v4")
    assert len(resolve(shapes, "attention", model_type="deepseek_v3")) == 2
