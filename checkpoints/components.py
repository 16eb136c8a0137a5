"""What a tensor is for, told from its name (published or in the model) and its rank."""

from __future__ import annotations

import re

from shardwright.schemas.profile import Component

LAYER = re.compile(r"^(?P<stem>(?:.*\.)?(?:layers|blocks|h|block)\.)(?P<index>\d+)\.(?P<rest>.+)$")
"""A decoder layer's tensor: what stands before the number, the number, and the rest."""

_VISION = re.compile(
    r"(^|\.)(vision_tower|vision_model|vision_encoder|visual|vit|image_encoder|audio_tower|audio_model)\."
    r"|^(talker|code2wav)\."
)
_PROJECTOR = re.compile(r"(^|\.)(mm_projector|multi_modal_projector|vit_large_projector|projector|embed_vision)\.")
_MTP = re.compile(r"(^|\.)(mtp|mtp_layers|nextn)(\.|_)")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|word_embeddings|tok_embeddings|wte|embed|embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|head|output|embed_out)\.(weight|bias)$")

_ROUTER = re.compile(
    r"(^|\.)(gate|router|router_gate|wg|moe_statics)(\.|$)|e_score_correction_bias$|expert_bias$|router_bias$|balancing_biases$|tid2eid$"
)
_SHARED = re.compile(r"(^|\.)(shared_experts?|share_expert|shared_mlp|shared_expert_gate)\.")
_EXPERTS = re.compile(r"(^|\.)(experts|text_moe|vision_moe)\.|(^|\.)(down|up)_embed\.weight$")
_LATENT = re.compile(
    r"(^|\.)(routed_expert_(down_proj|norm|up_proj)|fc[12]_latent_proj|(pre|post)_expert_(proj|norm))\."
)
_LINEAR = re.compile(r"(^|\.)(linear_attn|mamba|mamba_mixer|delta_net|conv|short_conv)\.")
_ATTENTION = re.compile(r"(^|\.)(self_attn|self_attention|attention|attn)(\.|$)")
_DENSE = re.compile(r"(^|\.)(mlps?|feed_forward|ffn|block_sparse_moe|moe)\.")
_RESIDUAL = re.compile(r"_res_(norm|proj)\.|(^|\.)(attn|ffn|mlp)_hc\.|(^|\.)hc_")
_MIXER = re.compile(r"^mixer\.(?P<leaf>.+)$")
_MIXER_ATTENTION = re.compile(r"^(q|k|v|o)_proj\.")
_MIXER_DENSE = re.compile(r"^(gate|up|down)_proj\.")

LINEAR_MARKS = re.compile(r"(^|\.)(A_log|dt_bias|in_proj_qkvz\.weight)$")
"""Tensors that only layers with a recurrent state have."""


def split_layer(name: str) -> tuple[str, int, str] | None:
    """(stem, layer number, rest) of a decoder layer's tensor, or ``None`` for one outside the layers."""
    match = LAYER.match(name)
    return (match["stem"], int(match["index"]), match["rest"]) if match else None


def component_of(name: str, rank: int, *, linear_layer: bool = False) -> Component:
    """The component that a tensor belongs to.

    Args:
        name: the tensor's full name.
        rank: number of its dims; a three-dimensional weight in an MLP is a stack of experts.
        linear_layer: its layer has a recurrent state (:data:`LINEAR_MARKS`).
    """
    if _VISION.search(name):
        return "vision"
    if _PROJECTOR.search(name):
        return "projector"
    if _MTP.search(name):
        return "mtp"
    place = split_layer(name)
    if place is None:
        return _outside(name)
    return _inside(place[2], rank, linear_layer)


def _outside(name: str) -> Component:
    if _EMBEDDING.search(name):
        return "embedding"
    if _HEAD.search(name):
        return "head"
    if _RESIDUAL.search(name):
        return "other"
    return "norms" if "norm" in name.lower() or name.endswith("ln_f.weight") else "other"


def _inside(rest: str, rank: int, linear_layer: bool) -> Component:
    if ".indexer." in f".{rest}":
        return "indexer"
    if _SHARED.search(rest):
        return "shared_experts"
    attention = _ATTENTION.search(rest) is not None
    if not attention and _ROUTER.search(rest):
        return "router"
    if _LATENT.search(rest):
        return "latent_projections"
    if _EXPERTS.search(rest) and not attention:
        return "routed_experts"
    if _LINEAR.search(rest) or (attention and linear_layer):
        return "linear_attention"
    if _RESIDUAL.search(rest):
        return "other"
    if attention:
        return "attention"
    mixer = _MIXER.match(rest)
    if mixer:
        return _in_mixer(mixer["leaf"])
    if _DENSE.search(rest):
        return "routed_experts" if rank == 3 else "dense_mlp"
    return "norms" if "norm" in rest.lower() or rest.startswith("ln_") else "other"


def _in_mixer(leaf: str) -> Component:
    if _MIXER_ATTENTION.match(leaf):
        return "attention"
    if _MIXER_DENSE.match(leaf):
        return "dense_mlp"
    return "linear_attention"
