"""The whole model: layers over snapshots and a running sum, the head, and images before them.

A layer takes the running sum ``[B, T, H]`` and the snapshots so far, and returns the running sum. Snapshots go in one
by one, by position, so that whatever recomputes a layer keeps references to them and not one more copy of each.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from shardwright.checkpoints.models.kimi_k3.attention import (
    DeltaAttention,
    GatedLatentAttention,
    GatedSparseAttention,
    apart,
)
from shardwright.checkpoints.models.kimi_k3.configuration import KimiK3Config, KimiK3TextConfig
from shardwright.checkpoints.models.kimi_k3.feed_forward import FeedForward, LatentMoE
from shardwright.checkpoints.models.kimi_k3.names import register
from shardwright.checkpoints.models.kimi_k3.norms import RMSNorm
from shardwright.checkpoints.models.kimi_k3.residuals import ResidualMix
from shardwright.checkpoints.models.kimi_k3.vision import Projector, VisionTower
from shardwright.schemas.errors import RecipeError

register(KimiK3TextConfig.model_type)


class KimiK3DecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, each reading its own mix of the rows."""

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.full = config.layer_types[layer_idx] == "full_attention"
        full = GatedSparseAttention if layer_idx in config.sparse_layers else GatedLatentAttention
        self.self_attn = full(config) if self.full else DeltaAttention(config)
        sparse = config.mlp_layer_types[layer_idx] == "sparse"
        self.feed_forward_name = "block_sparse_moe" if sparse else "mlp"
        self.add_module(
            self.feed_forward_name, LatentMoE(config) if sparse else FeedForward(config, config.intermediate_size)
        )
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attention_res_norm, self.mlp_res_norm = ResidualMix(hidden, eps), ResidualMix(hidden, eps)
        self.self_attention_res_proj = nn.Linear(hidden, 1, bias=False)
        self.mlp_res_proj = nn.Linear(hidden, 1, bias=False)
        self.snapshot = layer_idx % config.attn_res_block_size == 0

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *snapshots: Tensor, **kwargs: Any
    ) -> Tensor:
        """``[B, T, H]`` → ``[B, T, H]``; a layer with ``snapshot`` begins a new sum, and what it was given is one more.

        Args:
            snapshots: each ``[B, T, H]``, the oldest first.
        """
        mixed = self.self_attention_res_norm((*snapshots, hidden_states), self.self_attention_res_proj.weight)
        normed = self.input_layernorm(mixed)
        value = self.self_attn(normed, attention_mask) if self.full else self.self_attn(normed)
        if self.snapshot:
            snapshots, total = (*snapshots, hidden_states), value
        else:
            total = hidden_states + value
        mixed = self.mlp_res_norm((*snapshots, total), self.mlp_res_proj.weight)
        feed_forward = getattr(self, self.feed_forward_name)
        return total + feed_forward(self.post_attention_layernorm(mixed))


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
        self.output_attn_res_norm = ResidualMix(hidden, eps)
        self.output_attn_res_proj = nn.Linear(hidden, 1, bias=False)
        self.norm = RMSNorm(hidden, eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Ids ``[B, T]`` or embeddings ``[B, T, H]`` → ``[B, T, H]``.

        No layer has positions. ``position_ids [B, T]`` that start anew divide a row into documents, between which full
        attention does not look; the state of delta-rule layers is cut by whoever runs them on such rows.
        """
        attention_mask = documents_mask(position_ids, attention_mask)
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden: Tensor = embedded
        snapshots: tuple[Tensor, ...] = ()
        for layer in self.layers:
            given, hidden = hidden, layer(hidden, attention_mask, *snapshots)
            if layer.snapshot:
                snapshots = (*snapshots, given)
        return self.norm(self.output_attn_res_norm((*snapshots, hidden), self.output_attn_res_proj.weight))


def documents_mask(positions: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
    """The mask for full attention where positions start anew; else the one that is given."""
    if positions is None:
        return attention_mask
    divided = apart(positions, attention_mask)
    return attention_mask if divided is None else divided


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
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, T, vocabulary]``, and the mean loss of the next token where ``labels [B, T]`` are given."""
        hidden = self.model(input_ids, attention_mask, inputs_embeds, position_ids)
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class KimiK3ForConditionalGeneration(KimiK3PreTrainedModel, GenerationMixin):
    """The language model, and the vision tower and projector where the configuration has them."""

    config_class = KimiK3Config

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__(config)
        self.language_model = KimiK3ForCausalLM(config.text_config)
        if config.vision_config is not None:
            self.vision_tower, self.mm_projector = VisionTower(config.vision_config), Projector(config.vision_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        *args: Any,
        pixel_values: Tensor | None = None,
        image_grids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As ``KimiK3ForCausalLM``; with images their features stand where the placeholder's id stands.

        Args:
            pixel_values: ``[N, 3, side, side]`` patches of all images, in the order of their placeholders.
            image_grids: ``[M, 3]`` frames, rows and columns of each image.

        Raises:
            RecipeError: ``images-without-vision-tower``, ``image-tokens``, ``image-grid``.
        """
        if pixel_values is None:
            return self.language_model(input_ids, *args, **kwargs)
        if input_ids is None or image_grids is None:
            raise _images("image-tokens", "images need token ids and grids", "give input_ids and image_grids")
        embedded = self._with_images(input_ids, pixel_values, image_grids)
        return self.language_model(None, *args, inputs_embeds=embedded, **kwargs)

    def _with_images(self, ids: Tensor, pixel_values: Tensor, image_grids: Tensor) -> Tensor:
        if self.config.vision_config is None:
            raise _images(
                "images-without-vision-tower",
                "this checkpoint has no vision tower",
                "take the images out of the data, or use the checkpoint that has vision_config",
            )
        grids = [(int(t), int(h), int(w)) for t, h, w in image_grids.tolist()]
        features = self.mm_projector(self.vision_tower(pixel_values, grids))
        embedded = self.get_input_embeddings()(ids)
        held = ids == self.config.media_placeholder_token_id
        if int(held.sum()) != len(features):
            raise _images(
                "image-tokens",
                f"{int(held.sum())} placeholders for {len(features)} merged patches",
                "repeat the placeholder once for each merged patch",
            )
        return embedded.masked_scatter(held.unsqueeze(-1), features.to(embedded.dtype))


def _images(code: str, what: str, action: str) -> RecipeError:
    return RecipeError(code, what, where="images", next_action=action)
