"""Tiny models of three families, and a recipe, for structure tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.agents.structure.canonical import canonical_graphs
from shardwright.agents.structure.capture import capture_model
from shardwright.schemas.profile import LayerKind
from shardwright.schemas.recipe import DataSpec, LoraSpec, PrecisionSpec, Recipe

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 264,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 8, "decoder_sparse_step": 1},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}


def tiny_config(family: str, **changes: Any) -> Any:
    sizes = {**SIZES, **FAMILIES[family], **changes}
    if family == "deepseek_v3":
        del sizes["head_dim"]
    return AutoConfig.for_model(family, **sizes)


def tiny_on_meta(family: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.bfloat16)


def one_kind(layers: int) -> tuple[LayerKind, ...]:
    indices = tuple(range(layers))
    return (LayerKind(name="layer", attention="full", mlp="moe", layer_indices=indices, parameters=1),)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """``tiny("mixtral", hidden_act="gelu")`` → a model on meta."""
    return tiny_on_meta


@pytest.fixture(scope="session")
def captured() -> Callable[[Any], Any]:
    """Model on meta → its captured graphs with their canonical forms."""

    def capture(model: Any) -> Any:
        count = model.config.num_hidden_layers
        return canonical_graphs(capture_model(model, one_kind(count), count))

    return capture


@pytest.fixture(scope="session")
def mixtral_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral checkpoint on disk."""
    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config("mixtral"), dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    return Recipe(
        data=DataSpec(train="train.jsonl", held_out="held_out.jsonl"),
        lora=LoraSpec(targets=("attention", "experts"), rank=4),
        precision=PrecisionSpec(base="bfloat16"),
    )
