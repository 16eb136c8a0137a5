"""Checkpoints as vendors publish them: configuration, tensor names, dtypes and shapes, written out from their papers
and model cards, and a writer that makes header-only files of them (the data are holes).

Legend: H hidden, I expert width, E experts, K experts per token, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

BITS = {"F32": 32, "BF16": 16, "F8_E4M3": 8, "U8": 8, "I8": 8, "I32": 32, "I64": 64, "F16": 16}
Tensor = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Published:
    """A checkpoint without its weights."""

    config: dict[str, Any]
    tensors: list[Tensor]


def write(folder: Path, published: Published, *, files: int = 1) -> Path:
    """Write config.json and header-only safetensors files (sparse: no data blocks are allocated)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published.config))
    step = -(-len(published.tensors) // files)
    index = {}
    for number in range(files):
        part = published.tensors[number * step : (number + 1) * step]
        name = "model.safetensors" if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        write_file(folder / name, part)
        index.update({tensor: name for tensor, _, _ in part})
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def write_file(path: Path, tensors: list[Tensor]) -> None:
    """One safetensors file whose data section is a hole of the right length."""
    header, place = {}, 0
    for name, dtype, shape in tensors:
        end = place + prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    data = json.dumps(header).encode()
    with open(path, "wb") as stream:
        stream.write(len(data).to_bytes(8, "little") + data)
        stream.truncate(8 + len(data) + place)


def plain(name: str, *shape: int, dtype: str = "BF16") -> Iterator[Tensor]:
    yield name, dtype, shape


def fp8(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """An FP8 matrix and its 128 × 128 block scales."""
    yield name, "F8_E4M3", (rows, columns)
    yield f"{name}_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))


def mlp(stem: str, hidden: int, width: int, names: tuple[str, str, str], matrix: Any) -> Iterator[Tensor]:
    """gate, up, down."""
    gate, up, down = names
    yield from matrix(f"{stem}.{gate}.weight", width, hidden)
    yield from matrix(f"{stem}.{up}.weight", width, hidden)
    yield from matrix(f"{stem}.{down}.weight", hidden, width)


NAMED = ("gate_proj", "up_proj", "down_proj")
NUMBERED = ("w1", "w3", "w2")


def ends(vocabulary: int, hidden: int) -> Iterator[Tensor]:
    yield from plain("model.embed_tokens.weight", vocabulary, hidden)
    yield from plain("lm_head.weight", vocabulary, hidden)
    yield from plain("model.norm.weight", hidden)


def layer_norms(layer: str, hidden: int) -> Iterator[Tensor]:
    yield from plain(f"{layer}.input_layernorm.weight", hidden)
    yield from plain(f"{layer}.post_attention_layernorm.weight", hidden)


def gqa(layer: str, hidden: int, heads: int, kv: int, dim: int, matrix: Any = plain) -> Iterator[Tensor]:
    yield from matrix(f"{layer}.self_attn.q_proj.weight", heads * dim, hidden)
    yield from matrix(f"{layer}.self_attn.k_proj.weight", kv * dim, hidden)
    yield from matrix(f"{layer}.self_attn.v_proj.weight", kv * dim, hidden)
    yield from matrix(f"{layer}.self_attn.o_proj.weight", hidden, heads * dim)


def mixtral_8x7b() -> Published:
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    tensors = list(ends(32000, 4096))
    for index in range(32):
        layer = f"model.layers.{index}"
        tensors += [*layer_norms(layer, 4096), *gqa(layer, 4096, 32, 8, 128)]
        tensors += plain(f"{layer}.block_sparse_moe.gate.weight", 8, 4096)
        for expert in range(8):
            tensors += mlp(f"{layer}.block_sparse_moe.experts.{expert}", 4096, 14336, NUMBERED, plain)
    return Published(config, tensors)


def qwen3_moe(layers: int, hidden: int, heads: int, kv: int, width: int) -> Published:
    """Qwen3-30B-A3B and Qwen3-235B-A22B: 128 experts, top-8, head dim 128, q/k norms."""
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }
    tensors = list(ends(151936, hidden))
    for index in range(layers):
        layer = f"model.layers.{index}"
        tensors += [*layer_norms(layer, hidden), *gqa(layer, hidden, heads, kv, 128)]
        tensors += [*plain(f"{layer}.self_attn.q_norm.weight", 128), *plain(f"{layer}.self_attn.k_norm.weight", 128)]
        tensors += plain(f"{layer}.mlp.gate.weight", 128, hidden)
        for expert in range(128):
            tensors += mlp(f"{layer}.mlp.experts.{expert}", hidden, width, NAMED, plain)
    return Published(config, tensors)


@dataclass(frozen=True)
class Latent:
    """Sizes of a DeepSeek-V3-shaped model; ``indexer`` heads of 128 make it a sparse-attention model."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    q_rank: int
    nope: int
    value: int
    dense: int
    dense_layers: int
    experts: int
    vocabulary: int
    indexer: int = 0
    mtp: bool = False
    packed: bool = True


DEEPSEEK_V3 = Latent("deepseek_v3", 61, 7168, 128, 1536, 128, 128, 18432, 3, 256, 129280, mtp=True)
DEEPSEEK_V32 = Latent("deepseek_v32", 61, 7168, 128, 1536, 128, 128, 18432, 3, 256, 129280, indexer=64, mtp=True)
KIMI_K2 = Latent("deepseek_v3", 61, 7168, 64, 1536, 128, 128, 18432, 1, 384, 163840)
GLM_5 = Latent("glm_moe_dsa", 78, 6144, 64, 2048, 192, 256, 12288, 3, 256, 154880, indexer=32, packed=False)


def latent(size: Latent) -> Published:
    """DeepSeek-V3, V3.2, Kimi-K2, GLM-5: top-8 of experts 2048 wide, one shared expert, FP8 blocks where packed."""
    config = {
        "model_type": size.model_type,
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": size.hidden,
        "intermediate_size": size.dense,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "q_lora_rank": size.q_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": size.nope,
        "qk_rope_head_dim": 64,
        "v_head_dim": size.value,
        "n_routed_experts": size.experts,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": size.dense_layers,
        "num_nextn_predict_layers": int(size.mtp),
        "vocab_size": size.vocabulary,
        "tie_word_embeddings": False,
    }
    if size.packed:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    tensors = list(ends(size.vocabulary, size.hidden))
    for index in range(size.layers):
        tensors += latent_layer(f"model.layers.{index}", size, moe=index >= size.dense_layers)
    if size.mtp:
        layer = f"model.layers.{size.layers}"
        tensors += latent_layer(layer, size, moe=True)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors += plain(f"{layer}.{name}.weight", size.hidden)
        tensors += plain(f"{layer}.eh_proj.weight", size.hidden, 2 * size.hidden)
        tensors += plain(f"{layer}.embed_tokens.weight", size.vocabulary, size.hidden)
        tensors += plain(f"{layer}.shared_head.head.weight", size.vocabulary, size.hidden)
    return Published(config, tensors)


def latent_layer(layer: str, size: Latent, *, moe: bool) -> Iterator[Tensor]:
    matrix = fp8 if size.packed else plain
    query = size.heads * (size.nope + 64)
    yield from layer_norms(layer, size.hidden)
    yield from matrix(f"{layer}.self_attn.q_a_proj.weight", size.q_rank, size.hidden)
    yield from plain(f"{layer}.self_attn.q_a_layernorm.weight", size.q_rank)
    yield from matrix(f"{layer}.self_attn.q_b_proj.weight", query, size.q_rank)
    yield from matrix(f"{layer}.self_attn.kv_a_proj_with_mqa.weight", 576, size.hidden)
    yield from plain(f"{layer}.self_attn.kv_a_layernorm.weight", 512)
    yield from matrix(f"{layer}.self_attn.kv_b_proj.weight", size.heads * (size.nope + size.value), 512)
    yield from matrix(f"{layer}.self_attn.o_proj.weight", size.hidden, size.heads * size.value)
    if size.indexer:
        yield from matrix(f"{layer}.self_attn.indexer.wq_b.weight", size.indexer * 128, size.q_rank)
        yield from matrix(f"{layer}.self_attn.indexer.wk.weight", 128, size.hidden)
        yield from plain(f"{layer}.self_attn.indexer.k_norm.weight", 128)
        yield from plain(f"{layer}.self_attn.indexer.k_norm.bias", 128)
        yield from plain(f"{layer}.self_attn.indexer.weights_proj.weight", size.indexer, size.hidden)
    if not moe:
        yield from mlp(f"{layer}.mlp", size.hidden, size.dense, NAMED, matrix)
        return
    yield from plain(f"{layer}.mlp.gate.weight", size.experts, size.hidden)
    yield from plain(f"{layer}.mlp.gate.e_score_correction_bias", size.experts, dtype="F32")
    yield from mlp(f"{layer}.mlp.shared_experts", size.hidden, 2048, NAMED, matrix)
    for expert in range(size.experts):
        yield from mlp(f"{layer}.mlp.experts.{expert}", size.hidden, 2048, NAMED, matrix)


def gpt_oss(layers: int, experts: int) -> Published:
    """gpt-oss-20b and -120b: MXFP4 blocks, biases, sinks."""
    config = {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "sliding_window": 128,
        "vocab_size": 201088,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    tensors = list(ends(201088, 2880))
    for index in range(layers):
        layer = f"model.layers.{index}"
        tensors += [*layer_norms(layer, 2880), *gqa(layer, 2880, 64, 8, 64)]
        for name, size in (("q", 4096), ("k", 512), ("v", 512), ("o", 2880)):
            tensors += plain(f"{layer}.self_attn.{name}_proj.bias", size)
        tensors += plain(f"{layer}.self_attn.sinks", 64)
        tensors += [*plain(f"{layer}.mlp.router.weight", experts, 2880), *plain(f"{layer}.mlp.router.bias", experts)]
        tensors += gpt_oss_experts(f"{layer}.mlp.experts", experts)
    return Published(config, tensors)


def gpt_oss_experts(stem: str, experts: int) -> Iterator[Tensor]:
    for name, rows in (("gate_up_proj", 5760), ("down_proj", 2880)):
        yield f"{stem}.{name}_blocks", "U8", (experts, rows, 90, 16)
        yield f"{stem}.{name}_scales", "U8", (experts, rows, 90)
        yield f"{stem}.{name}_bias", "BF16", (experts, rows)


def minimax_m2() -> Published:
    config = {
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 200064,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    tensors = list(ends(200064, 3072))
    for index in range(62):
        layer = f"model.layers.{index}"
        tensors += [*layer_norms(layer, 3072), *gqa(layer, 3072, 48, 8, 128, fp8)]
        tensors += [*plain(f"{layer}.self_attn.q_norm.weight", 6144), *plain(f"{layer}.self_attn.k_norm.weight", 1024)]
        tensors += plain(f"{layer}.block_sparse_moe.gate.weight", 256, 3072)
        tensors += plain(f"{layer}.block_sparse_moe.e_score_correction_bias", 256, dtype="F32")
        for expert in range(256):
            tensors += mlp(f"{layer}.block_sparse_moe.experts.{expert}", 3072, 1536, NUMBERED, fp8)
    return Published(config, tensors)


def qwen3_next_80b() -> Published:
    """Three gated delta-rule layers to one gated attention layer, shared expert with a gate, and an MTP module."""
    config = {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "full_attention_interval": 4,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
    tensors = list(ends(151936, 2048))
    for index in range(48):
        layer = f"model.layers.{index}"
        tensors += layer_norms(layer, 2048)
        if index % 4 == 3:
            tensors += next_attention(layer)
        else:
            tensors += plain(f"{layer}.linear_attn.in_proj_qkvz.weight", 12288, 2048)
            tensors += plain(f"{layer}.linear_attn.in_proj_ba.weight", 64, 2048)
            tensors += plain(f"{layer}.linear_attn.conv1d.weight", 8192, 1, 4)
            tensors += [*plain(f"{layer}.linear_attn.A_log", 32), *plain(f"{layer}.linear_attn.dt_bias", 32)]
            tensors += plain(f"{layer}.linear_attn.norm.weight", 128)
            tensors += plain(f"{layer}.linear_attn.out_proj.weight", 2048, 4096)
        tensors += next_mlp(layer, 512)
    tensors += [*layer_norms("mtp.layers.0", 2048), *next_attention("mtp.layers.0"), *next_mlp("mtp.layers.0", 512)]
    tensors += plain("mtp.fc.weight", 2048, 4096)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors += plain(f"mtp.{name}.weight", 2048)
    return Published(config, tensors)


def next_attention(layer: str) -> Iterator[Tensor]:
    yield from plain(f"{layer}.self_attn.q_proj.weight", 8192, 2048)
    yield from plain(f"{layer}.self_attn.k_proj.weight", 512, 2048)
    yield from plain(f"{layer}.self_attn.v_proj.weight", 512, 2048)
    yield from plain(f"{layer}.self_attn.o_proj.weight", 2048, 4096)
    yield from plain(f"{layer}.self_attn.q_norm.weight", 256)
    yield from plain(f"{layer}.self_attn.k_norm.weight", 256)


def next_mlp(layer: str, experts: int) -> Iterator[Tensor]:
    yield from plain(f"{layer}.mlp.gate.weight", experts, 2048)
    yield from plain(f"{layer}.mlp.shared_expert_gate.weight", 1, 2048)
    yield from mlp(f"{layer}.mlp.shared_expert", 2048, 512, NAMED, plain)
    for expert in range(experts):
        yield from mlp(f"{layer}.mlp.experts.{expert}", 2048, 512, NAMED, plain)


def kimi_linear_48b() -> Published:
    """20 delta-attention and 7 latent-attention layers; layer lists are numbered from 1."""
    full = [4, 8, 12, 16, 20, 24, 27]
    config = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [index for index in range(1, 28) if index not in full],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "vocab_size": 163840,
        "tie_word_embeddings": False,
    }
    tensors = list(ends(163840, 2304))
    for index in range(27):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        tensors += layer_norms(layer, 2304)
        if index + 1 in full:
            tensors += plain(f"{attention}.q_proj.weight", 6144, 2304)
            tensors += plain(f"{attention}.kv_a_proj_with_mqa.weight", 576, 2304)
            tensors += plain(f"{attention}.kv_a_layernorm.weight", 512)
            tensors += plain(f"{attention}.kv_b_proj.weight", 8192, 512)
        else:
            for name in "qkv":
                tensors += plain(f"{attention}.{name}_proj.weight", 4096, 2304)
                tensors += plain(f"{attention}.{name}_conv1d.weight", 4096, 1, 4)
            for name in "fg":
                tensors += plain(f"{attention}.{name}_a_proj.weight", 128, 2304)
                tensors += plain(f"{attention}.{name}_b_proj.weight", 4096, 128)
            tensors += plain(f"{attention}.b_proj.weight", 32, 2304)
            tensors += [*plain(f"{attention}.A_log", 1, 1, 32, 1), *plain(f"{attention}.dt_bias", 4096)]
            tensors += plain(f"{attention}.o_norm.weight", 128)
        tensors += plain(f"{attention}.o_proj.weight", 2304, 4096)
        if index == 0:
            tensors += mlp(f"{layer}.mlp", 2304, 9216, NAMED, plain)
            continue
        moe = f"{layer}.block_sparse_moe"
        tensors += plain(f"{moe}.gate.weight", 256, 2304)
        tensors += plain(f"{moe}.gate.e_score_correction_bias", 256, dtype="F32")
        tensors += mlp(f"{moe}.shared_experts", 2304, 1024, NAMED, plain)
        for expert in range(256):
            tensors += mlp(f"{moe}.experts.{expert}", 2304, 1024, NUMBERED, plain)
    return Published(config, tensors)


def mxfp4(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """compressed-tensors: two codes a byte, one scale for 32 columns."""
    yield f"{name}_packed", "U8", (rows, columns // 2)
    yield f"{name}_scale", "U8", (rows, columns // 32)


def kimi_k3() -> Published:
    """93 layers (69 KDA, 24 gated MLA), 896 latent experts in MXFP4, vision tower; no transformers class."""
    full = [*range(4, 93, 4), 93]
    text = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "hidden_act": "situ",
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [index for index in range(1, 94) if index not in full],
            "num_heads": 96,
            "head_dim": 128,
        },
        "vocab_size": 163840,
        "tie_word_embeddings": False,
    }
    config = {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {"AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration"},
        "text_config": text,
        "vision_config": {"hidden_size": 1024, "num_hidden_layers": 27},
        "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        "tie_word_embeddings": False,
    }
    tensors = [(f"language_model.{name}", dtype, shape) for name, dtype, shape in k3_language(full)]
    return Published(config, [*tensors, *k3_vision()])


def k3_language(full: list[int]) -> Iterator[Tensor]:
    hidden, heads = 7168, 12288
    yield from ends(163840, hidden)
    yield from plain("model.output_attn_res_norm.weight", hidden)
    yield from plain("model.output_attn_res_proj.weight", 1, hidden)
    for index in range(93):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        yield from layer_norms(layer, hidden)
        for name in ("self_attention", "mlp"):
            yield from plain(f"{layer}.{name}_res_norm.weight", hidden)
            yield from plain(f"{layer}.{name}_res_proj.weight", 1, hidden)
        yield from plain(f"{attention}.g_proj.weight", heads, hidden)
        yield from plain(f"{attention}.o_proj.weight", hidden, heads)
        if index + 1 in full:
            yield from plain(f"{attention}.q_a_proj.weight", 1536, hidden)
            yield from plain(f"{attention}.q_a_layernorm.weight", 1536)
            yield from plain(f"{attention}.q_b_proj.weight", 18432, 1536)
            yield from plain(f"{attention}.kv_a_proj_with_mqa.weight", 576, hidden)
            yield from plain(f"{attention}.kv_a_layernorm.weight", 512)
            yield from plain(f"{attention}.kv_b_proj.weight", 24576, 512)
        else:
            for name in "qkv":
                yield from plain(f"{attention}.{name}_proj.weight", heads, hidden)
                yield from plain(f"{attention}.{name}_conv1d.weight", heads, 1, 4, dtype="F32")
            yield from plain(f"{attention}.f_a_proj.weight", 128, hidden)
            yield from plain(f"{attention}.f_b_proj.weight", heads, 128)
            yield from plain(f"{attention}.b_proj.weight", 96, hidden)
            yield from plain(f"{attention}.A_log", 128, dtype="F32")
            yield from plain(f"{attention}.dt_bias", heads, dtype="F32")
            yield from plain(f"{attention}.o_norm.weight", 128, dtype="F32")
        if index == 0:
            yield from mlp(f"{layer}.mlp", hidden, 33792, NAMED, plain)
            continue
        moe = f"{layer}.block_sparse_moe"
        yield from plain(f"{moe}.gate.weight", 896, hidden)
        yield from plain(f"{moe}.gate.e_score_correction_bias", 896, dtype="F32")
        yield from plain(f"{moe}.routed_expert_down_proj.weight", 3584, hidden)
        yield from plain(f"{moe}.routed_expert_norm.weight", 3584)
        yield from plain(f"{moe}.routed_expert_up_proj.weight", hidden, 3584)
        yield from mlp(f"{moe}.shared_experts", hidden, 6144, NAMED, plain)
        for expert in range(896):
            yield from mlp(f"{moe}.experts.{expert}", 3584, 3072, NUMBERED, mxfp4)


def k3_vision() -> Iterator[Tensor]:
    for block in range(27):
        stem = f"vision_tower.encoder.blocks.{block}"
        yield from plain(f"{stem}.wqkv.weight", 4608, 1024)
        yield from plain(f"{stem}.wo.weight", 1024, 1536)
        yield from plain(f"{stem}.mlp.fc0.weight", 4096, 1024)
        yield from plain(f"{stem}.mlp.fc1.weight", 1024, 4096)
        yield from plain(f"{stem}.norm0.weight", 1024)
        yield from plain(f"{stem}.norm1.weight", 1024)
    yield from plain("vision_tower.patch_embed.proj.weight", 1024, 3, 14, 14)
    yield from plain("vision_tower.patch_embed.pos_emb.weight", 64, 64, 1024)
    yield from plain("vision_tower.encoder.final_layernorm.weight", 1024)
    yield from plain("mm_projector.proj.0.weight", 4096, 4096)
    yield from plain("mm_projector.proj.2.weight", 7168, 4096)
    yield from plain("mm_projector.post_norm.weight", 7168)
