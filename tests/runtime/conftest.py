"""A tiny real checkpoint with data, and plans for it made from the schemas alone."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.fingerprint import fingerprint
from shardwright.checkpoints.targets import parameter_shapes, resolve_targets
from shardwright.runtime.record import read as read_record
from shardwright.runtime.record import versions
from shardwright.schemas.approval import Approval, ProposalVerdict, append_to_log, proposals_to_decide
from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.cluster import ClusterRef, ClusterSpec, DeviceSpec, HostSpec, LinkSpec
from shardwright.schemas.cost import CostReport, MemoryReport, TimeReport
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.plan import AdaptationPlan, DataPin, Decision, Evidence, Provenance, SearchRecord
from shardwright.schemas.profile import ActiveCounts, CheckpointProfile, ModelShape, ParameterCounts
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.run import RunRecord
from shardwright.schemas.strategy import Mesh, ParallelStrategy

ROOT = Path(__file__).resolve().parents[2]
HASH = "ab" * 32
RANKS = Path(__file__).resolve().parent / "ranks"
DEVICE = DeviceSpec(
    name="cpu",
    type="cpu",
    memory_bytes=8 << 30,
    usable_memory_bytes=6 << 30,
    peak_flops={"float32": 1e11},
    achievable_flops={"float32": 5e10},
    memory_bandwidth_bytes_per_s=1e10,
)
CLUSTER = ClusterSpec(
    name="cpu-4",
    device=DEVICE,
    devices_per_node=4,
    nodes=1,
    links=(LinkSpec(name="intra_node", bandwidth_bytes_per_s=1e9, latency_s=1e-5),),
    host=HostSpec(memory_bytes=16 << 30, cores=2),
    backend="gloo",
)
RECIPE = {
    "name": "tiny",
    "lora": {"targets": ["attention", "experts"], "rank": 4, "alpha": "8"},
    "data": {"train": "train.jsonl", "held_out": "held_out.jsonl"},
    "batch": {"sequence_tokens": 32, "global_batch_sequences": 4},
    "optimizer": {"learning_rate": "0.01"},
    "schedule": {"steps": 5, "held_out_sequences": 3, "decay": "constant"},
    "precision": {"base": "float32"},
}


@dataclass(frozen=True)
class Example:
    """A checkpoint with its data."""

    checkpoint: Path
    data: Path


@dataclass(frozen=True)
class Job:
    """A plan on disk with its approval, and where it runs."""

    plan_path: Path
    approvals: Path
    example: Example
    run_dir: Path
    plan: AdaptationPlan

    @property
    def flags(self) -> list[str]:
        return [
            *("--plan", str(self.plan_path), "--approvals", str(self.approvals)),
            *("--checkpoint", str(self.example.checkpoint), "--recipe-root", str(self.example.data)),
            *("--run-dir", str(self.run_dir)),
        ]

    @property
    def record(self) -> RunRecord:
        return read_record(self.run_dir)

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.record.steps]


def torchrun_script(ranks: int, script: Path, *arguments: str, limit_s: int = 400) -> str:
    """Run a script of this folder under torchrun and a hard limit; it must end well. Returns its stdout."""
    options = [f"--nproc-per-node={ranks}", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--local-addr=127.0.0.1", str(script)]
    done = subprocess.run(
        ["timeout", "-k", "5", str(limit_s), *command, *arguments],
        env=quiet_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., str]:
    """``on_ranks(2, "experts.py", …)`` runs ``ranks/experts.py`` on two ranks."""
    return lambda ranks, name, *arguments: torchrun_script(ranks, RANKS / name, *arguments)


@pytest.fixture(scope="session")
def run_many(on_ranks: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Run several jobs on the same ranks, in one torchrun."""

    def run(ranks: int, jobs: list[Job]) -> None:
        path = tmp_path_factory.mktemp("many") / "jobs.json"
        path.write_text(json.dumps([job.flags for job in jobs]))
        on_ranks(ranks, "many.py", str(path))

    return run


def quiet_environment() -> dict[str, str]:
    return {
        **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """examples/tiny-moe, built."""
    out = tmp_path_factory.mktemp("tiny")
    subprocess.run([sys.executable, str(ROOT / "examples/tiny-moe/build.py"), "--out", str(out)], check=True)
    return Example(out / "checkpoint", out)


@pytest.fixture(scope="session")
def make_job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """Seal a plan, approve it, and put both into a fresh folder."""

    def make(
        example: Example,
        strategy: ParallelStrategy,
        recipe: dict[str, Any] | None = None,
        fusions: tuple[FusionDecision, ...] = (),
        approve: bool = True,
        **changes: Any,
    ) -> Job:
        folder = tmp_path_factory.mktemp("job")
        decision = make_decision(example, strategy, Recipe.model_validate(merged(RECIPE, recipe or {})), fusions)
        plan = AdaptationPlan.seal(decision.model_copy(update=changes), make_evidence(example, decision))
        plan.save(folder / "plan.json")
        if approve:
            verdicts = tuple(ProposalVerdict(proposal_id=one) for one in proposals_to_decide(plan))
            approval = Approval.seal(
                decision_sha256=plan.hashes.decision,
                evidence_sha256=plan.hashes.evidence,
                verdict="approve",
                proposals=verdicts,
                actor="tests",
                actor_kind="person",
                time="2026-01-01T00:00:00Z",
            )
            append_to_log(folder / "approvals.jsonl", approval)
        return Job(folder / "plan.json", folder / "approvals.jsonl", example, folder / "run", plan)

    return make


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    out = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
    for key, value in change.items():
        out[key] = {**out[key], **value} if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def make_decision(
    example: Example, strategy: ParallelStrategy, recipe: Recipe, fusions: tuple[FusionDecision, ...] = ()
) -> Decision:
    config = read_config(example.checkpoint)
    return Decision(
        model_type=config.model_type,
        architecture=config.architecture,
        checkpoint=fingerprint(example.checkpoint),
        data=DataPin(
            train_sha256=sha256_file(example.data / recipe.data.train),
            held_out_sha256=sha256_file(example.data / recipe.data.held_out),
        ),
        recipe=recipe,
        cluster=ClusterRef(
            name=CLUSTER.name,
            digest=HASH,
            device_type="cpu",
            device_name="cpu",
            world_size=CLUSTER.world_size,
            devices_per_node=CLUSTER.devices_per_node,
            backend="gloo",
        ),
        strategy=strategy,
        lora_targets=resolve_targets(parameter_shapes(example.checkpoint), recipe.lora, model_type=config.model_type),
        fusions=fusions,
        environment=versions(),
    )


def make_evidence(example: Example, decision: Decision) -> Evidence:
    """Just enough evidence to seal a plan; the runtime reads only the predicted cost."""
    memory = MemoryReport(
        components=(),
        by_moment={"load": 100},
        peak_bytes=100,
        peak_moment="load",
        reserved_bytes=110,
        budget_bytes=6 << 30,
    )
    time = TimeReport(components=(), step_ms=10, tokens_per_s=100, bound_by="compute")
    counts = ActiveCounts(all=1, without_input_embedding=1, without_embeddings=1)
    shape = ModelShape(
        hidden_size=64, num_layers=1, vocab_size=100, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    profile = CheckpointProfile(
        model_type=decision.model_type,
        architecture=decision.architecture,
        transformers_class=True,
        tensors=1,
        files=1,
        stored_bytes=1,
        dtypes={},
        parameters=ParameterCounts(total=1, active=counts, by_component={}),
        packing=(),
        shape=shape,
        layer_kinds=(),
        fingerprint=decision.checkpoint,
    )
    return Evidence(
        profile=profile,
        cluster=CLUSTER,
        proposals=(),
        cost=CostReport(memory=memory, time=time, gpu_hours=0.0, time_to_first_step_s=1.0, feasible=True),
        alternatives=(),
        search=SearchRecord(
            sampler="none",
            seed=0,
            trials=0,
            legal_strategies=1,
            feasible_strategies=1,
            oracle_step_ms=1,
            study_step_ms=1,
            versions={},
        ),
        provenance=Provenance(shardwright="0", versions={}, cluster_digest=HASH, recipe_digest=HASH, graph_digest=HASH),
    )


def strategy_of(shard: int = 1, ep: int = 1, replicate: int = 1, **axes: Any) -> ParallelStrategy:
    """A strategy whose global batch is 4 sequences unless told otherwise."""
    mesh = Mesh(shard=shard, ep=ep, replicate=replicate)
    axes.setdefault("micro_batch_sequences", 1)
    axes.setdefault("accumulation_steps", 4 // (mesh.data_ranks * axes["micro_batch_sequences"]))
    return ParallelStrategy(mesh=mesh, **axes)


@pytest.fixture(scope="session")
def strategy() -> Callable[..., ParallelStrategy]:
    return strategy_of


@pytest.fixture(scope="session")
def single_rank() -> Iterator[Callable[[Job], int]]:
    """Run the worker in this process as the only rank, as a launcher that has set ``RANK`` would."""
    from shardwright.runtime.launch.process import free_port
    from shardwright.runtime.worker import main

    def run(job: Job) -> int:
        names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        with pytest.MonkeyPatch.context() as patch:
            for key, value in {**names, "MASTER_PORT": str(free_port())}.items():
                patch.setenv(key, value)
            return main(job.flags)

    yield run


@pytest.fixture(scope="session")
def qwen(tiny: Example, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """Another family beside the same data: tied embeddings, one dense layer, eight experts."""
    return make_qwen(tiny, tmp_path_factory.mktemp("qwen"), experts=8)


@pytest.fixture(scope="session")
def few_experts(tiny: Example, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """Fewer experts than shards: FSDP must cut inside them."""
    return make_qwen(tiny, tmp_path_factory.mktemp("few"), experts=2)


def make_qwen(tiny: Example, out: Path, experts: int) -> Example:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=experts,
        num_experts_per_tok=2 if experts > 2 else 1,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        tie_word_embeddings=True,
        max_position_embeddings=128,
        eos_token_id=0,
    )
    torch.manual_seed(3)
    Qwen3MoeForCausalLM(config).save_pretrained(out / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.checkpoint / name, out / "checkpoint" / name)
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(tiny.data / name, out / name)
    return Example(out / "checkpoint", out)


@pytest.fixture(scope="session")
def packed_examples() -> ModuleType:
    """``packed_examples.py`` beside this file."""
    path = Path(__file__).with_name("packed_examples.py")
    spec = importlib.util.spec_from_file_location("shardwright_tests_packed_examples", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def packed(
    tiny: Example, packed_examples: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Example]:
    """``packed("mxfp4", experts=2)``: a checkpoint of that packing beside the tiny example's data, built once."""

    @functools.cache
    def build(kind: str, experts: int = 4) -> Example:
        example: Example = packed_examples.write(kind, experts, tiny, tmp_path_factory.mktemp(kind))
        return example

    return build
