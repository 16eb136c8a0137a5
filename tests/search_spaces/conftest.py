"""Checkpoint profiles and LoRA targets of known shapes, built by hand; makes ``operators_seen`` importable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import (
    ActiveCounts,
    CheckpointFingerprint,
    CheckpointProfile,
    LayerKind,
    ModelShape,
    Packing,
    ParameterCounts,
)
from shardwright.schemas.recipe import BatchSpec, DataSpec, LoraSpec, PrecisionSpec, Recipe
from shardwright.search_spaces.catalogue import load_cluster

sys.path.insert(0, str(Path(__file__).parent))

H64 = "ab" * 32


def moe(
    model_type: str,
    *,
    hidden: int,
    layers: int,
    experts: int,
    top: int,
    width: int,
    vocabulary: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    head_norms: bool = False,
    tied: bool = False,
    packing: str = "plain",
    block: tuple[int, ...] = (),
) -> CheckpointProfile:
    """A model of equal attention + MoE layers, counted from its sizes."""
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    norms = 2 * hidden + (2 * head_dim if head_norms else 0)
    router, stack = experts * hidden, 3 * experts * hidden * width
    per_layer = attention + norms + router + stack
    embedding = vocabulary * hidden
    total = layers * per_layer + embedding * (1 if tied else 2) + hidden
    active = total - layers * stack * (experts - top) // experts
    return CheckpointProfile(
        model_type=model_type,
        architecture=f"{model_type}ForCausalLM",
        transformers_class=True,
        tensors=layers * 8,
        files=1,
        stored_bytes=2 * total,
        dtypes={"BF16": layers * 8},
        parameters=ParameterCounts(
            total=total,
            active=ActiveCounts(
                all=active, without_input_embedding=active - embedding, without_embeddings=active - 2 * embedding
            ),
            by_component={"routed_experts": layers * stack, "attention": layers * attention},
        ),
        packing=(Packing(format=packing, tensors=1, stored_bytes=1, logical_parameters=1, block=block),),
        shape=ModelShape(
            hidden_size=hidden,
            num_layers=layers,
            vocab_size=vocabulary,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            expert_intermediate_size=width,
            num_experts=experts,
            experts_per_token=top,
            tie_word_embeddings=tied,
        ),
        layer_kinds=(
            LayerKind(
                name="attention+moe",
                attention="full",
                mlp="moe",
                layer_indices=tuple(range(layers)),
                parameters=per_layer,
                expert_parameters=stack,
            ),
        ),
        fingerprint=CheckpointFingerprint(
            config_sha256=H64, headers_sha256=H64, total_file_bytes=2 * total, digest=H64
        ),
    )


def qwen3_30b() -> CheckpointProfile:
    """Qwen3-30B-A3B."""
    return moe(
        "qwen3_moe",
        hidden=2048,
        layers=48,
        experts=128,
        top=8,
        width=768,
        vocabulary=151936,
        heads=32,
        kv_heads=4,
        head_dim=128,
        head_norms=True,
    )


def mixtral_8x7b() -> CheckpointProfile:
    return moe(
        "mixtral",
        hidden=4096,
        layers=32,
        experts=8,
        top=2,
        width=14336,
        vocabulary=32000,
        heads=32,
        kv_heads=8,
        head_dim=128,
    )


def smol() -> CheckpointProfile:
    """SmolLM2-135M upcycled to four experts."""
    return moe(
        "mixtral",
        hidden=576,
        layers=30,
        experts=4,
        top=2,
        width=1536,
        vocabulary=49152,
        heads=9,
        kv_heads=3,
        head_dim=64,
        tied=True,
    )


def tiny(experts: int = 4, **changes: object) -> CheckpointProfile:
    """The 22,976-parameter Qwen3-MoE of the LoRA cases (with four experts)."""
    sizes: dict[str, object] = dict(
        hidden=32, layers=2, top=2, width=16, vocabulary=64, heads=4, kv_heads=2, head_dim=8, head_norms=True
    )
    return moe("qwen3_moe", experts=experts, **{**sizes, **changes})  # type: ignore[arg-type]


def targets_of(
    profile: CheckpointProfile, *, rank: int, attention: bool = True, experts: bool = True
) -> tuple[LoraTarget, ...]:
    """q, k, v, o and the two fused expert stacks of every layer."""
    s = profile.shape
    q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
    dense = {"q_proj": (s.hidden_size, q), "k_proj": (s.hidden_size, kv), "v_proj": (s.hidden_size, kv)}
    dense["o_proj"] = (q, s.hidden_size)
    stacks = {
        "gate_up_proj": (s.hidden_size, 2 * s.expert_intermediate_size),
        "down_proj": (s.expert_intermediate_size, s.hidden_size),
    }
    found = []
    for layer in range(s.num_layers):
        prefix = f"model.layers.{layer}"
        for name, (inputs, outputs) in dense.items() if attention else ():
            found.append(
                LoraTarget(
                    parameter=f"{prefix}.self_attn.{name}.weight",
                    role="attention",
                    kind="dense",
                    in_features=inputs,
                    out_features=outputs,
                    rank=rank,
                    alpha="32",
                    scaling="2",
                )
            )
        for name, (inputs, outputs) in stacks.items() if experts else ():
            found.append(
                LoraTarget(
                    parameter=f"{prefix}.mlp.experts.{name}",
                    role="experts",
                    kind="experts",
                    in_features=inputs,
                    out_features=outputs,
                    num_experts=s.num_experts,
                    rank=rank,
                    alpha="32",
                    scaling="2",
                )
            )
    return tuple(found)


def recipe_of(
    *,
    batch: int = 8,
    tokens: int = 512,
    base: str = "bfloat16",
    rank: int = 16,
    targets: tuple[str, ...] = ("attention", "experts"),
    dropout: str = "0",
) -> Recipe:
    return Recipe(
        data=DataSpec(train="train.jsonl", held_out="held_out.jsonl"),
        batch=BatchSpec(sequence_tokens=tokens, global_batch_sequences=batch),
        precision=PrecisionSpec(base=base),
        lora=LoraSpec(targets=targets, rank=rank, dropout=dropout),
    )


def cluster_of(name: str, **changes: object) -> ClusterSpec:
    """A catalogue cluster with other numbers, checked again."""
    return ClusterSpec.model_validate({**load_cluster(name).model_dump(), **changes})


def with_memory(cluster: ClusterSpec, usable_bytes: int) -> ClusterSpec:
    device = cluster.device.model_dump() | {"memory_bytes": usable_bytes, "usable_memory_bytes": usable_bytes}
    return ClusterSpec.model_validate({**cluster.model_dump(), "device": device})


@pytest.fixture
def build() -> SimpleNamespace:
    """The builders of this file, for tests and property tests."""
    return SimpleNamespace(
        moe=moe,
        qwen3_30b=qwen3_30b,
        mixtral_8x7b=mixtral_8x7b,
        smol=smol,
        tiny=tiny,
        targets_of=targets_of,
        recipe_of=recipe_of,
        cluster_of=cluster_of,
        with_memory=with_memory,
    )


@pytest.fixture
def write_cluster(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "cluster.yaml"
        path.write_text(text)
        return str(path)

    return write
