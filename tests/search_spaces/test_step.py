"""The step time, start-up and price of whole plans."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.cost import estimate
from shardwright.search_spaces.cost.communication import distinct_domains
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.routing import placed_imbalance
from shardwright.search_spaces.legality import violations


def times(report: CostReport) -> dict[str, float]:
    return {component.name: component.milliseconds for component in report.time.components}


def decision(op: str, modules: tuple[str, ...], provider: str = "compile", rejected: bool = False) -> FusionDecision:
    return FusionDecision(
        proposal_id=f"{op}-1",
        pattern=op.replace("_", "-"),
        variant=provider,
        provider=provider,
        op="-",
        modules=modules,
        roles={},
        rejected=rejected,
    )


def prompt(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with hosts that take no time: nothing is hidden behind them."""
    quick = cluster.device.model_copy(update={"launch_overhead_s": 0.0, "host_launch_s": 0.0, "unit_overhead_s": 0.0})
    return cluster.model_copy(update={"device": quick})


def test_the_step_is_the_sum_of_all_but_hidden_communication(build: SimpleNamespace) -> None:
    profile = build.qwen3_30b()
    report = estimate(
        profile,
        build.recipe_of(batch=16, tokens=4096),
        prompt(build.cluster_of("h200-8")),
        ParallelStrategy(mesh=Mesh(shard=4, ep=2), accumulation_steps=2),
        build.targets_of(profile, rank=16),
    )
    shown = [c for c in report.time.components if c.kind != "hidden_communication"]
    assert report.time.step_ms == pytest.approx(sum(c.milliseconds for c in shown), rel=1e-5)
    assert {"weight_gathers_hidden", "expert_all_to_all", "experts", "optimizer"} <= times(report).keys()
    assert report.time.bound_by == max(shown, key=lambda c: c.milliseconds).name


def test_lora_needs_four_flops_per_active_weight(build: SimpleNamespace) -> None:
    """Dense linears at 693 TFLOP/s: forward and input gradient, no weight gradient."""
    profile, recipe = build.mixtral_8x7b(), build.recipe_of(batch=1, tokens=8192)
    found = times(estimate(profile, recipe, build.cluster_of("h200-1"), ParallelStrategy(mesh=Mesh()), ()))
    dense = profile.layer_kinds[0].parameters - profile.layer_kinds[0].expert_parameters
    assert found["dense_linears"] == pytest.approx(1e3 * 32 * 4 * 8192 * dense / 693e12, rel=1e-4)


def test_checkpointing_repeats_the_forward_and_two_exchanges(build: SimpleNamespace) -> None:
    """On a host that takes no time: nothing of an exchange is behind it."""
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=8, tokens=4096), build.cluster_of("h200-8")
    cluster = prompt(cluster)
    plain, full = (
        times(estimate(profile, recipe, cluster, ParallelStrategy(mesh=Mesh(ep=8), checkpointing=how), ()))
        for how in ("none", "full")
    )
    assert full["expert_all_to_all"] == pytest.approx(1.5 * plain["expert_all_to_all"], rel=1e-5)
    assert "recompute" in full and "recompute" not in plain


def test_gathers_happen_in_every_micro_batch(build: SimpleNamespace) -> None:
    """gloo hides nothing and gathers at a quarter of the link: two micro-batches gather twice as much, without
    reshard the layers half of it."""
    profile, cluster = build.smol(), build.cluster_of("cpu-2")

    def gathers(**change: object) -> float:
        strategy = ParallelStrategy(mesh=Mesh(shard=2)).model_copy(update=change)
        recipe = build.recipe_of(batch=2 * strategy.accumulation_steps, tokens=128, base="float32")
        return times(estimate(profile, recipe, cluster, strategy, ()))["weight_gathers"]

    assert gathers(accumulation_steps=2) == pytest.approx(2 * gathers(), rel=1e-5)
    root = 4 * (49152 * 576 + 576) / 2 / (0.25 * 1e9) * 1e3 + 0.4
    assert gathers() - root == pytest.approx(2 * (gathers(reshard_after_forward=False) - root), rel=1e-4)


def test_fusions_are_priced(build: SimpleNamespace) -> None:
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=1, tokens=4096), build.cluster_of("h200-1")
    norms = tuple(f"model.layers.{i}.{n}" for i in range(48) for n in ("input_layernorm", "post_attention_layernorm"))

    def report(*fusions: FusionDecision) -> CostReport:
        return estimate(profile, recipe, cluster, ParallelStrategy(mesh=Mesh()), (), fusions)

    eager, fused = report(), report(decision("rms_norm", norms))
    assert times(fused)["norms"] < 0.3 * times(eager)["norms"]
    saved = eager.memory.by_moment["loss"] - fused.memory.by_moment["loss"]
    assert saved == 48 * 4096 * 2 * (4 - 2) * 2048, "the operator keeps its bf16 input, eager an fp32 copy of it"
    assert report(decision("rms_norm", norms, rejected=True)) == eager
    assert report(decision("rms_norm", norms, provider="eager")) == eager
    half = report(decision("rms_norm", norms[::2]))
    assert times(half)["norms"] == pytest.approx((times(eager)["norms"] + times(fused)["norms"]) / 2, rel=1e-4)
    loss = report(decision("linear_cross_entropy", ("lm_head",)))
    assert loss.memory.by_moment["loss"] < eager.memory.by_moment["loss"]
    added = report(decision("add_rms_norm", norms[1::2]))
    assert times(added)["residual_and_rotary"] < times(eager)["residual_and_rotary"]


def test_our_kernels_price_themselves(build: SimpleNamespace) -> None:
    fused = FusedProviders.of((decision("rms_norm", ("model.norm",), provider="shardwright"),))
    cost = fused.cost("rms_norm", {"T": 64, "H": 128}, "bfloat16")
    assert cost.provider == "shardwright" and cost.forward.launches == 1


def test_head_norms_are_not_layer_norms() -> None:
    fused = FusedProviders.of((decision("rms_norm", ("model.layers.0.self_attn.q_norm",)),))
    assert fused.norms(1) == {"add_rms_norm": 0, "rms_norm": 0, "eager": 2}


def test_norms_of_what_is_compressed_are_not_layer_norms() -> None:
    """A plan for GLM-5 fuses the norms of compressed queries alone: both norms of its layers stay eager."""
    modules = tuple(f"model.layers.{i}.self_attn.q_a_layernorm" for i in range(3))
    fused = FusedProviders.of((decision("rms_norm", (*modules, "model.layers.0.self_attn.kv_a_layernorm")),))
    assert fused.norms(3) == {"add_rms_norm": 0, "rms_norm": 0, "eager": 2}


def test_a_recomputation_ends_before_a_product_whose_result_no_backward_reads(build: SimpleNamespace) -> None:
    """Where one operator is the whole layer: a third of the experts' products and the sums to tokens; not where rows
    have travelled, whose weighting needs them."""
    profile, recipe = build.qwen3_30b(), build.recipe_of(batch=1, tokens=4096)
    cluster, experts = prompt(build.cluster_of("h200-1")), ("model.layers.0.mlp.experts",)

    def found(op: str) -> dict[str, float]:
        fusion = decision("moe_layer", experts, provider="shardwright").model_copy(update={"op": op})
        strategy = ParallelStrategy(mesh=Mesh(), checkpointing="full")
        return times(estimate(profile, recipe, cluster, strategy, (), [fusion]))

    whole, received = found("moe_layer"), found("grouped_lora_mlp")
    rows, tokens = 8 * 4096, 4096
    sums = 1e3 * 48 * 2 * 2048 * (rows + tokens) / cluster.device.memory_bandwidth_bytes_per_s
    assert received["recompute"] - whole["recompute"] == pytest.approx(whole["experts"] / 2 / 3 + sums, rel=1e-4)


def test_start_up_and_hours_by_hand(build: SimpleNamespace) -> None:
    """61.06 GB over one node at 5 GB/s, 7.63 GB over PCIe at 25 GB/s, 20 s of start, one step."""
    cluster = build.cluster_of("h200-8", price_per_device_hour=2.0)
    recipe = build.recipe_of(batch=8)
    report = estimate(build.qwen3_30b(), recipe, cluster, ParallelStrategy(mesh=Mesh(ep=8)), ())
    step = report.time.step_ms / 1e3
    first = 20 + 61_064_245_248 / 5e9 + 61_064_245_248 / 8 / 25e9 + step
    assert report.time_to_first_step_s == pytest.approx(first, rel=1e-5)
    assert report.gpu_hours == pytest.approx(8 * (first + 19 * step) / 3600, rel=1e-5)
    assert report.money == pytest.approx(2 * report.gpu_hours, rel=1e-5)


@pytest.mark.parametrize(("experts", "measured_ms"), [(False, 1944), (True, 2397)])
def test_a_first_time_model_stays_within_a_third_of_transformers_and_peft(
    build: SimpleNamespace, experts: bool, measured_ms: float
) -> None:
    """Qwen3-30B-A3B, 4 × 4096 tokens, full checkpointing on one H200. Predicted is this runtime's eager
    path without calibration, measured is transformers 5.24 with PEFT 0.21: 0.78 and 0.70 of it."""
    profile = build.qwen3_30b()
    report = estimate(
        profile,
        build.recipe_of(batch=4, tokens=4096),
        build.cluster_of("h200-1"),
        ParallelStrategy(mesh=Mesh(), micro_batch_sequences=4, checkpointing="full"),
        build.targets_of(profile, rank=16, experts=experts),
    )
    assert 0.67 * measured_ms < report.time.step_ms < 1.05 * measured_ms


def test_tensor_context_and_pipeline_ranks_are_priced(build: SimpleNamespace) -> None:
    """Each takes tokens or layers from a rank and pays with collectives or with waiting."""
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=8, tokens=4096), build.cluster_of("h200-8")

    def report(accumulation: int, **mesh: int) -> CostReport:
        return estimate(
            profile, recipe, cluster, ParallelStrategy(mesh=Mesh(**mesh), accumulation_steps=accumulation), ()
        )

    plain = report(1, shard=8)
    tensor, context, pipeline = report(2, shard=4, tp=2), report(2, shard=4, cp=2), report(2, shard=4, pp=2)
    for other in (tensor, context, pipeline):
        assert other.memory.by_moment["loss"] < plain.memory.by_moment["loss"] * 1.01
    assert times(tensor)["tensor_parallel"] > 0 and "tensor_parallel" not in times(plain)
    assert times(context)["context_gathers"] > 0 and "context_gathers" not in times(plain)
    busy = pipeline.time.step_ms - times(pipeline)["pipeline_bubble"] - times(pipeline)["pipeline_sends"]
    assert times(pipeline)["pipeline_bubble"] == pytest.approx(busy / 2, rel=0.05)


def test_chunks_hide_an_exchange_and_read_weights_again(build: SimpleNamespace) -> None:
    profile, recipe = build.qwen3_30b(), build.recipe_of(batch=8, tokens=4096)
    cluster = prompt(build.cluster_of("h200-8"))
    whole = estimate(profile, recipe, cluster, ParallelStrategy(mesh=Mesh(ep=8)), ())
    cut = estimate(profile, recipe, cluster, ParallelStrategy(mesh=Mesh(ep=8), overlap="chunked", overlap_chunks=4), ())
    assert times(cut)["expert_all_to_all"] < times(whole)["expert_all_to_all"]
    assert times(cut)["expert_all_to_all_hidden"] > 0
    assert times(cut)["experts"] > times(whole)["experts"]


def test_hierarchical_dispatch_sends_a_row_to_a_node_once(build: SimpleNamespace) -> None:
    """E 128, K 8, EP 64 on eight nodes: 5.4 nodes a token against 8 experts."""
    assert distinct_domains(8, 256, 8) == pytest.approx(5.29, abs=0.01)
    assert distinct_domains(4, 256, 8) == pytest.approx(3.61, abs=0.01)
    assert distinct_domains(16, 896, 16) == pytest.approx(10.4, abs=0.05)
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=128, tokens=4096), build.cluster_of("h200-128")
    plain, once = (
        times(estimate(profile, recipe, cluster, ParallelStrategy(mesh=Mesh(shard=2, ep=64), dispatch=how), ()))
        for how in ("all_to_all", "hierarchical")
    )
    assert 0.3 < once["expert_all_to_all"] / plain["expert_all_to_all"] < 0.8


def test_offloading_trades_device_memory_for_copies(build: SimpleNamespace) -> None:
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=1, tokens=4096), build.cluster_of("h200-1")
    targets = build.targets_of(profile, rank=16)

    def report(offload: str) -> CostReport:
        return estimate(profile, recipe, cluster, ParallelStrategy(mesh=Mesh(), offload=offload), targets)

    plain = report("none")
    for offload, name in (("activations", "activations"), ("frozen_experts", "frozen_base")):
        away = report(offload)
        assert size(away, name) < 0.5 * size(plain, name)
        assert away.time.step_ms > plain.time.step_ms
    assert "optimizer_state" not in {c.name for c in report("adapter_optimizer").memory.components}


def size(report: CostReport, name: str) -> int:
    return next(c.bytes for c in report.memory.components if c.name == name)


def test_packed_experts_are_kept_gathered_and_unpacked(build: SimpleNamespace) -> None:
    """MXFP4 holds 4.25 bits a value of the experts; one layer is unpacked at a time, from 256 rows an expert on."""
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=8, tokens=4096), build.cluster_of("h200-8")
    plain, packed = (
        estimate(profile, recipe, cluster, ParallelStrategy(mesh=Mesh(shard=8), base_format=how), ())
        for how in ("compute", "mxfp4")
    )
    experts = 48 * profile.layer_kinds[0].expert_parameters
    assert size(plain, "frozen_base") - size(packed, "frozen_base") == (2 - 4.25 / 8) * experts / 8
    assert size(packed, "unpacked_layer") == 2 * profile.layer_kinds[0].expert_parameters
    strategy = ParallelStrategy(mesh=Mesh(shard=8), base_format="mxfp4")
    few = estimate(profile, build.recipe_of(batch=8, tokens=2048), cluster, strategy, ())
    assert "unpacked_layer" not in {c.name for c in few.memory.components}

    def gathers(report: CostReport) -> float:
        return times(report)["weight_gathers_hidden"] + times(report)["weight_gathers"]

    assert gathers(packed) < gathers(plain)


def test_gathers_inside_a_node_cost_memory_and_save_the_network(build: SimpleNamespace) -> None:
    profile, recipe, cluster = build.mixtral_8x7b(), build.recipe_of(batch=128), build.cluster_of("h200-128")
    wide, near = (
        estimate(profile, recipe, cluster, ParallelStrategy(mesh=Mesh(shard=128), reshard_scope=scope), ())
        for scope in ("all", "node")
    )
    assert near.time.step_ms < wide.time.step_ms
    assert size(near, "node_shards") == pytest.approx(2 * 32 * profile.layer_kinds[0].parameters / 8, rel=1e-6)


def test_measured_loads_replace_the_prior_and_placement_evens_them_out(build: SimpleNamespace) -> None:
    """One expert of 128 with half the rows: contiguous on 8 ranks 0.5 + 15/127·0.5 of all, times 8."""
    shares = (0.5, *([0.5 / 127] * 127))
    assert placed_imbalance((shares,), 8, False, 0) == pytest.approx(8 * (0.5 + 15 * 0.5 / 127))
    assert placed_imbalance((shares,), 8, True, 0) == pytest.approx(8 * (0.5 + 15 * 0.5 / 127))
    assert placed_imbalance((shares,), 8, True, 1) < 1.05
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=8), build.cluster_of("h200-8")
    plan = ParallelStrategy(mesh=Mesh(ep=8))
    prior, hot = (estimate(profile, recipe, cluster, plan, (), loads=loads) for loads in ((), (shares,)))
    assert times(hot)["experts"] > 2 * times(prior)["experts"]


def test_a_shared_expert_under_the_dispatch_hides_no_more_than_one_exchange(build: SimpleNamespace) -> None:
    """Four exchanges a layer and micro-batch; two of them, forward and backward, may lie behind the shared expert."""
    sizes = dict(hidden=2048, layers=4, experts=64, top=8, width=1024, vocabulary=1000, heads=16, kv_heads=4)
    profile = build.moe("deepseek_v3", **sizes, head_dim=128)
    shape = profile.shape.model_copy(update={"num_shared_experts": 1})
    profile, cluster = profile.model_copy(update={"shape": shape}), prompt(build.cluster_of("h200-8"))
    recipe, found = build.recipe_of(batch=8, tokens=4096), {}
    for how in ("none", "shared"):
        strategy = ParallelStrategy(mesh=Mesh(ep=8), overlap=how)
        assert violations(profile, recipe, cluster, strategy) == ()
        found[how] = estimate(profile, recipe, cluster, strategy, build.targets_of(profile, rank=8))
    plain, under = times(found["none"]), times(found["shared"])
    hidden = under["expert_all_to_all_hidden"]
    assert plain.get("expert_all_to_all_hidden", 0.0) == 0 < hidden <= plain["expert_all_to_all"] / 2
    # What is hidden delays the products beside it by 0.52 of its own time.
    assert under["expert_all_to_all"] == pytest.approx(plain["expert_all_to_all"] - (1 - 0.52) * hidden, rel=1e-4)
    assert found["shared"].time.step_ms < found["none"].time.step_ms
    both = {}
    for how, chunks in (("chunked", 4), ("shared", 4)):
        strategy = ParallelStrategy(mesh=Mesh(ep=8), overlap=how, overlap_chunks=chunks)
        assert violations(profile, recipe, cluster, strategy) == ()
        both[how] = times(estimate(profile, recipe, cluster, strategy, build.targets_of(profile, rank=8)))
    more = both["shared"]["expert_all_to_all_hidden"]
    assert more > max(hidden, both["chunked"]["expert_all_to_all_hidden"]), "of chunks, the shared expert hides more"
    first = build.moe("qwen2_moe", **sizes, head_dim=128).model_copy(update={"shape": shape})
    refused = violations(first, recipe, cluster, ParallelStrategy(mesh=Mesh(ep=8), overlap="shared"))
    assert [one.rule for one in refused] == ["overlap-needs-exchange"], "this family wants its shared expert first"


def test_nothing_flows_back_before_the_first_adapter(build: SimpleNamespace) -> None:
    """Adapters from the layer 24 of 48 on: half the layers compute forward only, and none of them again."""
    profile, recipe = build.qwen3_30b(), build.recipe_of(batch=1, tokens=8192)
    cluster = prompt(build.cluster_of("h200-1"))
    every = build.targets_of(profile, rank=16)
    late = [one for one in every if int(one.parameter.split("layers.")[1].split(".")[0]) >= 24]
    found = [
        times(estimate(profile, recipe, cluster, ParallelStrategy(mesh=Mesh(), checkpointing="full"), tuple(some)))
        for some in (every, late)
    ]
    assert found[1]["dense_linears"] == pytest.approx(0.75 * found[0]["dense_linears"], rel=1e-3)
    assert found[1]["attention"] < 0.65 * found[0]["attention"]
    assert found[1]["recompute"] < 0.51 * found[0]["recompute"]
