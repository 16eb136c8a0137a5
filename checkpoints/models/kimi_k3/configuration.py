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
SPARSE_SIZES = ("index_n_heads", "index_head_dim", "index_topk")
"""Sizes of the sparse form of full attention; a file gives all of them or none."""
VISION: dict[str, Any] = {
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "vt_num_hidden_layers": 27,
    "vt_num_attention_heads": 12,
    "qkv_hidden_size": 1536,
    "merge_kernel_size": (2, 2),
    "mm_hidden_size": None,
    "text_hidden_size": None,
    "projector_ln_eps": 1e-5,
    "vision_norm_eps": 2**-7,
}
"""The published sizes. The tower's norms take bf16's machine epsilon; the projector ends at the language model's
width."""
VISION_FORM = {
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "merge_type": "sd2_tpool",
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "mm_projector_type": "patchmergerv2",
    "activation_func": "gelu_pytorch_tanh",
    "projector_hidden_act": "gelu",
    "video_attn_type": "spatial_temporal",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
}
"""The one form of the tower that is written here; a file that asks for another is refused."""


class KimiK3TextConfig(PreTrainedConfig):
    """Sizes of the language model. ``layer_types`` and ``mlp_layer_types`` follow from the 1-indexed layer lists.

    With ``index_topk`` full attention is sparse in the layers that ``linear_attn_config.sparse_attn_layers`` lists (of
    ``full_attn_layers``; all of these where there is no list).
    """

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
        self.sparse_layers = _sparse_layers(fields, linear, full)
        for name in SPARSE_SIZES:
            setattr(self, name, fields.get(name) or 0)
        dense = own["first_k_dense_replace"]
        self.mlp_layer_types = ["dense" if i < dense else "sparse" for i in layers]
        self.linear_num_heads = linear["num_heads"]
        self.linear_head_dim = linear["head_dim"]
        self.linear_conv_kernel_dim = linear.get("short_conv_kernel_size", 4)
        self.gate_lower_bound = linear.get("gate_lower_bound", -5.0)
        self.a_log_size = linear.get("a_log_size", -(-self.linear_num_heads // 128) * 128)
        if self.a_log_size < self.linear_num_heads:
            raise _contradiction(f"a_log_size {self.a_log_size} does not hold {self.linear_num_heads} heads")


def _sparse_layers(fields: dict[str, Any], linear: dict[str, Any], full: set[int]) -> list[int]:
    """Layers, counted from 0, whose full attention looks at the best ``index_topk`` tokens."""
    given = [name for name in SPARSE_SIZES if fields.get(name)]
    listed = linear.get("sparse_attn_layers")
    if not given and not listed:
        return []
    if len(given) != len(SPARSE_SIZES):
        raise _contradiction(f"sparse attention needs {', '.join(SPARSE_SIZES)}; found {', '.join(given) or 'none'}")
    sparse = full if listed is None else {index - 1 for index in listed}
    if not sparse <= full:
        raise _contradiction("sparse_attn_layers names layers that full_attn_layers does not; they are counted from 1")
    return sorted(sparse)


class KimiK3VisionConfig(PreTrainedConfig):
    """Sizes of the vision tower and the projector."""

    model_type = "kimi_k3_vision"

    def __init__(self, **fields: Any) -> None:
        for name, wanted in VISION_FORM.items():
            if fields.get(name, wanted) != wanted:
                raise _contradiction(f"vision_config has {name} {fields[name]!r}; {wanted!r} is what is known here")
        own = {**VISION, **{name: value for name, value in fields.items() if name in VISION}}
        super().__init__(**{name: value for name, value in fields.items() if name not in own})
        for name, value in own.items():
            setattr(self, name, value)
        if self.qkv_hidden_size % (4 * self.vt_num_attention_heads):
            raise _contradiction(
                f"qkv_hidden_size {self.qkv_hidden_size} in {self.vt_num_attention_heads} heads: a head's width must "
                "be a multiple of 4"
            )


class KimiK3Config(PreTrainedConfig):
    """The whole document: the language model's sizes lie in ``text_config``, the tower's in ``vision_config``."""

    model_type = "kimi_k3"
    sub_configs = {"text_config": KimiK3TextConfig, "vision_config": KimiK3VisionConfig}

    def __init__(
        self,
        text_config: Any = None,
        vision_config: Any = None,
        media_placeholder_token_id: int = 163_605,
        **fields: Any,
    ) -> None:
        if isinstance(text_config, dict):
            names = ("model_type", "architectures")
            text_config = KimiK3TextConfig(**{k: v for k, v in text_config.items() if k not in names})
        if isinstance(vision_config, dict):
            vision_config = KimiK3VisionConfig(**{k: v for k, v in vision_config.items() if k != "model_type"})
        self.text_config = KimiK3TextConfig() if text_config is None else text_config
        self.vision_config = vision_config
        """``None``: a language model without a tower."""
        if vision_config is not None and vision_config.text_hidden_size is None:
            vision_config.text_hidden_size = self.text_config.hidden_size
        self.media_placeholder_token_id = media_placeholder_token_id
        super().__init__(**fields)


def _contradiction(what: str) -> CheckpointError:
    return CheckpointError(
        "config-contradiction", what, where="config.json", next_action="fetch config.json of this checkpoint again"
    )
