"""Every rule by name, with the nearest legal values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.profile import CheckpointProfile, Packing
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces import executable
from shardwright.search_spaces.axes.base import exchanges, gathers
from shardwright.search_spaces.axes.ep import uneven_shares
from shardwright.search_spaces.context import SearchContext, divisors
from shardwright.search_spaces.executable import runs
from shardwright.search_spaces.legality import Violation, refuse, violations
from shardwright.search_spaces.sharding import padding_factor, shard_dim
from shardwright.search_spaces.space import legal_strategies


def world(build: SimpleNamespace, ranks: int) -> ClusterSpec:
    return build.cluster_of("h200-8", devices_per_node=ranks)


def judge(build: SimpleNamespace, ranks: int, experts: int, mesh: Mesh, **recipe: Any) -> dict[str, Violation]:
    """Broken rules by name, for a tiny model."""
    recipe = {"batch": ranks, **recipe}
    strategy = ParallelStrategy(mesh=mesh)
    found = violations(build.tiny(experts), build.recipe_of(**recipe), world(build, ranks), strategy)
    return {violation.rule: violation for violation in found}


def test_ep_must_divide_the_experts(build: SimpleNamespace) -> None:
    """Case C1: six experts on four ranks."""
    found = judge(build, 4, 6, Mesh(ep=4))
    assert set(found) == {"ep-divides-experts"}
    assert set(found["ep-divides-experts"].nearest_legal) == {"1", "2"}


def test_uneven_experts_are_refused_with_the_shares_they_would_give(build: SimpleNamespace) -> None:
    """Case C2: thirty experts on eight ranks."""
    assert uneven_shares(30, 8) == [4, 4, 4, 4, 4, 4, 3, 3]
    found = judge(build, 8, 30, Mesh(ep=8))
    assert "[4, 4, 4, 4, 4, 4, 3, 3]" in found["ep-divides-experts"].message
    assert found["ep-divides-experts"].nearest_legal == ("2", "1")


def test_experts_that_are_no_stacks_stay_whole_on_every_rank(build: SimpleNamespace) -> None:
    """One matrix for all experts, or neurons in tables: ep is 1, and no product is grouped, so no width is refused."""
    tiny = build.tiny(8)
    sizes = {"expert_stacks": False, "expert_intermediate_size": 1}
    profile = tiny.model_copy(update={"shape": tiny.shape.model_copy(update=sizes)})
    recipe, cluster = build.recipe_of(batch=8), world(build, 8)
    (found,) = violations(profile, recipe, cluster, ParallelStrategy(mesh=Mesh(shard=4, ep=2)))
    assert (found.rule, found.nearest_legal) == ("ep-needs-stacks", ("1",))
    assert violations(profile, recipe, cluster, ParallelStrategy(mesh=Mesh(shard=8))) == ()
    assert {strategy.mesh.ep for strategy in legal_strategies(profile, recipe, cluster)} == {1}


def test_the_mesh_must_cover_the_world(build: SimpleNamespace) -> None:
    """Case C3: ep 3 cannot divide eight ranks; ep 4 leaves shard 2 and eight data ranks."""
    assert "ep 3 must divide 8" in judge(build, 8, 12, Mesh(shard=8, ep=3))["mesh-covers-world"].message
    legal = ParallelStrategy(mesh=Mesh(shard=2, ep=4))
    assert violations(build.tiny(8), build.recipe_of(batch=8), world(build, 8), legal) == ()
    assert legal.mesh.data_ranks == 8


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_axes_that_the_runtime_lacks_are_refused_by_name(build: SimpleNamespace, axis: str) -> None:
    """Cases C3 and C8: FSDP with pp; ep with tp."""
    found = judge(build, 8, 4, Mesh(ep=4, **{axis: 2}))
    assert f"{axis} = 2" in found["runtime-runs-it"].message


def test_replicas_do_not_count_when_experts_are_sharded(build: SimpleNamespace) -> None:
    """Case C5: replicate 2, shard 4, four experts: dim 0, for only shard is compared with E."""
    mesh = Mesh(replicate=2, shard=4)
    assert shard_dim(4, mesh.shard, 32, 32) == 0
    assert shard_dim(4, 8, 32, 32) == 1
    strategy = ParallelStrategy(mesh=mesh)
    recipe, cluster = build.recipe_of(batch=8), world(build, 8)
    assert violations(build.tiny(4), recipe, cluster, strategy, explore=True) == ()
    refused = [v.rule for v in violations(build.tiny(4), recipe, cluster, strategy)]
    assert refused == ([] if runs("replicate", 2) else ["runtime-runs-it"])


def test_a_stack_with_too_few_experts_is_split_elsewhere() -> None:
    """FSDP pads dim 0 and refuses uneven pieces elsewhere."""
    assert shard_dim(4, 16, 24, 32) == 2
    assert shard_dim(4, 6, 32, 32) == 0


def test_padding_of_expert_shards(build: SimpleNamespace) -> None:
    def factor(experts: int, mesh: Mesh) -> float:
        return padding_factor(build.tiny(experts).shape, mesh.ep, mesh.shard)

    assert factor(6, Mesh(shard=4)) == pytest.approx(8 / 6)
    assert factor(8, Mesh(shard=4, ep=2)) == 1
    assert factor(4, Mesh(shard=8)) == 1
    assert factor(4, Mesh(shard=6)) == pytest.approx(6 / 4)


def test_packed_blocks_are_checked_before_a_kernel_meets_them(build: SimpleNamespace) -> None:
    """Case C6: width 44 under a block of 32."""
    profile = build.tiny(4, width=44, packing="mxfp4", block=(32,))
    context = SearchContext(profile, build.recipe_of(batch=8), world(build, 8))
    found = {v.rule: v for v in violations(profile, context.recipe, context.cluster, ParallelStrategy(mesh=Mesh(ep=4)))}
    assert "44 is not a multiple of 32" in found["packed-block-alignment"].message
    assert found["packed-block-alignment"].nearest_legal == (
        "expert_intermediate_size = 64",
        "precision bfloat16",
    )
    assert "base-packing-runs" not in found, "MXFP4 is run"


def test_a_mesh_larger_than_the_world_names_its_rule(build: SimpleNamespace) -> None:
    """Case C8: ep 4 × shard 4 on eight ranks."""
    found = judge(build, 8, 8, Mesh(shard=4, ep=4))
    assert found["mesh-covers-world"].nearest_legal[0] == "shard2·ep4"


def test_checkpointing_needs_proof_that_routing_repeats(
    build: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C9: without saved router outputs full checkpointing is flagged and never enumerated."""
    strategy = ParallelStrategy(mesh=Mesh(ep=4), checkpointing="full")
    arguments = (build.tiny(4), build.recipe_of(batch=4), world(build, 4))
    assert violations(*arguments, strategy) == ()
    monkeypatch.setattr(executable, "PRESERVED_ROUTING", None)
    assert [v.rule for v in violations(*arguments, strategy)] == ["recompute-keeps-routing"]
    assert {s.checkpointing for s in legal_strategies(*arguments)} == {"none"}


@pytest.mark.parametrize(("base", "rank", "legal"), [("bfloat16", 4, ("8",)), ("bfloat16", 12, ("8", "16"))])
def test_expert_ranks_fit_the_grouped_product(
    build: SimpleNamespace, base: str, rank: int, legal: tuple[str, ...]
) -> None:
    found = judge(build, 4, 4, Mesh(ep=4), base=base, rank=rank)
    assert found["grouped-gemm-alignment"].nearest_legal == tuple(f"lora.rank = {value}" for value in legal)


def test_rank_rules_spare_fp32_fours_and_recipes_without_expert_targets(build: SimpleNamespace) -> None:
    assert judge(build, 4, 4, Mesh(ep=4), base="float32", rank=4) == {}
    assert judge(build, 4, 4, Mesh(ep=4), rank=4, targets=("attention",)) == {}
    assert judge(build, 4, 4, Mesh(ep=4), rank=4, targets=("*.shared_experts.up_proj",)) == {}
    assert "grouped-gemm-alignment" in judge(build, 4, 4, Mesh(ep=4), rank=4, targets=("*.experts.down_proj",))


def test_dropout_with_expert_adapters_is_refused(build: SimpleNamespace) -> None:
    assert "expert-dropout" in judge(build, 4, 4, Mesh(ep=4), dropout="0.05")
    assert judge(build, 4, 4, Mesh(ep=4), dropout="0.05", targets=("attention",)) == {}


def test_the_batch_must_divide_over_the_ranks(build: SimpleNamespace) -> None:
    found = judge(build, 8, 8, Mesh(ep=8), batch=12)
    assert "global_batch_sequences = 8" in found["global-batch"].nearest_legal
    error = refuse(SearchContext(build.tiny(8), build.recipe_of(batch=12), world(build, 8)))
    assert error.code == "legality/global-batch" and error.exit_code == 6
    assert error.what == "global-batch: 12 sequences do not divide over 8 data ranks"
    assert "global_batch_sequences = 16" in error.next_action
    assert legal_strategies(build.tiny(8), build.recipe_of(batch=12), world(build, 8)) == ()


def test_accumulation_must_make_the_recipes_batch(build: SimpleNamespace) -> None:
    strategy = ParallelStrategy(mesh=Mesh(ep=4), micro_batch_sequences=2)
    found = violations(build.tiny(4), build.recipe_of(batch=16), world(build, 4), strategy)
    assert found[0].rule == "global-batch"
    assert found[0].nearest_legal == ("micro_batch_sequences × accumulation_steps = 4",)


def test_896_experts_need_powers_of_two_on_128_ranks(build: SimpleNamespace) -> None:
    profile = build.tiny(896)
    found = legal_strategies(profile, build.recipe_of(batch=128), build.cluster_of("h200-128"))
    assert {s.mesh.ep for s in found} == {1, 2, 4, 8, 16, 32, 64, 128}


def test_a_factor_of_seven_in_the_world_is_used(build: SimpleNamespace) -> None:
    found = legal_strategies(
        build.tiny(896), build.recipe_of(batch=56), build.cluster_of("h200-128", devices_per_node=8, nodes=7)
    )
    assert {7, 14, 28, 56} <= {s.mesh.ep for s in found}


def test_divisors() -> None:
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(1) == (1,)


def test_packed_experts_may_be_cut_over_shard(build: SimpleNamespace) -> None:
    """In the format that the files have, at any degree; another format is named."""
    profile = _stored_as("mxfp4", build.tiny(8, hidden=64, width=128))
    recipe, cluster = build.recipe_of(batch=8, base="bfloat16"), build.cluster_of("h200-8")

    def rules(shard: int, base_format: str) -> set[str]:
        strategy = ParallelStrategy(mesh=Mesh(shard=shard, ep=8 // shard), base_format=base_format)
        return {one.rule for one in violations(profile, recipe, cluster, strategy)}

    assert all("base-format-is-stored" not in rules(shard, "mxfp4") for shard in (1, 2, 8))
    assert "base-format-is-stored" in rules(2, "fp8")


@pytest.mark.parametrize(
    ("stored", "kept", "hidden", "width", "legal"),
    [
        ("mxfp4", "mxfp4", 64, 64, True),
        ("mxfp4", "mxfp4", 64, 96, False),
        ("mxfp4", "mxfp4", 96, 64, False),
        ("fp8-block", "fp8", 128, 256, True),
        ("fp8-block", "fp8", 128, 192, False),
        ("int4-group", "int4", 32, 96, True),
    ],
)
def test_experts_stay_packed_in_whole_blocks_only(
    build: SimpleNamespace, stored: str, kept: str, hidden: int, width: int, legal: bool
) -> None:
    """Two scale groups of MXFP4 share bytes, an fp8 block is 128 wide: other widths are decoded at load."""
    profile = _stored_as(stored, build.tiny(8, hidden=hidden, width=width))
    recipe, cluster = build.recipe_of(batch=8, base="bfloat16"), build.cluster_of("h200-8")
    strategy = ParallelStrategy(mesh=Mesh(shard=8), base_format=kept)
    rules = {one.rule for one in violations(profile, recipe, cluster, strategy)}
    assert ("base-format-is-stored" not in rules) == legal


def _stored_as(stored: str, profile: CheckpointProfile) -> CheckpointProfile:
    packing = Packing(format=stored, tensors=8, stored_bytes=64, logical_parameters=64)
    return profile.model_copy(update={"packing": (packing,)})


def test_a_mesh_that_leaves_ranks_over_says_why(build: SimpleNamespace) -> None:
    """EP degrees that divide the world and the experts, nearest first; that ep itself does not divide is said."""
    found = judge(build, 8, 6, Mesh(shard=1, ep=3))["mesh-covers-world"]
    assert found.message == "replicate1·shard1·ep3 is a mesh of 3 ranks; the cluster has 8; ep 3 must divide 8"
    assert set(found.nearest_legal) == {"shard4·ep2", "shard8·ep1"}
    even = judge(build, 8, 8, Mesh(shard=1, ep=4))["mesh-covers-world"]
    assert even.message == "replicate1·shard1·ep4 is a mesh of 4 ranks; the cluster has 8"
    assert even.nearest_legal[0] == "shard2·ep4"


def test_a_cut_plan_answers_for_its_own_batch_and_for_every_other_rule(build: SimpleNamespace) -> None:
    """One sequence on eight ranks: whole ones do not divide; cut over all of them it is one data rank's."""
    settings: dict[str, Any] = {"batch": 1, "tokens": 64}
    assert "global-batch" in judge(build, 8, 8, Mesh(shard=8), **settings)
    assert judge(build, 8, 8, Mesh(cp=8), **settings) == {}
    assert "global-batch" in judge(build, 8, 8, Mesh(shard=4, cp=2), **settings)
    adapted = {**settings, "targets": ("experts",), "dropout": "0.1"}
    assert set(judge(build, 8, 8, Mesh(cp=8), **adapted)) == {"expert-dropout"}


def test_packed_widths_that_are_whole_blocks_are_taken(build: SimpleNamespace) -> None:
    """The file's own block counts, not the format's usual one; each width that does not fit is named."""

    def refused(hidden: int, width: int, block: int) -> list[str]:
        profile = build.tiny(4, hidden=hidden, width=width, packing="mxfp4", block=(block,))
        found = violations(
            profile, build.recipe_of(batch=8), world(build, 8), ParallelStrategy(mesh=Mesh(ep=4, shard=2))
        )
        return [one.nearest_legal[0] for one in found if one.rule == "packed-block-alignment"]

    assert refused(32, 64, 32) == []
    assert refused(48, 48, 16) == []
    assert refused(48, 64, 32) == ["hidden_size = 64"]
    assert refused(48, 80, 32) == ["hidden_size = 64", "expert_intermediate_size = 96"]


@pytest.mark.parametrize(
    ("draws", "gathered", "exchanged"),
    [
        ({"shard": 1, "ep": 1}, False, False),
        ({"shard": 2, "ep": 1}, True, False),
        ({"shard": 1, "ep": 2}, True, True),
        ({"shard": 1, "ep": 1, "cp": 2}, True, False),
    ],
)
def test_two_ranks_are_enough_to_gather_or_exchange(draws: dict[str, int], gathered: bool, exchanged: bool) -> None:
    assert (gathers(draws), exchanges(draws)) == (gathered, exchanged)
