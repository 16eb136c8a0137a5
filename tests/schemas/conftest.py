"""A small whole plan, built from the schemas alone."""

from __future__ import annotations

import pytest

from shardwright.schemas.cluster import ClusterRef, ClusterSpec, DeviceSpec, HostSpec, LinkSpec
from shardwright.schemas.cost import CostReport, MemoryComponent, MemoryReport, TimeComponent, TimeReport
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import AdaptationPlan, DataPin, Decision, Evidence, Provenance, SearchRecord
from shardwright.schemas.profile import (
    ActiveCounts,
    CheckpointFingerprint,
    CheckpointProfile,
    LayerKind,
    ModelShape,
    Packing,
    ParameterCounts,
)
from shardwright.schemas.recipe import DataSpec, Recipe
from shardwright.schemas.strategy import Mesh, ParallelStrategy

H = "ab" * 32


@pytest.fixture
def cluster() -> ClusterSpec:
    device = DeviceSpec(
        name="CPU",
        type="cpu",
        memory_bytes=8 << 30,
        usable_memory_bytes=6 << 30,
        peak_flops={"float32": 1e11},
        achievable_flops={"float32": 5e10},
        memory_bandwidth_bytes_per_s=1e10,
    )
    return ClusterSpec(
        name="cpu-2",
        device=device,
        devices_per_node=2,
        nodes=1,
        links=(LinkSpec(name="intra_node", bandwidth_bytes_per_s=1e9, latency_s=1e-5),),
        host=HostSpec(memory_bytes=16 << 30, cores=2),
        backend="gloo",
    )


@pytest.fixture
def plan(cluster: ClusterSpec) -> AdaptationPlan:
    fingerprint = CheckpointFingerprint(config_sha256=H, headers_sha256=H, total_file_bytes=10, digest=H)
    decision = Decision(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        checkpoint=fingerprint,
        data=DataPin(train_sha256=H, held_out_sha256=H),
        recipe=Recipe(data=DataSpec(train="train.jsonl", held_out="held_out.jsonl")),
        cluster=ClusterRef(
            name="cpu-2",
            digest=H,
            device_type="cpu",
            device_name="CPU",
            world_size=2,
            devices_per_node=2,
            backend="gloo",
        ),
        strategy=ParallelStrategy(mesh=Mesh(shard=2)),
        lora_targets=(
            LoraTarget(
                parameter="model.layers.0.self_attn.q_proj.weight",
                role="attention",
                kind="dense",
                in_features=64,
                out_features=64,
                rank=4,
                alpha="8",
                scaling="2",
            ),
        ),
        fusions=(
            FusionDecision(
                proposal_id="rms_norm.attention+moe",
                pattern="rms_norm",
                variant="eager",
                provider="eager",
                op="-",
                modules=("model.norm",),
                roles={"weight": "weight"},
                constants={"eps": "0.00001"},
            ),
        ),
        environment={"torch": "2.13.0"},
    )
    memory = MemoryReport(
        components=(
            MemoryComponent(name="frozen_base", bytes=100, moments=("load",), formula="w·N", origin="modelled"),
        ),
        by_moment={"load": 100},
        peak_bytes=100,
        peak_moment="load",
        reserved_bytes=110,
        budget_bytes=6 << 30,
    )
    time = TimeReport(
        components=(TimeComponent(name="gemm", milliseconds=10, kind="compute", formula="x", origin="modelled"),),
        step_ms=10,
        tokens_per_s=100,
        bound_by="gemm",
    )
    evidence = Evidence(
        profile=CheckpointProfile(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            transformers_class=True,
            tensors=1,
            files=1,
            stored_bytes=10,
            dtypes={"F32": 1},
            parameters=ParameterCounts(
                total=10,
                active=ActiveCounts(all=5, without_input_embedding=4, without_embeddings=3),
                by_component={"attention": 10},
            ),
            packing=(Packing(format="plain", tensors=1, stored_bytes=10, logical_parameters=10),),
            shape=ModelShape(
                hidden_size=64,
                num_layers=1,
                vocab_size=100,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
            ),
            layer_kinds=(
                LayerKind(name="attention+moe", attention="full", mlp="moe", layer_indices=(0,), parameters=10),
            ),
            fingerprint=fingerprint,
        ),
        cluster=cluster,
        proposals=(),
        cost=CostReport(memory=memory, time=time, gpu_hours=0.1, time_to_first_step_s=1.23456789, feasible=True),
        alternatives=(),
        search=SearchRecord(
            sampler="TPE",
            seed=0,
            trials=1,
            legal_strategies=1,
            feasible_strategies=1,
            oracle_step_ms=10,
            study_step_ms=10,
            versions={},
        ),
        provenance=Provenance(shardwright="0.1.0", versions={}, cluster_digest=H, recipe_digest=H, graph_digest=H),
    )
    return AdaptationPlan.seal(decision, evidence)
