"""Which provider a region gets, for which device and mesh, and what the plan then says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.agents.structure.choose import fastest
from shardwright.agents.structure.join import decimal_text, recertify
from shardwright.agents.structure.patterns import PATTERNS
from shardwright.agents.structure.propose import find_matches
from shardwright.agents.structure.rank import Target, counted, floor_ms, timing, variants
from shardwright.agents.structure.run import StructureResult, open_structure, run_structure
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.kernels.evidence import EvidenceStore, shape_bucket
from shardwright.kernels.registry import source_sha256
from shardwright.schemas.canonical import canonical_bytes
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.fusion import FusionDecision, Gain, Variant, VariantPredicate
from shardwright.schemas.ops import MeasuredTime
from shardwright.schemas.profile import CheckpointProfile, Packing
from shardwright.schemas.recipe import LoraSpec, Recipe
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster

UNCOSTED = {pattern.name for pattern in PATTERNS if not pattern.costed}
"""Recognised patterns of which nothing is claimed about time."""
LIBRARIES = {"liger", "fla"}
NORM, PAIR = "rms_norm:{}:post_attention_layernorm", "add_rms_norm:{}:post_attention_layernorm"


@pytest.fixture(scope="module")
def profile(mixtral_folder: Path) -> CheckpointProfile:
    return profile_checkpoint(mixtral_folder)


@pytest.fixture(scope="module")
def kind(profile: CheckpointProfile) -> str:
    (only,) = profile.layer_kinds
    return only.name


@pytest.fixture(scope="module")
def on_cuda(mixtral_folder: Path, profile: CheckpointProfile, recipe: Recipe) -> StructureResult:
    return run_structure(mixtral_folder, profile, load_cluster("h200-8"), recipe)


@pytest.fixture(scope="module")
def on_cpu(mixtral_folder: Path, profile: CheckpointProfile, recipe: Recipe) -> StructureResult:
    return run_structure(mixtral_folder, profile, load_cluster("cpu-2"), _fp32(recipe))


def _fp32(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"base": "float32"})})


def decided(result: StructureResult, cluster: ClusterSpec, recipe: Recipe, **mesh: int) -> dict[str, FusionDecision]:
    _, decisions = recertify(result.proposals, ParallelStrategy(mesh=Mesh(**mesh)), cluster, recipe)
    return {d.proposal_id: d for d in decisions}


def by_id(result: StructureResult):  # type: ignore[no-untyped-def]
    return {p.id: p for p in result.proposals}


def test_our_kernel_is_chosen_on_cuda_and_covers_each_operation_once(on_cuda, kind) -> None:  # type: ignore[no-untyped-def]
    proposals = by_id(on_cuda)
    assert proposals[PAIR.format(kind)].chosen == "kernel"
    assert proposals[NORM.format(kind)].chosen is None
    assert proposals[NORM.format(kind)].reason.startswith(f"superseded by {PAIR.format(kind)}")
    assert proposals[f"rms_norm:{kind}:input_layernorm"].chosen == "kernel"
    claimed: set[tuple[str, str]] = set()
    for proposal in on_cuda.proposals:
        if proposal.chosen is not None:
            nodes = {(proposal.region.layer_kind, node) for node in proposal.certificate.matched_nodes}
            assert not nodes & claimed
            claimed |= nodes


def test_a_cpu_cluster_stays_eager_and_says_why(on_cpu, kind) -> None:  # type: ignore[no-untyped-def]
    for proposal in on_cpu.proposals:
        assert proposal.chosen is None or proposal.chosen.startswith("eager")
    proposals = by_id(on_cpu)
    assert "compile time is not repaid" in proposals[f"rms_norm:{kind}:input_layernorm"].reason
    assert proposals[NORM.format(kind)].chosen == "eager"
    assert proposals[PAIR.format(kind)].reason.startswith(f"superseded by {NORM.format(kind)}")
    kernel = next(v for v in proposals[NORM.format(kind)].variants if v.provider == "shardwright")
    assert not kernel.available and "cuda" in kernel.unavailable_because


def test_packed_files_leave_decoded_experts_their_kernels_and_close_no_other(  # type: ignore[no-untyped-def]
    mixtral_folder, profile, recipe
) -> None:
    stacks = {f"model.layers.{i}.mlp.experts.{name}_proj": "mxfp4" for i in range(3) for name in ("gate_up", "down")}
    opened = open_structure(mixtral_folder, profile, load_cluster("h200-8"), recipe)
    by_name = {f"{m.pattern.name}:{m.label}": m for m in opened.matches}

    def kernel(match: str, packed: dict[str, str] | None) -> Variant:
        target = replace(opened.target, packed=packed)
        found = variants(by_name[match], target, adapted=False)
        return next(v for v in found if v.provider == "shardwright" and not v.name.startswith("kernel-mxfp4"))

    norm, experts = "rms_norm:input_layernorm", "experts:experts"
    for packed in ({}, stacks):
        assert kernel(norm, packed).available and kernel(experts, packed).available
        assert kernel(experts, packed).predicate.base_formats == ("compute",)
    odd = dict.fromkeys(stacks, "some-later-format")
    assert kernel(norm, odd).available and "is stored as some-later" in kernel(experts, odd).unavailable_because
    norms = dict.fromkeys(by_name[norm].all_parameters(), "mxfp4")
    assert not kernel(norm, norms).available
    packing = Packing(format="mxfp4", tensors=6, stored_bytes=1, logical_parameters=1)
    unknown = profile.model_copy(update={"packing": (packing,)})
    opened = replace(opened, target=replace(opened.target, profile=unknown))
    assert not kernel(norm, None).available, "which parameters are packed is not known: all may be"


def test_the_seam_between_layers_is_shown_and_refused(on_cuda, kind) -> None:  # type: ignore[no-untyped-def]
    seam = by_id(on_cuda)[f"add_rms_norm:{kind}:input_layernorm"]
    assert seam.chosen is None and "sharding-boundary: refuted" in seam.reason


def test_decisions_name_all_instances_constants_and_sources(on_cuda, recipe, kind) -> None:  # type: ignore[no-untyped-def]
    decisions = decided(on_cuda, load_cluster("h200-8"), recipe, shard=8)
    pair = decisions[PAIR.format(kind)]
    assert pair.provider == "shardwright" and pair.op == "add_rms_norm"
    assert pair.modules == tuple(f"model.layers.{i}" for i in range(3))
    assert pair.roles == {
        "norm": "post_attention_layernorm",
        "first_norm": "input_layernorm",
        "branch": "self_attn",
        "mlp": "mlp",
    }
    assert pair.constants["eps"] == "0.00001"
    assert pair.source_sha256 == source_sha256("add_rms_norm") and float(pair.tolerance) > 0
    experts = decisions[f"experts:{kind}/experts:experts"]
    assert experts.op == "moe_layer" and experts.constants["activation"] == "swiglu"
    assert experts.source_sha256 == source_sha256("moe_layer") and float(experts.tolerance) > 0
    canonical_bytes(list(decisions.values()), floats=False)


def test_the_mesh_picks_the_variant_and_the_certificate_says_so(on_cuda, recipe, kind) -> None:  # type: ignore[no-untyped-def]
    cluster = load_cluster("h200-8")
    for mesh, cut in ((Mesh(shard=8), "whole"), (Mesh(shard=2, ep=4), "cut-at-dispatch")):
        wanted = f"kernel-{cut}"
        proposals, decisions = recertify(on_cuda.proposals, ParallelStrategy(mesh=mesh), cluster, recipe)
        again, same = recertify(proposals, ParallelStrategy(mesh=mesh), cluster, recipe)
        assert (again, same) == (proposals, decisions)
        name = f"experts:{kind}/experts:experts"
        assert next(d for d in decisions if d.proposal_id == name).variant == wanted
        obligations = next(p for p in proposals if p.id == name).certificate.obligations
        evidence = next(o.evidence for o in obligations if o.name == "sharding-boundary")
        assert evidence.endswith(f"mesh {mesh.text()}: {wanted}, eager-{cut}")


def test_tensor_parallelism_refuses_every_region(on_cuda, recipe) -> None:  # type: ignore[no-untyped-def]
    proposals, decisions = recertify(
        on_cuda.proposals, ParallelStrategy(mesh=Mesh(shard=4, tp=2)), load_cluster("h200-8"), recipe
    )
    assert decisions == ()
    assert all("sharding-boundary: refuted" in p.reason for p in proposals)


def test_a_refused_certificate_stays_refused(on_cuda, recipe, kind) -> None:  # type: ignore[no-untyped-def]
    name = PAIR.format(kind)
    spoiled = []
    for proposal in on_cuda.proposals:
        if proposal.id == name:
            obligations = tuple(
                o.model_copy(update={"status": "unknown"}) if o.name == "hooks" else o
                for o in proposal.certificate.obligations
            )
            certificate = proposal.certificate.model_copy(update={"obligations": obligations})
            proposal = proposal.model_copy(update={"certificate": certificate})
        spoiled.append(proposal)
    found = decided(StructureResult(on_cuda.graph, tuple(spoiled)), load_cluster("h200-8"), recipe, shard=8)
    assert name not in found and found[NORM.format(kind)].op == "rms_norm"


def test_gains_say_where_they_come_from(on_cuda) -> None:  # type: ignore[no-untyped-def]
    for proposal in on_cuda.proposals:
        for variant in proposal.variants:
            if variant.gain is None:
                assert (variant.unranked_because and variant.provider != "eager") or proposal.pattern in UNCOSTED
                continue
            assert proposal.pattern not in UNCOSTED and not variant.unranked_because
            assert variant.gain.basis and variant.gain.time_ms > 0
            assert variant.gain.time_ms >= 0.99 * variant.gain.floor_ms or variant.gain.origin == "measured"
            if variant.provider == "eager":
                assert variant.gain.speedup == 1.0
            assert variant.available or variant.unavailable_because


def test_modelled_time_is_bytes_over_bandwidth_at_large_sizes(profile, recipe) -> None:  # type: ignore[no-untyped-def]
    """Closed form: forward moves 2·T·H·2 bytes and backward 3·T·H·2, both far above the launch floor."""
    cluster = load_cluster("h200-8")
    target = Target(cluster, profile, recipe)
    shape = {"T": 65536, "H": 7168}
    seen = timing("rms_norm", "shardwright", shape, target)
    expected = 5 * 65536 * 7168 * 2 / cluster.device.memory_bandwidth_bytes_per_s * 1e3
    assert seen.origin == "modelled" and seen.time_ms == pytest.approx(expected, rel=0.01)
    assert floor_ms(counted("rms_norm", "shardwright", shape, "bfloat16"), target) <= seen.time_ms


def test_measured_times_override_modelled_ones(tmp_path, profile, recipe) -> None:  # type: ignore[no-untyped-def]
    cluster, shape = load_cluster("h200-8"), {"T": 512, "H": 64}
    base = MeasuredTime(
        op="rms_norm",
        provider="shardwright",
        pass_name="fwd+bwd",
        device=cluster.device.name,
        driver="",
        versions={},
        source_sha256=source_sha256("rms_norm"),
        shape_bucket=shape_bucket(shape),
        dtype="bfloat16",
        median_ms=0.5,
        floor_ms=0.25,
        peak_bytes=0,
        repeats=100,
        date="2026-01-01",
    )
    path = tmp_path / "times.jsonl"
    EvidenceStore(path).add([base])
    target = Target(cluster, profile, recipe, (path,))
    seen = timing("rms_norm", "shardwright", shape, target)
    assert (seen.origin, seen.time_ms, seen.floor_ms) == ("measured", 0.5, 0.25) and "2026-01-01" in seen.basis
    EvidenceStore(path).add([base.model_copy(update={"pass_name": "fwd+dx", "median_ms": 0.4})])
    assert timing("rms_norm", "shardwright", shape, target).time_ms == 0.4
    for changed in ({"T": 512, "H": 128}, {"T": 5120, "H": 64}):
        assert timing("rms_norm", "shardwright", changed, target).origin == "modelled"
    other = replace(target, cluster=load_cluster("cpu-2"), recipe=_fp32(recipe))
    assert timing("rms_norm", "shardwright", shape, other).origin == "modelled"


def test_libraries_are_ranked_and_never_chosen(on_cuda, recipe, kind) -> None:  # type: ignore[no-untyped-def]
    found = {}
    for proposal in on_cuda.proposals:
        for variant in proposal.variants:
            assert variant.rival == (variant.provider in LIBRARIES)
            if variant.rival:
                found[proposal.pattern] = variant
                assert not variant.available and variant.unavailable_because.startswith("not installable")
                assert variant.gain is not None and variant.gain.basis.endswith("as read in liger-kernel 0.8.5")
                assert proposal.chosen != variant.name and variant.name not in proposal.reason
    assert set(found) == {"rms_norm", "add_rms_norm", "rope", "experts", "linear_cross_entropy", "swiglu"}
    for mesh in ({"shard": 8}, {"shard": 2, "ep": 4}):
        assert not LIBRARIES & {d.provider for d in decided(on_cuda, load_cluster("h200-8"), recipe, **mesh).values()}


def test_a_library_stays_out_where_a_file_says_that_it_is_available(on_cuda, recipe) -> None:  # type: ignore[no-untyped-def]
    """The flag decides, not what stands beside it."""
    doctored = []
    for proposal in on_cuda.proposals:
        fast = {"available": True, "unavailable_because": "", "gain": None}
        variants_ = [
            v.model_copy(update={**fast, "gain": v.gain and v.gain.model_copy(update={"time_ms": 1e-6})})
            if v.rival
            else v
            for v in proposal.variants
        ]
        doctored.append(proposal.model_copy(update={"variants": tuple(variants_)}))
    result = StructureResult(on_cuda.graph, tuple(doctored))
    found = decided(result, load_cluster("h200-8"), recipe, shard=8)
    assert found == decided(on_cuda, load_cluster("h200-8"), recipe, shard=8)


def test_the_rank_does_not_depend_on_the_order_of_ways(mixtral_folder, profile, recipe, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    opened = open_structure(mixtral_folder, profile, load_cluster("h200-8"), recipe)
    for match in opened.matches:
        ranked = variants(match, opened.target, adapted=False)
        backwards = tuple(reversed(match.pattern.variants()))
        with monkeypatch.context() as patched:
            patched.setattr(type(match.pattern), "variants", lambda self, kept=backwards: kept)
            assert variants(match, opened.target, adapted=False) == ranked, match.pattern.name
        for group in ([v for v in ranked if v.available], [v for v in ranked if v.rival]):
            times = [v.gain.time_ms for v in group if v.gain is not None]
            assert times == sorted(times), match.pattern.name


def test_a_measured_library_is_shown_as_measured(tmp_path, mixtral_folder, profile, recipe) -> None:  # type: ignore[no-untyped-def]
    """The suite times libraries beside our operator, under its name and sources."""
    cluster = load_cluster("h200-8")
    opened = open_structure(mixtral_folder, profile, cluster, recipe)
    (head,) = [match for match in opened.matches if match.pattern.name == "linear_cross_entropy"]
    shape = head.pattern.cost_shape(head, opened.target.tokens)
    path = tmp_path / "times.jsonl"
    time = MeasuredTime(
        op="linear_cross_entropy",
        provider="liger",
        pass_name="fwd+dx",
        device=cluster.device.name,
        driver="",
        versions={},
        source_sha256=source_sha256("linear_cross_entropy"),
        shape_bucket=shape_bucket(shape),
        dtype="bfloat16",
        median_ms=0.125,
        floor_ms=0.1,
        peak_bytes=0,
        repeats=100,
        date="2026-01-01",
    )
    EvidenceStore(path).add([time])
    for files, origin in (((), "modelled"), ((path,), "measured")):
        found = variants(head, replace(opened.target, evidence=files), adapted=False)
        (liger,) = [v for v in found if v.rival]
        assert liger.gain is not None
        assert ("measured on" in liger.gain.basis) == (origin == "measured") and not liger.available
        assert (liger.gain.time_ms == 0.125) == (origin == "measured")
        assert liger.gain.origin == "modelled", "beside a modelled eager time a speed-up is modelled"


def test_a_rotation_without_norms_gets_the_operator(on_cuda, recipe, kind) -> None:  # type: ignore[no-untyped-def]
    decision = decided(on_cuda, load_cluster("h200-8"), recipe, shard=8)[f"rope:{kind}:self_attn"]
    assert (decision.provider, decision.op, decision.variant) == ("shardwright", "qk_norm_rope", "kernel")
    assert decision.constants == {"form": "pair", "pairing": "half", "width": 16, "partial": False}
    assert set(decision.roles) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert decision.modules == tuple(f"model.layers.{i}.self_attn" for i in range(3))


def test_an_adapter_inside_closes_variants_that_do_not_compute_it(  # type: ignore[no-untyped-def]
    mixtral_folder, profile, recipe
) -> None:
    for dropout, chosen in (("0", "kernel"), ("0.1", "eager")):
        adapted = recipe.model_copy(update={"lora": LoraSpec(targets=("head",), rank=4, dropout=dropout)})
        result = run_structure(mixtral_folder, profile, load_cluster("h200-8"), adapted)
        head = by_id(result)["linear_cross_entropy:final:lm_head"]
        (obligation,) = [o for o in head.certificate.obligations if o.name == "lora-inside"]
        assert "lm_head.weight" in obligation.evidence and head.chosen == chosen, dropout
        compiled = next(v for v in head.variants if v.name == "compile")
        assert not compiled.available


def test_a_kernel_for_contiguous_rows_does_not_take_a_slice(tiny, captured, profile, recipe) -> None:  # type: ignore[no-untyped-def]
    """deepseek_v3's kv norm reads a slice of a wider projection."""
    target = Target(load_cluster("h200-8"), profile, recipe)
    for match in find_matches(captured(tiny("deepseek_v3"))):
        if match.pattern.name == "rms_norm":
            kernel = next(v for v in variants(match, target, adapted=False) if v.provider == "shardwright")
            assert kernel.available == (not match.anchor.endswith("kv_a_layernorm"))
            assert kernel.available or "contiguous" in kernel.unavailable_because


def test_two_runs_give_the_same_bytes(mixtral_folder, profile, recipe, on_cuda) -> None:  # type: ignore[no-untyped-def]
    again = run_structure(mixtral_folder, profile, load_cluster("h200-8"), recipe)
    assert canonical_bytes(again.graph) == canonical_bytes(on_cuda.graph)
    assert canonical_bytes(list(again.proposals)) == canonical_bytes(list(on_cuda.proposals))


def test_the_graph_holds_one_layer_of_each_kind(on_cuda, kind) -> None:  # type: ignore[no-untyped-def]
    assert [layer.kind for layer in on_cuda.graph.layers] == [kind, f"{kind}/experts", "embedding", "final"]
    assert on_cuda.graph.layers[0].occurrences == tuple(f"model.layers.{i}" for i in range(3))


def _variant(provider: str, time_ms: float, origin: str) -> Variant:
    gain = Gain(
        provider=provider, time_ms=time_ms, eager_ms=9, floor_ms=1, speedup=9 / time_ms, origin=origin, basis="test"
    )
    return Variant(name=provider, provider=provider, op="-", predicate=VariantPredicate(), gain=gain, available=True)


@pytest.mark.parametrize(
    ("own", "compiled", "wanted"),
    [
        ((2.0, "modelled"), (2.1, "modelled"), "shardwright"),
        ((2.0, "modelled"), (1.9, "modelled"), "shardwright"),
        ((2.0, "modelled"), (1.7, "modelled"), "compile"),
        ((2.0, "measured"), (1.9, "measured"), "compile"),
        ((2.0, "measured"), (1.9, "modelled"), "shardwright"),
    ],
)
def test_modelled_ties_go_to_the_verified_kernel(own, compiled, wanted) -> None:  # type: ignore[no-untyped-def]
    best = fastest((_variant("compile", *compiled), _variant("shardwright", *own)))
    assert best is not None and best.provider == wanted


@pytest.mark.parametrize("value", [1e-5, 1e-6, 1e-12, 0.5, 3.0])
def test_decimal_text_reads_back(value: float) -> None:
    text = decimal_text(value)
    assert float(text) == value and "e" not in text.lower()
