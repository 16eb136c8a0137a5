"""The mixture-of-experts families that the installed transformers ships, and a tiny configuration of each.

Families are found in the library's sources: a model directory whose modelling code defines an experts class, or wraps a
model that does. Sizes are then shrunk by field name, the same way for every family; :data:`CHANGES` holds what a
family's own constraints need on top.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_EXPERTS_CLASS = re.compile(r"^class \w*(?:Experts|CDMoE)\w*\(", re.MULTILINE)
LAYERS = 6
"""Enough for one layer of every kind: the longest period of any family's default schedule is 5 + 1."""

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "intermediate_size": 96,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "ffn_hidden_size": 96,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "d_ff": 96,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "share_expert_dim": 32,
    "moe_latent_size": 32,
    "num_hidden_layers": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "swa_head_dim": 16,
    "v_head_dim": 16,
    "swa_v_head_dim": 16,
    "d_kv": 16,
    "kv_channels": 16,
    "attention_head_dim": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 4,
    "vocab_size": 264,
    "vocab_size_per_layer_input": 264,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_top_k": 2,
    "top_k_experts": 2,
    "zero_expert_num": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_head_dim": 32,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_n_groups": 2,
    "n_groups": 2,
    "mamba_dt_rank": 4,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "max_position_embeddings": 256,
    "image_size": 56,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "output_dim": 64,
    "encoder_ffn_hidden_size": 96,
    "projector_hidden_size": 64,
    "num_mel_bins": 16,
    "code_predictor_vocab_size": 264,
    "n_positions": 256,
    "max_seq_len": 256,
    "router_hidden_size": 16,
    "hidden_size_per_layer_input": 16,
    "depth": 2,
    "out_hidden_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "decoder_start_token_id": 1,
}
_TOKEN_ID = re.compile(r"(_token_id|_token_index|_token_ids)$|^(image|video|audio)_token$")

CHANGES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "ffn_config.moe_num_experts": 8,
        "ffn_config.moe_top_k": 2,
        "attn_config.rope_theta": 10000.0,
        "attn_config.clip_qkv": 8.0,
    },
    "deepseek_ocr2": {
        "text_config.num_experts_per_tok": 2,
        "text_config.mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
    },
    "diffusion_gemma": {"text_config.num_experts": 8},
    "doge": {"is_moe": True, "num_experts": 16},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {
        "text_config.head_dim": 16,
        "text_config.per_layer_config": {},
        "vision_config.adapter_in_dim": 64,
        "vision_config.adapter_out_dim": 64,
        "audio_config.adapter_input_size": 64,
        "audio_config.adapter_out_dim": 64,
    },
    "ernie4_5_vl_moe": {"text_config.rope_parameters.mrope_section": [3, 3, 2]},
    "gemma4": {"text_config.enable_moe_block": True},
    "glm5_next": {"text_config.index_topk": 16},
    "glm4v_moe": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "hy_v4_vl": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "inkling2": {"text_config.unpadded_vocab_size": 264},
    "inkling2_loop": {"text_config.unpadded_vocab_size": 264},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * (LAYERS // 3)},
    "nemotron3_5_transcribe": {"audio_config.diarization_config.head_config.audio_hidden_size": 64},
    "step3p7": {"text_config.sliding_window": 8},
    "qwen3_omni_moe": {
        "talker_config.text_config.shared_expert_intermediate_size": 32,
        "talker_config.spatial_merge_size": 2,
    },
    "qwen4_exp": {
        "text_config.indexer_n_heads": 4,
        "text_config.indexer_kv_heads": 1,
        "text_config.indexer_head_dim": 16,
        "text_config.indexer_budget": 8,
        "text_config.indexer_compress_ratio": 2,
    },
}
"""Family → fields (``text_config.x`` for nested ones) that its own constraints need."""


def sources() -> Path:
    import transformers

    return Path(transformers.__file__).parent / "models"


def moe_families() -> tuple[str, ...]:
    """Model directories with modelling code of experts, or with modelling code around such a model, sorted."""
    files = sorted(sources().glob("*/modeling_*.py"))
    found = {file.parent.name for file in files if _EXPERTS_CLASS.search(file.read_text("utf-8"))}
    return tuple(sorted(found | _wrappers(found, {file.parent.name for file in files})))


def _wrappers(found: set[str], with_code: set[str]) -> set[str]:
    """Families without experts of their own whose language model is, by default, of a family that has them."""
    from transformers.models.auto.configuration_auto import (
        CONFIG_MAPPING,
        CONFIG_MAPPING_NAMES,
        model_type_to_module_name,
    )

    wrappers = set()
    for model_type in CONFIG_MAPPING_NAMES:
        name = model_type_to_module_name(model_type)
        if name in found or name not in with_code or "text_config" not in _configuration_source(name):
            continue
        nested = getattr(CONFIG_MAPPING[model_type], "sub_configs", {})
        if "text_config" not in nested:
            continue
        text = getattr(_default(model_type), "text_config", None)
        if text is not None and model_type_to_module_name(text.model_type) in found:
            wrappers.add(name)
    return wrappers


def _configuration_source(name: str) -> str:
    return "".join(file.read_text("utf-8") for file in sources().glob(f"{name}/configuration_*.py"))


def _default(model_type: str) -> Any:
    """A family's configuration object at the class's defaults; ``None`` where the class has none."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type]()
    except (ValueError, TypeError, AttributeError, StrictDataclassError):
        return None


def main_type(family: str) -> str:
    """The ``model_type`` that stands for a model directory: its own name, else the one with a language model."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    types = [t for t in CONFIG_MAPPING_NAMES if model_type_to_module_name(t) == family]
    tables = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    )
    usable = [t for t in types if any(t in table for table in tables)] or types
    return next((t for t in usable if t.replace("-", "_") == family), usable[0])


def tiny_config(family: str) -> Any:
    """A configuration object of a family with small sizes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[main_type(family)]
    start = _default(main_type(family)) or config_class(**_with({}, CHANGES.get(family, {})))
    fields = _with(_shrunk(start.to_dict()), CHANGES.get(family, {}))
    return config_class(**fields)


def _with(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Fields with changes by dotted path."""
    for path, value in changes.items():
        place = fields
        *outer, name = path.split(".")
        for step in outer:
            place = place.setdefault(step, {})
        place[name] = value
    return fields


_DROPPED = frozenset({"transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "model_type"})
_WANTED = frozenset(
    {"num_experts", "n_routed_experts", "num_experts_per_tok", "top_k_experts", "moe_intermediate_size"}
)
"""Fields that the class leaves open, although without them there are no experts."""
_NOT_MODELS = frozenset({"quantization_config", "per_layer_config", "linear_attn_config"})
_WIDTH_OF_TEXT = frozenset({"text_hidden_size"})


def _shrunk(fields: dict[str, Any], *, outer: bool = True) -> dict[str, Any]:
    """Sizes by name, per-layer lists cut to :data:`LAYERS`, special tokens inside the vocabulary."""
    depth = next((fields[n] for n in ("num_hidden_layers", "n_layers", "num_layers") if fields.get(n)), 0)
    small = {
        name: _shrunk_value(name, value, depth, len(name) + position)
        for position, (name, value) in enumerate(fields.items())
        if not (outer and name in _DROPPED)
    }
    for prefix in ("", "swa_"):
        heads, keys = f"{prefix}num_attention_heads", f"{prefix}num_key_value_heads"
        if fields.get(heads) and fields.get(heads) == fields.get(keys):
            small[keys] = small[heads]
    small.pop("qk_head_dim", None)
    _shrink_sections(small)
    rope, nope = fields.get("qk_rope_head_dim"), fields.get("qk_nope_head_dim")
    if rope and fields.get("head_dim") == rope:
        small["head_dim"] = small["qk_rope_head_dim"]
    elif rope and nope and fields.get("head_dim") == rope + nope:
        small["head_dim"] = small["qk_rope_head_dim"] + small["qk_nope_head_dim"]
    return small


def _shrunk_value(name: str, value: Any, depth: int, position: int) -> Any:
    integer = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, dict) and name.endswith("_config") and name not in _NOT_MODELS:
        return _shrunk(value, outer=False)
    if isinstance(value, dict) and name == "per_layer_config":
        return {key: item for key, item in value.items() if int(key) < LAYERS}
    if name == "linear_attn_config" and isinstance(value, dict):
        return {key: _shrunk_linear(key, item) for key, item in value.items()}
    if name in _WIDTH_OF_TEXT:
        return _SMALL["hidden_size"]
    if name in _SMALL and (integer or (value is None and name in _WANTED)):
        return _SMALL[name] if value is None or name.endswith("token_id") else min(_SMALL[name], value)
    if integer and _TOKEN_ID.search(name):
        return 2 + position % 60
    if isinstance(value, list) and depth and len(value) == depth:
        return value[:LAYERS]
    return value


def _shrunk_linear(name: str, value: Any) -> Any:
    """A recurrent attention's own group of sizes: heads, widths, and lists of layer numbers that begin with 1."""
    if isinstance(value, list):
        return [number for number in value if number <= LAYERS]
    return {"num_heads": 4, "head_dim": 16}.get(name, value)


def _shrink_sections(small: dict[str, Any]) -> None:
    """Sections of a multi-axis rotary embedding: in the same proportions, half of the rotated width in all."""
    rope = small.get("rope_parameters")
    width = small.get("head_dim") or small.get("hidden_size", 0) // (small.get("num_attention_heads") or 1)
    if not isinstance(rope, dict) or "mrope_section" not in rope or not width:
        return
    half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    sections = rope["mrope_section"]
    parts = [half * section // sum(sections) for section in sections]
    parts[0] += half - sum(parts)
    small["rope_parameters"] = {**rope, "mrope_section": parts}
