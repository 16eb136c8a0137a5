"""Published models as profiles, from the sizes of their config.json: what the cost benchmarks price.

No file is read; parameter counts are those of the published shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

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

DIGEST = "0" * 64


@dataclass(frozen=True)
class Block:
    """Layers of one kind: attention kind, mlp kind, indices, parameters without experts."""

    attention: str
    mlp: str
    layers: tuple[int, ...]
    dense: int
    experts: int = 0


def profile(
    name: str, shape: ModelShape, blocks: tuple[Block, ...], outside: int, packed: str = "plain", known: bool = True
) -> CheckpointProfile:
    """A profile from counted blocks. ``outside``: embedding, head and final norm."""
    routed = sum(block.experts * len(block.layers) for block in blocks)
    total = outside + sum((block.dense + block.experts) * len(block.layers) for block in blocks)
    stored = 2 * total if packed == "plain" else 2 * (total - routed) + routed * 17 // 32
    kinds = tuple(
        LayerKind(
            name=f"{block.attention}+{block.mlp}",
            attention=block.attention,  # type: ignore[arg-type]
            mlp=block.mlp,  # type: ignore[arg-type]
            layer_indices=block.layers,
            parameters=block.dense + block.experts,
            expert_parameters=block.experts,
        )
        for block in blocks
    )
    active = total - routed + routed * shape.experts_per_token // max(shape.num_experts, 1)
    formats = [Packing(format="plain", tensors=1, stored_bytes=1, logical_parameters=1)]
    if packed != "plain":
        formats.append(
            Packing(format=packed, tensors=1, stored_bytes=routed * 17 // 32, logical_parameters=routed, block=(32,))  # type: ignore[arg-type]
        )
    return CheckpointProfile(
        model_type=name,
        architecture=name,
        transformers_class=known,
        tensors=1,
        files=1,
        stored_bytes=stored,
        dtypes={"BF16": 1},
        parameters=ParameterCounts(
            total=total,
            active=ActiveCounts(all=active, without_input_embedding=active, without_embeddings=active),
            by_component={"routed_experts": routed},
        ),
        packing=tuple(formats),
        shape=shape,
        layer_kinds=kinds,
        fingerprint=CheckpointFingerprint(
            config_sha256=DIGEST, headers_sha256=DIGEST, total_file_bytes=stored, digest=DIGEST
        ),
    )


def kimi_k3(packed: str = "plain") -> CheckpointProfile:
    """Kimi K3, language model: 69 KDA and 24 latent-attention layers, 896 latent experts, top 16."""
    full = (*range(3, 92, 4), 92)
    shape = ModelShape(
        hidden_size=7168, num_layers=93, vocab_size=163840, num_attention_heads=96, num_key_value_heads=96,
        head_dim=192, dense_intermediate_size=33792, expert_intermediate_size=3072, num_experts=896,
        experts_per_token=16, num_shared_experts=2, expert_hidden_size=3584, q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, linear_num_heads=96, linear_head_dim=128,
    )  # fmt: skip
    norms = 4 * 7168 + 2 * 7168
    kda, mla, moe = 443_740_416, 232_196_096, 132_120_576 + 51_383_808 + 6_423_424
    linear = tuple(i for i in range(1, 93) if i not in full)
    blocks = (
        Block("linear", "dense", (0,), kda + 726_663_168 + norms),
        Block("linear", "moe", linear, kda + moe + norms, 29_595_009_024),
        Block("mla", "moe", full, mla + moe + norms, 29_595_009_024),
    )
    return profile("kimi_k3", shape, blocks, 2 * 1_174_405_120 + 3 * 7168, packed)


def targets_for(
    model: CheckpointProfile, *, rank: int, attention: bool = True, experts: bool = True
) -> tuple[LoraTarget, ...]:
    """Adapters on the projections of attention and on the fused expert stacks of every layer."""
    found: list[LoraTarget] = []
    for kind in model.layer_kinds:
        for layer in kind.layer_indices:
            if attention:
                found += [
                    _dense(f"model.layers.{layer}.self_attn.{name}.weight", i, o, rank)
                    for name, i, o in projections(model, kind)
                ]
            if experts and kind.mlp == "moe":
                s = model.shape
                width, inner = s.expert_hidden_size or s.hidden_size, s.expert_intermediate_size
                gate = 2 if s.gated_mlp else 1
                for name, i, o in (("gate_up_proj", width, gate * inner), ("down_proj", inner, width)):
                    found.append(_stack(f"model.layers.{layer}.mlp.experts.{name}", i, o, s.num_experts, rank))
    return tuple(found)


def projections(model: CheckpointProfile, kind: LayerKind) -> list[tuple[str, int, int]]:
    """(name, in, out) of the adapted projections of one attention block."""
    s = model.shape
    if kind.attention == "linear":
        width = (s.linear_num_heads or s.num_attention_heads) * (s.linear_head_dim or s.head_dim)
        return [(name, s.hidden_size, width) for name in ("q_proj", "k_proj", "v_proj")] + [
            ("o_proj", width, s.hidden_size)
        ]
    if kind.attention in ("mla", "dsa") and s.kv_lora_rank:
        heads = s.num_attention_heads
        query = (s.q_lora_rank or s.hidden_size, heads * (s.qk_nope_head_dim + s.qk_rope_head_dim))
        keys = (s.kv_lora_rank, heads * (s.qk_nope_head_dim + s.v_head_dim))
        return [("q_b_proj", *query), ("kv_b_proj", *keys), ("o_proj", heads * s.v_head_dim, s.hidden_size)]
    q, k = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
    return [
        ("q_proj", s.hidden_size, q),
        ("k_proj", s.hidden_size, k),
        ("v_proj", s.hidden_size, k),
        ("o_proj", q, s.hidden_size),
    ]


def _dense(name: str, inputs: int, outputs: int, rank: int) -> LoraTarget:
    return LoraTarget(
        parameter=name,
        role="attention",
        kind="dense",
        in_features=inputs,
        out_features=outputs,
        rank=rank,
        alpha="32",
        scaling="1",
    )


def _stack(name: str, inputs: int, outputs: int, experts: int, rank: int) -> LoraTarget:
    return LoraTarget(
        parameter=name, role="experts", kind="experts", in_features=inputs, out_features=outputs, num_experts=experts,
        rank=rank, alpha="32", scaling="1",
    )  # fmt: skip


def recipe_for(
    *,
    batch: int,
    tokens: int,
    rank: int = 16,
    adapter: str = "float32",
    targets: tuple[str, ...] = ("attention", "experts"),
) -> Recipe:
    return Recipe(
        data=DataSpec(train="train.jsonl", held_out="held_out.jsonl"),
        batch=BatchSpec(sequence_tokens=tokens, global_batch_sequences=batch),
        precision=PrecisionSpec(base="bfloat16", adapter=adapter),  # type: ignore[arg-type]
        lora=LoraSpec(targets=targets, rank=rank),
    )


def kimi_linear() -> CheckpointProfile:
    """Kimi-Linear-48B-A3B: 20 KDA and 7 latent-attention layers, 256 experts, top 8; layer 0 is dense."""
    full = (3, 7, 11, 15, 19, 23, 26)
    shape = ModelShape(
        hidden_size=2304, num_layers=27, vocab_size=163840, num_attention_heads=32, num_key_value_heads=32,
        head_dim=192, dense_intermediate_size=9216, expert_intermediate_size=1024, num_experts=256,
        experts_per_token=8, num_shared_experts=1, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, linear_num_heads=32, linear_head_dim=128,
    )  # fmt: skip
    heads = 32 * 128
    mla = 2304 * 32 * 192 + 2304 * 576 + 512 + 512 * 32 * 256 + heads * 2304
    kda = (994_089_600 - 7 * mla) // 20
    moe, norms = 3 * 2304 * 1024 + 256 * 2304, 2 * 2304
    routed = 256 * 3 * 2304 * 1024
    linear = tuple(i for i in range(1, 27) if i not in full)
    blocks = (
        Block("linear", "dense", (0,), kda + 3 * 2304 * 9216 + norms),
        Block("linear", "moe", linear, kda + moe + norms, routed),
        Block("mla", "moe", full, mla + moe + norms, routed),
    )
    return profile("kimi_linear", shape, blocks, 2 * 377_487_360 + 2304)


def latent_moe(
    name: str, *, layers: int, dense_layers: int, hidden: int, heads: int, query: int, nope: int, value: int,
    experts: int, top: int, width: int, dense_width: int, shared: int, vocabulary: int,
    indexer: int = 0, index_heads: int = 0, packed: str = "plain",
) -> CheckpointProfile:  # fmt: skip
    """DeepSeek-V3's family: latent attention (r_kv 512, d_r 64), routed and shared experts, first layers dense."""
    shape = ModelShape(
        hidden_size=hidden, num_layers=layers, vocab_size=vocabulary, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=nope + 64, dense_intermediate_size=dense_width,
        expert_intermediate_size=width, num_experts=experts, experts_per_token=top, num_shared_experts=shared,
        q_lora_rank=query, kv_lora_rank=512, qk_nope_head_dim=nope, qk_rope_head_dim=64, v_head_dim=value,
        index_num_heads=index_heads, index_head_dim=128 if index_heads else 0, index_topk=2048 if index_heads else 0,
    )  # fmt: skip
    attention = hidden * query + query + query * heads * (nope + 64) + hidden * 576 + 512
    attention += 512 * heads * (nope + value) + heads * value * hidden + indexer
    norms, kind = 2 * hidden, "dsa" if index_heads else "mla"
    dense = Block(kind, "dense", tuple(range(dense_layers)), attention + norms + 3 * hidden * dense_width)
    moe = Block(
        kind,
        "moe",
        tuple(range(dense_layers, layers)),
        attention + norms + 3 * hidden * width * shared + experts * hidden,
        experts * 3 * hidden * width,
    )
    return profile(name, shape, (dense, moe) if dense_layers else (moe,), 2 * vocabulary * hidden + hidden, packed)


def deepseek_v3(layers: int = 61, dense_layers: int = 3) -> CheckpointProfile:
    return latent_moe(
        "deepseek_v3", layers=layers, dense_layers=dense_layers,
        hidden=7168, heads=128, query=1536, nope=128, value=128,
        experts=256, top=8, width=2048, dense_width=18432, shared=1, vocabulary=129280,
    )  # fmt: skip


def deepseek_v2(layers: int = 60, dense_layers: int = 1) -> CheckpointProfile:
    return latent_moe(
        "deepseek_v2", layers=layers, dense_layers=dense_layers,
        hidden=5120, heads=128, query=1536, nope=128, value=128,
        experts=160, top=6, width=1536, dense_width=12288, shared=2, vocabulary=102400,
    )  # fmt: skip


def glm_5() -> CheckpointProfile:
    """GLM-5 without its MTP layer: 743.9 B parameters."""
    return latent_moe(
        "glm_moe_dsa", layers=78, dense_layers=3, hidden=6144, heads=64, query=2048, nope=192, value=256, experts=256,
        top=8, width=2048, dense_width=12288, shared=1, vocabulary=154880, indexer=731_008_512 // 78, index_heads=32,
    )  # fmt: skip


def grouped_query_moe(
    name: str, *, layers: int, dense_layers: int, hidden: int, heads: int, keys: int, head: int, experts: int, top: int,
    width: int, dense_width: int, shared: int, vocabulary: int, head_norms: bool = True,
) -> CheckpointProfile:  # fmt: skip
    """Grouped-query attention with routed experts; first layers dense."""
    shape = ModelShape(
        hidden_size=hidden, num_layers=layers, vocab_size=vocabulary, num_attention_heads=heads,
        num_key_value_heads=keys, head_dim=head, dense_intermediate_size=dense_width, expert_intermediate_size=width,
        num_experts=experts, experts_per_token=top, num_shared_experts=shared,
    )  # fmt: skip
    attention = 2 * hidden * heads * head + 2 * hidden * keys * head + (2 * head if head_norms else 0)
    norms = 2 * hidden
    dense = Block("full", "dense", tuple(range(dense_layers)), attention + norms + 3 * hidden * dense_width)
    moe = Block(
        "full",
        "moe",
        tuple(range(dense_layers, layers)),
        attention + norms + 3 * hidden * width * shared + experts * hidden,
        experts * 3 * hidden * width,
    )
    return profile(name, shape, (dense, moe) if dense_layers else (moe,), 2 * vocabulary * hidden + hidden)


def glm_46() -> CheckpointProfile:
    """GLM-4.6 without its MTP layer."""
    return grouped_query_moe(
        "glm4_moe", layers=92, dense_layers=3, hidden=5120, heads=96, keys=8, head=128, experts=160, top=8, width=1536,
        dense_width=12288, shared=1, vocabulary=151552,
    )  # fmt: skip


def qwen3_30b() -> CheckpointProfile:
    """Qwen3-30B-A3B."""
    return grouped_query_moe(
        "qwen3_moe", layers=48, dense_layers=0, hidden=2048, heads=32, keys=4, head=128, experts=128, top=8, width=768,
        dense_width=0, shared=0, vocabulary=151936,
    )  # fmt: skip
