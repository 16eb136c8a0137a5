"""The language model: layers over a state of snapshots and a running sum, and the head.

A layer takes and returns ``state [B, T, R, H]``: R − 1 snapshots and, last, the running sum. So a layer is a function
of one tensor, as FSDP units, checkpointing and capture want it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from shardwright.checkpoints.models.kimi_k3.attention import DeltaAttention, GatedLatentAttention
from shardwright.checkpoints.models.kimi_k3.configuration import KimiK3Config, KimiK3TextConfig
from shardwright.checkpoints.models.kimi_k3.feed_forward import FeedForward, LatentMoE
from shardwright.checkpoints.models.kimi_k3.names import register
from shardwright.checkpoints.models.kimi_k3.norms import RMSNorm
from shardwright.checkpoints.models.kimi_k3.residuals import add, append, mix

register(KimiK3TextConfig.model_type)


class KimiK3DecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, each reading its own mix of the state."""

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.full = config.layer_types[layer_idx] == "full_attention"
        self.self_attn = GatedLatentAttention(config) if self.full else DeltaAttention(config)
        sparse = config.mlp_layer_types[layer_idx] == "sparse"
        self.feed_forward_name = "block_sparse_moe" if sparse else "mlp"
        self.add_module(
            self.feed_forward_name, LatentMoE(config) if sparse else FeedForward(config, config.intermediate_size)
        )
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attention_res_norm, self.mlp_res_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attention_res_proj = nn.Linear(hidden, 1, bias=False)
        self.mlp_res_proj = nn.Linear(hidden, 1, bias=False)
        self.snapshot = layer_idx % config.attn_res_block_size == 0

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """``[B, T, R, H]`` → ``[B, T, R, H]``, or R + 1 where the layer takes a snapshot."""
        state = hidden_states
        read = mix(
            state,
            self.self_attention_res_norm.weight,
            self.self_attention_res_proj.weight,
            self.self_attention_res_norm.eps,
        )
        normed = self.input_layernorm(read)
        value = self.self_attn(normed, attention_mask) if self.full else self.self_attn(normed)
        state = append(state, value) if self.snapshot else add(state, value)
        read = mix(state, self.mlp_res_norm.weight, self.mlp_res_proj.weight, self.mlp_res_norm.eps)
        feed_forward = getattr(self, self.feed_forward_name)
        return add(state, feed_forward(self.post_attention_layernorm(read)))


class KimiK3PreTrainedModel(PreTrainedModel):
    """What both classes share."""

    config_class = KimiK3TextConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KimiK3DecoderLayer"]
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["e_score_correction_bias", "dt_bias", "A_log", "o_norm", "conv1d"]


class KimiK3Model(KimiK3PreTrainedModel):
    """Embedding, layers, final mix and norm."""

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList(KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.output_attn_res_norm = RMSNorm(hidden, eps)
        self.output_attn_res_proj = nn.Linear(hidden, 1, bias=False)
        self.norm = RMSNorm(hidden, eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Ids ``[B, T]`` or embeddings ``[B, T, H]`` → ``[B, T, H]``."""
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        state = embedded.unsqueeze(-2)
        for layer in self.layers:
            state = layer(state, attention_mask)
        last = self.output_attn_res_norm
        return self.norm(mix(state, last.weight, self.output_attn_res_proj.weight, last.eps))


class KimiK3ForCausalLM(KimiK3PreTrainedModel, GenerationMixin):
    """The language model with its head."""

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__(config)
        self.model = KimiK3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, T, vocabulary]``, and the mean loss of the next token where ``labels [B, T]`` are given."""
        hidden = self.model(input_ids, attention_mask, inputs_embeds)
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class KimiK3ForConditionalGeneration(KimiK3PreTrainedModel, GenerationMixin):
    """The language model under the name that the published files give it. Images are not read: text alone trains."""

    config_class = KimiK3Config

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__(config)
        self.language_model = KimiK3ForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.lm_head

    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        """As ``KimiK3ForCausalLM``."""
        return self.language_model(*args, **kwargs)
