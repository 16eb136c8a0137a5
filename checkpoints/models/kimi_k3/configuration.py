"""Kimi K3's configuration under the names that its config.json uses."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from shardwright.schemas.errors import CheckpointError

NEEDED = {
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_token",
    "routed_expert_hidden_size",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "linear_attn_config",
}
DEFAULTS: dict[str, Any] = {
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "latent_norm_eps": 1e-6,
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "latent_moe_use_norm": True,
    "attn_res_block_size": 12,
    "initializer_range": 0.02,
    "max_position_embeddings": 1_048_576,
    "tie_word_embeddings": False,
}
"""What a file may leave out. The q_a and kv_a norms have an ε of their own."""


class KimiK3TextConfig(PreTrainedConfig):
    """Sizes of the language model. ``layer_types`` and ``mlp_layer_types`` follow from the 1-indexed layer lists."""

    model_type = "kimi_k3_text"
    attribute_map = {"num_experts_per_tok": "num_experts_per_token", "num_local_experts": "num_experts"}

    def __init__(self, **fields: Any) -> None:
        if missing := sorted(NEEDED - set(fields)):
            if fields.keys() - {"transformers_version", "architectures", "dtype"}:
                raise _contradiction(f"text_config lacks {', '.join(missing)}")
            super().__init__(**fields)
            return
        own = {**DEFAULTS, **{name: value for name, value in fields.items() if name in NEEDED | set(DEFAULTS)}}
        super().__init__(**{name: value for name, value in fields.items() if name not in own})
        for name, value in own.items():
            setattr(self, name, value)
        linear = own["linear_attn_config"]
        full = {index - 1 for index in linear["full_attn_layers"]}
        layers = range(own["num_hidden_layers"])
        listed = full | {index - 1 for index in linear.get("kda_layers", ())}
        if "kda_layers" in linear and listed != set(layers):
            raise _contradiction(f"the layer lists name {len(listed)} of {len(layers)} layers; they are counted from 1")
        self.layer_types = ["full_attention" if i in full else "linear_attention" for i in layers]
        dense = own["first_k_dense_replace"]
        self.mlp_layer_types = ["dense" if i < dense else "sparse" for i in layers]
        self.linear_num_heads = linear["num_heads"]
        self.linear_head_dim = linear["head_dim"]
        self.linear_conv_kernel_dim = linear.get("short_conv_kernel_size", 4)
        self.gate_lower_bound = linear.get("gate_lower_bound", -5.0)
        self.a_log_size = linear.get("a_log_size", -(-self.linear_num_heads // 128) * 128)


class KimiK3Config(PreTrainedConfig):
    """The whole document: the language model's sizes lie in ``text_config``."""

    model_type = "kimi_k3"
    sub_configs = {"text_config": KimiK3TextConfig}

    def __init__(self, text_config: Any = None, **fields: Any) -> None:
        if isinstance(text_config, dict):
            names = ("model_type", "architectures")
            text_config = KimiK3TextConfig(**{k: v for k, v in text_config.items() if k not in names})
        self.text_config = KimiK3TextConfig() if text_config is None else text_config
        super().__init__(**fields)


def _contradiction(what: str) -> CheckpointError:
    return CheckpointError(
        "config-contradiction", what, where="config.json", next_action="fetch config.json of this checkpoint again"
    )
