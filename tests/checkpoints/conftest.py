"""Published layouts (header-only) and tiny real checkpoints, shared by the tests of this room."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

TINY: dict[str, dict[str, Any]] = {
    "mixtral": {
        "head_dim": 8,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
    "t-lora": {
        "vocab_size": 64,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "t-qw": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "t-dsv3": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "granitemoe": {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
    "gpt_oss": {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "kimi_linear": {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "deepseek_v4": {
        "vocab_size": 96,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 16,
        "q_lora_rank": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "o_groups": 4,
        "o_lora_rank": 16,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 4,
        "sliding_window": 8,
    },
}
CLASSES = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "t-lora": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "t-qw": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "t-dsv3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4ForCausalLM"),
}
"""Case name → transformers' classes."""


@pytest.fixture(scope="session")
def published() -> ModuleType:
    """The module beside this file (a test folder is not a package)."""
    path = Path(__file__).with_name("published.py")
    spec = importlib.util.spec_from_file_location("shardwright_tests_published", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


Save = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """``save_tiny("t-lora", tie_word_embeddings=True)`` → (folder as transformers writes it, the model)."""
    transformers.utils.logging.disable_progress_bar()

    def save(case: str, *, max_shard_size: str = "40KB", **changes: Any) -> tuple[Path, Any]:
        config_class, model_class = (getattr(transformers, name) for name in CLASSES[case])
        torch.manual_seed(0)
        model = model_class(config_class(**{"tie_word_embeddings": False, **TINY[case], **changes}))
        folder = tmp_path_factory.mktemp(case)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder, model

    return save


@pytest.fixture(scope="session")
def mixtral(save_tiny: Save) -> tuple[Path, Any]:
    return save_tiny("mixtral")


@pytest.fixture(scope="session")
def t_lora(save_tiny: Save) -> tuple[Path, Any]:
    return save_tiny("t-lora")
