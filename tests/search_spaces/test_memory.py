"""Memory terms against arithmetic, published cases and measured peaks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardwright.schemas.cost import MemoryReport
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.cost import estimate, price, workload
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.holes import hole_bytes
from shardwright.search_spaces.cost.memory_weights import gathered_layer_bytes
from shardwright.search_spaces.cost.plans import plans_of
from shardwright.search_spaces.cost.routing import Loads

GIB = 2**30


def sizes(memory: MemoryReport) -> dict[str, int]:
    return {component.name: component.bytes for component in memory.components}


def test_frozen_weights_have_no_gradients_and_no_optimizer_state(build: SimpleNamespace) -> None:
    """Cases B1 and B2: 22,976 frozen bf16 weights, 2,688 adapter parameters, 12 B of Adam each."""
    profile, targets = build.tiny(), build.targets_of(build.tiny(), rank=2)
    assert profile.parameters.total == 22_976
    assert sum(target.adapter_parameters for target in targets) == 2_688
    report = estimate(
        profile, build.recipe_of(batch=1, tokens=64), build.cluster_of("h200-1"), ParallelStrategy(mesh=Mesh()), targets
    )
    found = sizes(report.memory)
    assert found["frozen_base"] == 45_952
    assert found["adapter_parameters"] + found["optimizer_state"] == 32_256
    assert found["adapter_gradients"] == 2_688 * 4


@pytest.mark.parametrize("ep", [1, 8])
def test_expert_parallelism_saves_no_static_memory(build: SimpleNamespace, ep: int) -> None:
    """Case B3: 61.06 GB over eight ranks either way; only the gathered experts differ."""
    profile = build.qwen3_30b()
    strategy = ParallelStrategy(mesh=Mesh(shard=8 // ep, ep=ep))
    report = estimate(profile, build.recipe_of(batch=8), build.cluster_of("h200-8"), strategy, ())
    assert sizes(report.memory)["frozen_base"] == 61_064_245_248 // 8
    work = workload(profile, build.recipe_of(), ())
    (dense,), (experts,) = gathered_layer_bytes(work, work.layers[0], plans_of([strategy], profile))
    assert experts == (603_979_776 * 2 if ep == 1 else 0)
    assert dense == 2 * (profile.layer_kinds[0].parameters - 603_979_776)


def test_one_rank_gathers_nothing(build: SimpleNamespace) -> None:
    report = estimate(
        build.tiny(), build.recipe_of(batch=1), build.cluster_of("cpu-1"), ParallelStrategy(mesh=Mesh()), ()
    )
    assert not {"gather_buffers", "kept_layers", "gathered_root", "gather_staging"} & sizes(report.memory).keys()


@pytest.mark.parametrize(
    ("layout", "total"), [("fused", 314_572_800), ("doubled", 490_733_568), ("separate", 415_236_096)]
)
def test_adapters_are_counted_by_layout(build: SimpleNamespace, layout: str, total: int) -> None:
    """Case B8: the same rank 8 on Qwen3-30B-A3B's experts in three layouts."""
    profile = build.qwen3_30b()
    targets = build.targets_of(profile, rank=8, attention=False)
    if layout == "doubled":
        targets = tuple(t.model_copy(update={"rank": 16}) if "gate_up" in t.parameter else t for t in targets)
    if layout == "separate":
        targets = tuple(
            LoraTarget(
                parameter=f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight",
                role="experts",
                kind="dense",
                in_features=inputs,
                out_features=outputs,
                rank=8,
                alpha="16",
                scaling="2",
            )
            for layer in range(48)
            for expert in range(128)
            for name, inputs, outputs in (("w1", 2048, 768), ("w3", 2048, 768), ("w2", 768, 2048))
        )
    work = workload(profile, build.recipe_of(), targets)
    assert work.adapter_expert_parameters == total
    assert work.adapter_dense_parameters == 0
    if layout == "separate":
        rank, expected = 8, 3 * (2048 + 768) * 8
        assert work.layers[0].adapters.expert_features == pytest.approx(expected)
        assert work.layers[0].adapters.expert_ranks == pytest.approx(3 * rank)


def test_norms_are_part_of_the_total(build: SimpleNamespace) -> None:
    """Case B12: q/k norms and the final norm, 48·256 + 2,048 values, are counted."""
    profile = build.qwen3_30b()
    work = workload(profile, build.recipe_of(), ())
    assert profile.parameters.total == 30_532_122_624
    assert work.dense_total + work.expert_total == 30_532_122_624
    assert work.root_parameters == 2 * 151_936 * 2048 + 2048


def test_every_rank_of_an_expert_group_reads_its_own_data(build: SimpleNamespace) -> None:
    """Case B11: all-to-all expert parallelism over eight ranks makes eight sequences a step."""
    strategy = ParallelStrategy(mesh=Mesh(shard=2, ep=4))
    recipe = build.recipe_of(batch=8, tokens=512)
    report = estimate(build.qwen3_30b(), recipe, build.cluster_of("h200-8"), strategy, ())
    assert strategy.global_batch_sequences() == 8
    assert report.time.tokens_per_s == pytest.approx(8 * 512 / report.time.step_ms * 1e3, rel=1e-5)


@pytest.mark.parametrize(("sequences", "experts", "peak_gib"), [(1, False, 64.82), (4, False, 88.03), (4, True, 95.06)])
def test_measured_peaks_on_one_h200(build: SimpleNamespace, sequences: int, experts: bool, peak_gib: float) -> None:
    """Qwen3-30B-A3B, rank 16, 4096 tokens, full checkpointing, transformers 5.24 and PEFT 0.21 on one H200."""
    profile = build.qwen3_30b()
    report = estimate(
        profile,
        build.recipe_of(batch=sequences, tokens=4096),
        build.cluster_of("h200-1"),
        ParallelStrategy(mesh=Mesh(), micro_batch_sequences=sequences, checkpointing="full"),
        build.targets_of(profile, rank=16, experts=experts),
    )
    assert report.memory.peak_bytes / GIB == pytest.approx(peak_gib, rel=0.005)
    assert report.memory.peak_moment == "loss"


def test_gathers_of_a_traced_fsdp2_model(build: SimpleNamespace) -> None:
    """FSDP2's own memory tracker, rank 0 of 128 on a fake process group, 48 layers of 30.1B parameters:
    449 MiB sharded, 2,359 MiB unsharded, 2,343 MiB in all-gather buffers."""
    profile = build.moe(
        "qwen3_moe",
        hidden=2048,
        layers=48,
        experts=128,
        top=8,
        width=768,
        vocabulary=151936,
        heads=32,
        kv_heads=4,
        head_dim=64,
        head_norms=True,
    )
    strategy = ParallelStrategy(mesh=Mesh(shard=128))
    report = estimate(profile, build.recipe_of(batch=128), build.cluster_of("h200-128"), strategy, ())
    found = sizes(report.memory)
    assert found["frozen_base"] / 2**20 == pytest.approx(449, abs=1)
    gathers = found["gathered_root"] + found["gather_buffers"] + found["gather_staging"]
    assert gathers / 2**20 == pytest.approx(2359 + 2343, rel=0.02)


def test_keeping_gathered_weights_costs_every_layer(build: SimpleNamespace) -> None:
    profile, cluster = build.qwen3_30b(), build.cluster_of("h200-8")
    strategy = ParallelStrategy(mesh=Mesh(shard=8), reshard_after_forward=False)
    found = sizes(estimate(profile, build.recipe_of(batch=8), cluster, strategy, ()).memory)
    assert found["kept_layers"] == 2 * 48 * profile.layer_kinds[0].parameters


def test_only_adapted_projections_keep_their_inputs(build: SimpleNamespace) -> None:
    """4,096 tokens × 48 layers: attention targets add x once (2·H) and 2·r each; the output's input is kept anyway.

    On one rank no gather makes the bf16 copies of the fp32 adapters, so autograd keeps those too.
    """
    profile, recipe = build.qwen3_30b(), build.recipe_of(batch=1, tokens=4096)
    strategy, cluster = ParallelStrategy(mesh=Mesh()), build.cluster_of("h200-1")

    def activations(targets: tuple[LoraTarget, ...]) -> int:
        return sizes(estimate(profile, recipe, cluster, strategy, targets).memory)["activations"]

    def copies(targets: tuple[LoraTarget, ...]) -> int:
        return 2 * sum(target.adapter_parameters for target in targets)

    attention = build.targets_of(profile, rank=16, experts=False)
    extra = activations(attention) - activations(())
    assert extra == 48 * 4096 * 2 * (2048 + 4 * 16) + copies(attention)
    both = build.targets_of(profile, rank=16)
    experts = activations(both) - activations(attention)
    assert experts == 48 * 4096 * 8 * 2 * (2048 + 768 + 2 * 16) + copies(both) - copies(attention)


def test_nothing_flows_back_past_the_first_adapter(build: SimpleNamespace) -> None:
    """Adapters on the upper half of the layers keep half of the activations; experts alone need no attention below."""
    profile, recipe = build.qwen3_30b(), build.recipe_of(batch=1, tokens=4096)
    strategy, cluster = ParallelStrategy(mesh=Mesh()), build.cluster_of("h200-1")

    def activations(targets: tuple[LoraTarget, ...]) -> float:
        found = sizes(estimate(profile, recipe, cluster, strategy, targets).memory)["activations"]
        return found - 2 * 4096 * 2 * 2048

    every = build.targets_of(profile, rank=16)
    upper = tuple(t for t in every if int(t.parameter.split(".")[2]) >= 24)
    assert activations(upper) < 0.51 * activations(every)
    experts = build.targets_of(profile, rank=16, attention=False)
    assert [layer.headless for layer in workload(profile, recipe, experts).layers] == [True]
    assert [layer.headless for layer in workload(profile, recipe, every).layers] == [False]
    inputs = sum(t.in_features for t in every if t.parameter.startswith("model.layers.1.self_attn.q_proj"))
    assert activations(experts) < activations(every) - 48 * 4096 * 2 * inputs


def test_checkpointing_keeps_one_input_per_layer(build: SimpleNamespace) -> None:
    strategy = ParallelStrategy(mesh=Mesh(), checkpointing="full")
    recipe = build.recipe_of(batch=1, tokens=4096)
    found = sizes(estimate(build.qwen3_30b(), recipe, build.cluster_of("h200-1"), strategy, ()).memory)
    assert found["activations"] == 50 * 4096 * 2048 * 2 + 48 * 4096 * 8 * 8
    assert found["loss"] == 12 * 4096 * 151_936


def test_reserve_counts_the_communicators_a_plan_makes(build: SimpleNamespace) -> None:
    def reserve(mesh: Mesh) -> MemoryReport:
        recipe = build.recipe_of(batch=8)
        return estimate(build.qwen3_30b(), recipe, build.cluster_of("h200-8"), ParallelStrategy(mesh=mesh), ()).memory

    one, two = reserve(Mesh(ep=8)), reserve(Mesh(shard=2, ep=4))
    assert sizes(two)["runtime_reserve"] - sizes(one)["runtime_reserve"] == 375_000_000
    outside = sizes(one)["runtime_reserve"] + sizes(one)["allocator_holes"]
    assert one.reserved_bytes == pytest.approx(one.peak_bytes * 1.02 + outside, abs=2)


def test_an_allocator_is_priced_as_it_cuts_its_segments(build: SimpleNamespace) -> None:
    """Holes of segments that grow on CUDA, of fixed ones on a device whose allocator lacks them."""
    cluster, profile, recipe = build.cluster_of("h200-1"), build.qwen3_30b(), build.recipe_of(batch=1)
    other = cluster.model_copy(update={"device": cluster.device.model_copy(update={"type": "npu"})})
    strategy = ParallelStrategy(mesh=Mesh())
    plans, work = plans_of([strategy], profile), workload(profile, recipe, ())
    for here, grows in ((cluster, True), (other, False)):
        found = estimate(profile, recipe, here, strategy, ()).memory
        (holes,) = hole_bytes(work, plans, FusedProviders(), grows)
        assert found.reserved_bytes == pytest.approx(found.peak_bytes * 1.02 + holes + 750_000_000, abs=3)


def test_the_peak_is_the_fullest_moment(build: SimpleNamespace) -> None:
    strategy = ParallelStrategy(mesh=Mesh(shard=4, ep=2))
    report = estimate(build.mixtral_8x7b(), build.recipe_of(batch=8), build.cluster_of("h200-8"), strategy, ()).memory
    assert report.peak_bytes == report.by_moment[report.peak_moment] == max(report.by_moment.values())
    for moment, total in report.by_moment.items():
        assert total == sum(c.bytes for c in report.components if moment in c.moments)


def test_gradients_and_freed_activations_do_not_add_up(build: SimpleNamespace) -> None:
    """One micro-batch: at the end of backward all gradients and no activations; accumulating, both from the start."""
    profile, cluster = build.qwen3_30b(), build.cluster_of("h200-1")
    targets = build.targets_of(profile, rank=16)

    def found(accumulation: int) -> MemoryReport:
        strategy = ParallelStrategy(mesh=Mesh(), accumulation_steps=accumulation, checkpointing="full")
        recipe = build.recipe_of(batch=accumulation, tokens=4096)
        return estimate(profile, recipe, cluster, strategy, targets).memory

    one, two = found(1), found(2)
    gradients = sizes(two)["adapter_gradients"]
    assert sizes(two)["gradients_in_backward"] == gradients
    assert 0 < sizes(one)["gradients_in_backward"] < gradients
    assert two.by_moment["backward_peak"] - one.by_moment["backward_peak"] == pytest.approx(
        gradients - sizes(one)["gradients_in_backward"], abs=2
    )


FIRST_HALVES = {
    "full, 8": """512 504 443 556 440 393 513 522 496 438 509 505 505 574 472 522 458 542 468 524 477 508 596 424
    474 555 473 565 512 530 479 509 497 510 460 541 550 509 490 533 483 538 479 455 416 536 530 443""",
    "full, 2": """503 498 477 489 467 520 558 436 496 409 456 561 439 476 589 518 565 463 439 457 509 416 408 514
    569 541 613 533 427 463 549 488 628 455 488 439 427 377 379 514 532 445 406 497 474 480 469 381""",
    "none, 2": """505 458 480 556 611 468 381 606 573 561 424 523 572 569 441 600 591 488 510 572 436 581 543 539
    466 525 425 499 483 444 450 552 461 514 453 484 417 506 570 562 542 531 563 472 487 478 503 484""",
}
"""Rows of the first of two ranks in each of 48 layers, per mille, counted in the runs measured below."""


def halves(text: str) -> tuple[tuple[float, ...], ...]:
    """Shares of 128 experts in each layer, even within a rank."""
    first = [int(word) / 1000 for word in text.split()]
    return tuple((share / 64,) * 64 + ((1 - share) / 64,) * 64 for share in first)


def with_head_norms(profile: CheckpointProfile) -> CheckpointProfile:
    """The profile as headers give it: norms of queries and keys are part of attention."""
    counts, shape = profile.parameters, profile.shape
    attention = counts.by_component["attention"] + 2 * shape.head_dim * shape.num_layers
    counts = counts.model_copy(update={"by_component": {**counts.by_component, "attention": attention}})
    return profile.model_copy(update={"parameters": counts})


def on_two_ranks(
    build: SimpleNamespace, checkpointing: str, sequences: int, loads: Loads, padding: int = 1
) -> MemoryReport:
    """Qwen3-30B-A3B over two ranks of expert parallelism, every operator fused, rank 16, 4096 tokens."""
    profile, layers = with_head_norms(build.qwen3_30b()), [f"model.layers.{index}" for index in range(48)]
    modules = {name: ("shardwright", tuple(layers)) for name in ("experts", "router", "add_rms_norm", "qk_norm_rope")}
    modules["rms_norm"] = ("shardwright", tuple(f"{layer}.input_layernorm" for layer in layers))
    modules["linear_cross_entropy"] = ("shardwright", ("lm_head",))
    strategy = ParallelStrategy.model_validate(
        {
            "mesh": Mesh(ep=2),
            "micro_batch_sequences": sequences,
            "checkpointing": checkpointing,
            "expert_padding_tokens": padding,
        }
    )
    recipe = build.recipe_of(batch=2 * sequences, tokens=4096)
    work = workload(profile, recipe, build.targets_of(profile, rank=16), loads)
    return price(
        work, build.cluster_of("h200-8"), strategy, FusedProviders(modules, {"experts": "grouped_lora_mlp"})
    ).memory


@pytest.mark.parametrize(("case", "peak_gb"), [("full, 8", 50.12), ("full, 2", 39.65), ("none, 2", 94.23)])
def test_measured_peaks_of_expert_parallelism_on_two_h200(build: SimpleNamespace, case: str, peak_gb: float) -> None:
    """One run each on two H200, torch 2.11 and transformers 5.17, with the loads of its own router."""
    checkpointing, sequences = case.split(", ")
    found = on_two_ranks(build, checkpointing, int(sequences), halves(FIRST_HALVES[case]))
    if checkpointing == "full":
        assert found.peak_moment == "backward_peak"
    else:  # both passes hold every layer's activations and one layer's temporaries
        assert found.by_moment["forward_peak"] == pytest.approx(found.by_moment["backward_peak"], rel=1e-3)
        assert found.peak_moment in ("forward_peak", "backward_peak")
    assert found.peak_bytes / 1e9 == pytest.approx(peak_gb, rel=0.03)


@pytest.mark.parametrize(
    ("case", "traced"),
    [("full, 8192", 1722.4), ("full, 32768", 4528.6), ("none, 4096", 3094.5), ("none, 16384", 9108.6)],
)
def test_traced_peaks_of_fused_layers(build: SimpleNamespace, case: str, traced: float) -> None:
    """MiB above the weights of six of Qwen3-30B-A3B's layers on one rank, every operator fused, rank 16: the executor
    over fake tensors with launches left out, every storage counted while it lives."""
    profile = with_head_norms(build.qwen3_30b())
    kind = profile.layer_kinds[0].model_copy(update={"layer_indices": tuple(range(6))})
    cut = profile.parameters.total - 42 * kind.parameters
    attention = profile.parameters.by_component["attention"] // 8
    counts = profile.parameters.model_copy(
        update={"total": cut, "by_component": {**profile.parameters.by_component, "attention": attention}}
    )
    shape = profile.shape.model_copy(update={"num_layers": 6})
    profile = profile.model_copy(update={"layer_kinds": (kind,), "parameters": counts, "shape": shape})
    layers = [f"model.layers.{index}" for index in range(6)]
    modules = {name: ("shardwright", tuple(layers)) for name in ("experts", "router", "add_rms_norm", "qk_norm_rope")}
    modules["rms_norm"] = ("shardwright", tuple(f"{layer}.input_layernorm" for layer in layers))
    modules["linear_cross_entropy"] = ("shardwright", ("lm_head",))
    checkpointing, tokens = case.split(", ")
    strategy = ParallelStrategy.model_validate({"mesh": Mesh(), "checkpointing": checkpointing})
    targets = tuple(t for t in build.targets_of(profile, rank=16) if int(t.parameter.split(".")[2]) < 6)
    work = workload(profile, build.recipe_of(batch=1, tokens=int(tokens)), targets)
    found = price(work, build.cluster_of("h200-1"), strategy, FusedProviders(modules, {"experts": "moe_layer"})).memory
    held = sizes(found)
    above = found.peak_bytes - held["frozen_base"] - held["adapter_parameters"] - held["library_workspaces"]
    assert above / 2**20 == pytest.approx(traced, rel=0.03)


def test_rows_in_transit_and_the_experts_own_temporaries_take_turns(build: SimpleNamespace) -> None:
    """In transit T·K rows sent, N received, N grouped, of b·H; the experts' own: two such in forward; in backward two
    and r values for each stack, less the rows of b·H and their product of b·I, which are free by then. What is larger
    counts, once."""
    tokens, row, width, ranks = 2 * 4096, 2 * 2048, 2 * 768, 2 * 2 * 16
    found = sizes(on_two_ranks(build, "full", 2, halves("500 " * 48)))
    sent, received = tokens * 8, (found["forward_workspace"] - tokens * row) / (2 * row)
    assert sent <= received < 1.01 * sent
    travelling = row * (sent + 2 * received)
    assert found["dispatch_buffers"] == pytest.approx(travelling - 2 * row * received, rel=1e-6)
    own = received * (2 * row + ranks - row - width)
    assert found.get("gradient_buffers", 0) == pytest.approx(max(0.0, travelling - own), rel=1e-6)
    padded = sizes(on_two_ranks(build, "full", 2, halves("500 " * 48), padding=512))
    assert padded["forward_workspace"] > found["forward_workspace"]
    assert padded["dispatch_buffers"] < found["dispatch_buffers"], "padding is computed, not sent"


def test_what_all_layers_keep_follows_a_rank_and_what_one_keeps_its_fullest(build: SimpleNamespace) -> None:
    """Ranks that take turns at being full keep as even ones do; what is recomputed has the rows of a full layer."""
    even, turns, lean = (halves(text * 24) for text in ("500 500 ", "400 600 ", "600 600 "))
    kept = [sizes(on_two_ranks(build, "none", 2, loads))["activations"] for loads in (even, turns, lean)]
    assert kept[0] == pytest.approx(kept[1], rel=1e-9)
    assert kept[2] > 1.05 * kept[0]
    again = [sizes(on_two_ranks(build, "full", 2, loads))["recomputed_layer"] for loads in (even, turns, lean)]
    assert again[0] < again[1] == again[2]
