"""Shapes of the training-step cases: published sizes, random weights, LoRA r = 16."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shardwright.schemas.strategy import Mesh, ParallelStrategy

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
RANK, ALPHA = 16, 32

QWEN3_30B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR_48B: dict[str, Any] = {
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "vocab_size": 163840,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "full_attn_layers": _FULL,
        "kda_layers": [layer for layer in range(1, 28) if layer not in _FULL],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
TINY: dict[str, Any] = {
    **QWEN3_30B,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Case:
    """One training step of one model.

    Attributes:
        whole: layers at the end that our side does not recompute, as a plan with ``checkpointing`` ``layers`` has them:
            as many as, counted, leave its memory under half of the rival's, or do not raise its peak, which is where
            the first layers meet all gradients. The last ones are freed first in backward.
    """

    name: str
    config_class: str
    config: dict[str, Any]
    batch: int
    experts: bool
    whole: int = 0
    sequence: int = 4096
    dtype: str = "bfloat16"

    @property
    def targets(self) -> tuple[str, ...]:
        return (*ATTENTION, *EXPERTS) if self.experts else ATTENTION

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def hf_config(self) -> Any:
        """A fresh configuration object of transformers."""
        import transformers

        return getattr(transformers, self.config_class)(**self.config)

    def with_layers(self, layers: int) -> Case:
        """The same model cut to its first layers, under a name that says so."""
        config = {**self.config, "num_hidden_layers": layers}
        linear = config.get("linear_attn_config")
        if linear is not None:
            kept = {key: [n for n in linear[key] if n <= layers] for key in ("full_attn_layers", "kda_layers")}
            config["linear_attn_config"] = {**linear, **kept}
        return replace(self, name=f"{self.name}-{layers}layers", config=config, whole=0)

    def strategy(self) -> ParallelStrategy:
        """Ours, on one device."""
        recomputed = tuple(range(self.config["num_hidden_layers"] - self.whole))
        how: dict[str, Any] = {"checkpointing": "layers", "checkpointed_layers": recomputed}
        if not self.whole or not recomputed:
            how = {"checkpointing": "none" if self.whole else "full"}
        return ParallelStrategy(mesh=Mesh(), micro_batch_sequences=self.batch, **how)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("train-step/qwen3-30b-experts", "Qwen3MoeConfig", QWEN3_30B, 4, True, whole=6),
        Case("train-step/qwen3-30b-attention", "Qwen3MoeConfig", QWEN3_30B, 4, False, whole=8),
        Case("train-step/kimi-linear-48b-experts", "KimiLinearConfig", KIMI_LINEAR_48B, 2, True, whole=2),
        Case("train-step/kimi-linear-48b-attention", "KimiLinearConfig", KIMI_LINEAR_48B, 2, False, whole=5),
    )
}
SELF_TEST = Case("train-step/self-test", "Qwen3MoeConfig", TINY, 2, True, sequence=64, dtype="float32")
