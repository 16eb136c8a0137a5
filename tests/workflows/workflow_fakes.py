"""Stages that need no torch and leave a line in ``effects.log`` for every effect on the world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwright.schemas.canonical import pretty_bytes, sha256_hex
from shardwright.schemas.cluster import ClusterRef, ClusterSpec, DeviceSpec, HostSpec, LinkSpec
from shardwright.schemas.cost import CostReport, MemoryComponent, MemoryReport, TimeComponent, TimeReport
from shardwright.schemas.files import write_atomic
from shardwright.schemas.fusion import (
    Certificate,
    FusionDecision,
    FusionProposal,
    Gain,
    Obligation,
    Region,
    Variant,
    VariantPredicate,
)
from shardwright.schemas.graph import LayerGraph, OpGraph
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import Alternative, SearchRecord, load_plan
from shardwright.schemas.profile import (
    ActiveCounts,
    CheckpointFingerprint,
    CheckpointProfile,
    LayerKind,
    ModelShape,
    Packing,
    ParameterCounts,
    WeightsPin,
)
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.run import AdapterFacts, CheckResult, EvalMetric, RunRecord, StepMetric
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.workflows.stages import Stages

H = "ab" * 32
RECIPE = """\
name: fake
data: {train: train.jsonl, held_out: held_out.jsonl}
batch: {sequence_tokens: 64, global_batch_sequences: 4}
schedule: {steps: 3}
"""
POLICY = "max_memory_fraction: 0.9\napprove: true\n"


def make_inputs(folder: Path) -> None:
    """A checkpoint folder, a recipe, data and a policy."""
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint" / "config.json").write_text("{}")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "policy.yaml").write_text(POLICY)
    for name in ("train", "held_out"):
        (folder / f"{name}.jsonl").write_text('{"text": "a"}\n')


def cluster_spec() -> ClusterSpec:
    return ClusterSpec(
        name="fake-2",
        device=DeviceSpec(
            name="CPU",
            type="cpu",
            memory_bytes=8 << 30,
            usable_memory_bytes=6 << 30,
            peak_flops={"float32": 1e11},
            achievable_flops={"float32": 5e10},
            memory_bandwidth_bytes_per_s=1e10,
        ),
        devices_per_node=2,
        nodes=1,
        links=(LinkSpec(name="intra_node", bandwidth_bytes_per_s=1e9, latency_s=1e-5),),
        host=HostSpec(memory_bytes=16 << 30, cores=2),
        backend="gloo",
    )


def cluster_ref(cluster: ClusterSpec) -> ClusterRef:
    return ClusterRef(
        name=cluster.name,
        digest=H,
        device_type="cpu",
        device_name="CPU",
        world_size=2,
        devices_per_node=2,
        backend="gloo",
    )


def profile() -> CheckpointProfile:
    counts = ActiveCounts(all=5, without_input_embedding=4, without_embeddings=3)
    return CheckpointProfile(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        transformers_class=True,
        tensors=1,
        files=1,
        stored_bytes=10,
        dtypes={"F32": 1},
        parameters=ParameterCounts(total=10, active=counts, by_component={"attention": 10}),
        packing=(Packing(format="plain", tensors=1, stored_bytes=10, logical_parameters=10),),
        shape=ModelShape(
            hidden_size=64, num_layers=1, vocab_size=100, num_attention_heads=4, num_key_value_heads=2, head_dim=16
        ),
        layer_kinds=(LayerKind(name="attention+moe", attention="full", mlp="moe", layer_indices=(0,), parameters=10),),
        fingerprint=CheckpointFingerprint(config_sha256=H, headers_sha256=H, total_file_bytes=10, digest=H),
    )


def target() -> LoraTarget:
    return LoraTarget(
        parameter="model.layers.0.self_attn.q_proj.weight",
        role="attention",
        kind="dense",
        in_features=64,
        out_features=64,
        rank=4,
        alpha="8",
        scaling="2",
    )


def proposal(name: str, status: str, provider: str = "shardwright") -> FusionProposal:
    """A proposal whose certificate has one obligation of the given status."""
    gain = Gain(
        provider=provider, time_ms=1.0, eager_ms=2.0, floor_ms=0.5, speedup=2.0, origin="modelled", basis="a formula"
    )
    return FusionProposal(
        id=name,
        pattern="rms_norm",
        title=f"RMSNorm {name}",
        region=Region(layer_kind="attention+moe", modules=("model.norm",), roles={"weight": "weight"}),
        certificate=Certificate(
            pattern="rms_norm",
            pattern_version=1,
            matched_nodes=("n1",),
            source_lines=("modeling.py:1",),
            obligations=(Obligation(name="no-randomness", status=status, evidence="0 of 5 nodes are random"),),
            environment={"torch": "2"},
            graph_digest=H,
        ),
        variants=(
            Variant(
                name="fused", provider=provider, op="rms_norm", predicate=VariantPredicate(), gain=gain, available=True
            ),
            Variant(name="eager", provider="eager", op="-", predicate=VariantPredicate(), available=True),
        ),
        chosen="fused",
        reason="faster",
    )


@dataclass(frozen=True)
class Structured:
    graph: OpGraph
    proposals: tuple[FusionProposal, ...]


@dataclass(frozen=True)
class Searched:
    best: ParallelStrategy
    cost: CostReport
    alternatives: tuple[Alternative, ...]
    record: SearchRecord
    explanation: tuple[str, ...]


@dataclass(frozen=True)
class SearchedAgain:
    strategies: tuple[ParallelStrategy, ...] = ()
    feasible: int = 2


def searched_again(profile, recipe, cluster, targets, certified, found, more=(), trials=1) -> SearchedAgain | None:
    """Nothing new beside ``more``; ``None`` where no fused operator may run."""
    fused = any(decision.provider != "eager" for decision in certified(found))
    return SearchedAgain(tuple(more)) if fused else None


def structured() -> Structured:
    layer = LayerGraph(kind="attention+moe", module_path="m", occurrences=("m",), nodes=(), capture="export", digest=H)
    graph = OpGraph(
        layers=(layer,), torch_version="2", transformers_version="5", capture_dtype="bfloat16", sequence_tokens=64
    )
    return Structured(graph, (proposal("norm.unproved", "unknown"), proposal("norm.good", "proved")))


def cost(strategy: ParallelStrategy, fusions: tuple[FusionDecision, ...] = ()) -> CostReport:
    """Memory falls with ``shard``, time grows by 1 ms for each fusion that is not installed."""
    size = (4 << 30) // strategy.mesh.shard * strategy.micro_batch_sequences
    slow = sum(fusion.rejected for fusion in fusions)
    memory = MemoryReport(
        components=(
            MemoryComponent(name="frozen_base", bytes=size, moments=("load",), formula="w·N", origin="modelled"),
        ),
        by_moment={"load": size},
        peak_bytes=size,
        peak_moment="load",
        reserved_bytes=size,
        budget_bytes=6 << 30,
    )
    time = TimeReport(
        components=(
            TimeComponent(name="gemm", milliseconds=10 + slow, kind="compute", formula="x", origin="modelled"),
        ),
        step_ms=10 + slow,
        tokens_per_s=100,
        bound_by="gemm",
    )
    return CostReport(memory=memory, time=time, gpu_hours=0.1, time_to_first_step_s=1.23456789, feasible=memory.fits)


def searched() -> Searched:
    best = ParallelStrategy(mesh=Mesh(shard=2), accumulation_steps=2)
    rival = ParallelStrategy(mesh=Mesh(ep=2), accumulation_steps=2)
    return Searched(
        best=best,
        cost=cost(best),
        alternatives=(
            Alternative(
                strategy=rival,
                step_ms=12,
                reserved_bytes=4 << 30,
                gpu_hours=0.2,
                feasible=True,
                pareto=False,
                lost_because="12 ms beside 10 ms",
            ),
        ),
        record=SearchRecord(
            sampler="TPE",
            seed=0,
            trials=4,
            legal_strategies=2,
            feasible_strategies=2,
            oracle_step_ms=10,
            study_step_ms=10,
            versions={},
        ),
        explanation=("shard 2 halves the weights",),
    )


def recertify(
    proposals: tuple[FusionProposal, ...], strategy: ParallelStrategy, cluster: ClusterSpec, recipe: Recipe
) -> tuple[tuple[FusionProposal, ...], tuple[FusionDecision, ...]]:
    decisions = []
    for item in proposals:
        if item.chosen is None:
            continue
        variant = next(v for v in item.variants if v.name == item.chosen)
        decisions.append(
            FusionDecision(
                proposal_id=item.id,
                pattern=item.pattern,
                variant=variant.name,
                provider=variant.provider,
                op=variant.op,
                modules=item.region.modules,
                roles=item.region.roles,
                source_sha256=H,
            )
        )
    return proposals, tuple(decisions)


def violations(
    profile: CheckpointProfile, recipe: Recipe, cluster: ClusterSpec, strategy: ParallelStrategy
) -> tuple[str, ...]:
    if strategy.mesh.world_size != cluster.world_size:
        return (f"mesh-covers-world: {strategy.mesh.text()} is not {cluster.world_size} ranks (nearest legal: 2)",)
    return ()


def effect(run_dir: Path, name: str) -> None:
    with open(run_dir / "effects.log", "a") as stream:
        stream.write(name + "\n")


def effects(run_dir: Path) -> list[str]:
    path = run_dir / "effects.log"
    return path.read_text().split() if path.exists() else []


PASSED = (
    CheckResult(stage="load", name="all-loaded", passed=True, evidence="1 of 1 tensors"),
    CheckResult(stage="step", name="frozen-unchanged", passed=True, evidence="0 of 1 tensors changed"),
)


def launch(plan_file: Path, checkpoint: Path, data_root: Path, approvals: Path, run_dir: Path) -> int:
    """Writes a trained record."""
    effect(run_dir, "launch")
    plan = load_plan(plan_file)
    record = RunRecord(
        decision_sha256=plan.hashes.decision,
        evidence_sha256=plan.hashes.evidence,
        status="trained",
        world_size=2,
        device="CPU",
        versions={"torch": "2"},
        steps=tuple(
            StepMetric(
                step=i, loss=6 - i, grad_norm=1, learning_rate=0.1, tokens=256, seconds=0.5, peak_memory_bytes=1 << 30
            )
            for i in (1, 2, 3)
        ),
        evaluations=(EvalMetric(step=0, loss=5.9, tokens=64), EvalMetric(step=3, loss=4.4, tokens=64)),
        checks=PASSED,
        measured_step_ms=500,
        measured_peak_bytes=1 << 30,
        predicted_step_ms=10,
        predicted_peak_bytes=2 << 30,
    )
    write_atomic(run_dir / "run.json", pretty_bytes(record))
    return 0


def export(run_dir: Path, checkpoint: Path) -> AdapterFacts:
    """Writes an adapter; the same bytes each time."""
    effect(run_dir, "export")
    data = b"adapter"
    write_atomic(run_dir / "adapter" / "adapter_model.safetensors", data)
    return AdapterFacts(
        path=str(run_dir / "adapter"), format="peft", tensors=2, bytes=len(data), sha256=sha256_hex(data)
    )


def check_adapter(run_dir: Path, checkpoint: Path) -> tuple[CheckResult, ...]:
    return (CheckResult(stage="export", name="logits-equal", passed=True, evidence="0 beside 0"),)


def fake_stages(**replaced: Callable[..., object]) -> Stages:
    """The table of fakes, single ones replaced."""
    table: dict[str, Callable[..., object]] = {
        "load_cluster": lambda name: cluster_spec(),
        "cluster_ref": cluster_ref,
        "profile": lambda folder: profile(),
        "weights": lambda folder: WeightsPin(files={"model.safetensors": H}, read_bytes=10),
        "targets": lambda folder, lora: (target(),),
        "structure": lambda *a: structured(),
        "search": lambda *a, **named: searched(),
        "search_fused": searched_again,
        "recertify": recertify,
        "violations": violations,
        "estimate": lambda profile, recipe, cluster, strategy, targets, fusions: cost(strategy, fusions),
        "verify": lambda plan, checkpoint, data_root: None,
        "launch": launch,
        "export": export,
        "check_adapter": check_adapter,
    }
    return Stages(**{**table, **replaced})  # type: ignore[arg-type]


def verified_but_router(happened: list[object]) -> Callable[..., object]:
    """In place of ``verify_in_jobs``: notes the operators in ``happened``, and finds ``router`` wrong."""
    from shardwright.kernels.verify import VerifyResult

    def verify(ops, name, jobs, say):  # type: ignore[no-untyped-def]
        happened.append(("verified", tuple(ops)))
        facts = {"case": "c", "value": "y", "error": 1.0, "eager_error": 0.0, "allowed": 0.5}
        return {op: [VerifyResult(op=op, ok=op != "router", **facts)] for op in ops}

    return verify
