"""Kimi K3, GLM-5 and DeepSeek-V3.2 at full width with as many layers of each kind as are asked for: configuration and
header-only files in the published layouts.

The data section of a file is a hole, so that a profile, a name map and a packed base are those of the published files.
Legend: H hidden, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoints.build import build_from_config, state_shapes
from shardwright.checkpoints.config import config_of

BITS = {"F32": 32, "BF16": 16, "F8_E4M3": 8, "U8": 8}
WIDE = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
"""Endings of what the files keep in fp32."""


@dataclass(frozen=True)
class Slice:
    """Some layers of a model.

    Attributes:
        model: ``kimi_k3``, ``glm_moe_dsa`` or ``deepseek_v32``.
        layers: a kind a layer: ``kda``, ``mla`` or ``dsa``, and ``+dense`` where the feed-forward has no experts.
        sizes: fields of the language model that differ from the published ones.
    """

    model: str
    layers: tuple[str, ...]
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        """Whether the published files keep experts as MXFP4."""
        return self.model == "kimi_k3"

    @property
    def document(self) -> dict[str, Any]:
        """config.json."""
        return kimi_k3(self) if self.model == "kimi_k3" else latent(self)


def kimi_k3(cut: Slice) -> dict[str, Any]:
    attention = [layer.removesuffix("+dense") for layer in cut.layers]
    numbers = {kind: [i + 1 for i, one in enumerate(attention) if one == kind] for kind in ("kda", "mla", "dsa")}
    text: dict[str, Any] = {
        "model_type": "kimi_linear",
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "num_hidden_layers": len(cut.layers),
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
        "first_k_dense_replace": sum(layer.endswith("+dense") for layer in cut.layers),
        "hidden_act": "situ",
        "attn_res_block_size": 12,
        "max_position_embeddings": 1_048_576,
        "vocab_size": 163840,
        "tie_word_embeddings": False,
        **({"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048} if numbers["dsa"] else {}),
        **{name: value for name, value in cut.sizes.items() if name != "linear"},
    }
    text["linear_attn_config"] = {
        "full_attn_layers": sorted(numbers["mla"] + numbers["dsa"]),
        "kda_layers": numbers["kda"],
        **({"sparse_attn_layers": numbers["dsa"]} if numbers["dsa"] else {}),
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        **cut.sizes.get("linear", {}),
    }
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": text,
        "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    }


LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280, "index_n_heads": 64, "n_group": 8,
        "topk_group": 4,
    },
    "glm_moe_dsa": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "hidden_size": 6144, "intermediate_size": 12288, "num_attention_heads": 64, "q_lora_rank": 2048,
        "qk_nope_head_dim": 192, "v_head_dim": 256, "vocab_size": 154880, "index_n_heads": 32, "n_group": 1,
        "topk_group": 1,
    },
}  # fmt: skip
"""What differs between the two published models of the sparse family."""


def latent(cut: Slice) -> dict[str, Any]:
    sizes = {
        **LATENT[cut.model],
        "model_type": cut.model,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": len(cut.layers),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": sum(layer.endswith("+dense") for layer in cut.layers),
        "mlp_layer_types": ["dense" if layer.endswith("+dense") else "sparse" for layer in cut.layers],
        "index_head_dim": 128,
        "index_topk": 2048,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
        **cut.sizes,
    }
    return {**sizes, "num_key_value_heads": sizes["num_attention_heads"]}


def write_headers(folder: Path, cut: Slice) -> Path:
    """config.json and one header-only file whose names, dtypes and shapes are the published ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(cut.document))
    header, place = {}, 0
    for name, dtype, shape in tensors(cut, folder):
        end = place + prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    data = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as stream:
        stream.write(len(data).to_bytes(8, "little") + data)
        stream.truncate(8 + len(data) + place)
    return folder


def tensors(cut: Slice, folder: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """File tensors from the model's own shapes; stacks of experts one by one."""
    shapes = state_shapes(build_from_config(config_of(cut.document, folder), torch.bfloat16))
    numbered = ("w1", "w3", "w2") if cut.packed else ("gate_proj", "up_proj", "down_proj")
    for name, shape in shapes.items():
        if ".experts." not in name:
            yield name, "F32" if name.endswith(WIDE) else "BF16", shape
            continue
        stem, stack = name.rsplit(".", 1)
        E, rows, columns = shape
        parts = numbered[:2] if stack == "gate_up_proj" else numbered[2:]
        for expert in range(E):
            for part in parts:
                one, out = f"{stem}.{expert}.{part}.weight", rows // len(parts)
                if cut.packed:
                    yield f"{one}_packed", "U8", (out, columns // 2)
                    yield f"{one}_scale", "U8", (out, columns // 32)
                else:
                    yield one, "BF16", (out, columns)
