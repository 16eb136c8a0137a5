"""Attention over cut sequences: queries stay, keys and values of all tokens are gathered.

An attention that calls the library's interface needs no change: the model's implementation becomes :data:`NAME`, whose
function gathers keys and values and builds causal and document masks from places in the whole sequence. Latent
attention gathers what its keys and values are expanded from, and expands it on each rank (``context_latent``); one that
chose keys hands on which (``context_sparse``). Whole rows, as the checks run them, go to torch's own attention.

Legend: B sequences, Q query heads, G key heads, T tokens of a rank, S of a sequence, P of a piece, d, v widths,
K chosen keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.context import active
from shardwright.runtime.context_gathered import attended_gathered
from shardwright.runtime.context_latent import attended_latents
from shardwright.runtime.context_pieces import attended, members
from shardwright.schemas.errors import LegalityError

NAME = "sdpa_context"
"""Our implementation among the library's attentions."""
EXPANDS = "expand_kv"
"""A method by which the library's latent attentions make keys and values, with ``kv_b_proj``, of what they cache."""
REFUSED = ("softcap", "s_aux", "position_bias")
"""Arguments of attentions that are not of this kind: capped scores, sinks, biases of position."""


def install_attention(model: nn.Module) -> None:
    """Make every attention of a model one over cut sequences.

    Raises:
        LegalityError: ``context-attention`` where the model does not run torch's attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    config: Any = model.config
    if config._attn_implementation != "sdpa":
        raise LegalityError(
            "context-attention",
            f"{type(model).__name__} runs {config._attn_implementation!r} attention, which cannot be cut",
            where="decision.strategy.mesh.cp",
            next_action="choose cp 1 for this family",
        )
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    config._attn_implementation = NAME
    for module in model.modules():
        if hasattr(module, EXPANDS):
            setattr(module, EXPANDS, _kept_compressed(getattr(module, EXPANDS)))


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The library's mask for whole rows; none for cut ones, whose attention makes its own."""
    from transformers.masking_utils import sdpa_mask

    found: Tensor | None = None if active() else sdpa_mask(*args, **kwargs)
    return found


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[B, Q, T, d] queries, keys [B, G, T, d] and values, of whole rows or of a rank's tokens → [B, T, Q, v].

    An attention that chose keys hands on their places in the row, ``indices`` [B, T, K].

    Raises:
        LegalityError: ``context-attention`` for an attention that is not plain causal softmax.
    """
    cut, indices = active(), kwargs.pop("indices", None)
    if cut is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        kwargs["sliding_window"] = sliding_window
        if indices is not None:
            attention_mask = _chosen_alone(attention_mask, indices, key.shape[2])
        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return whole
    family: Any = module
    latent = hasattr(family, EXPANDS)
    other = [name for name in REFUSED if kwargs.get(name) is not None] + (["dropout"] if dropout else [])
    other += ["a window on latents"] if latent and sliding_window is not None else []
    other += ["a choice of keys that are no latents"] if indices is not None and not latent else []
    if other or kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise LegalityError(
            "context-attention",
            f"{type(module).__name__} is not plain causal attention ({', '.join(other) or 'it looks ahead'})",
            where="decision.strategy.mesh.cp",
            next_action="choose cp 1 for this family",
        )
    if latent:
        widths = (family.kv_lora_rank, family.qk_nope_head_dim, family.v_head_dim)
        own = torch.cat((key, value), dim=-1)
        out = attended_latents(cut, query, own, family.kv_b_proj, widths, scaling, indices)
        return out.transpose(1, 2).contiguous(), None
    width = key.shape[-1]

    def on_all(part: Tensor, whole: Tensor, heads: slice) -> Tensor:
        return attended(cut, part, whole[..., :width], whole[..., width:], scaling, sliding_window)

    heads = (slice(0, query.shape[1]),)
    out = attended_gathered(query, torch.cat((key, value), dim=-1), cut.place, on_all, heads)
    return out.transpose(1, 2).contiguous(), None


def _chosen_alone(mask: Tensor | None, indices: Tensor, keys: int) -> Tensor:
    """The mask of whole rows without the keys that were not chosen."""
    chosen = members(indices, keys).unsqueeze(1)
    if mask is None or mask.dtype == torch.bool:
        return chosen if mask is None else mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _kept_compressed(expand: Callable[..., Any]) -> Callable[..., Any]:
    """A latent attention's expansion of latents [B, 1, T, …]; where rows are cut they go on to :func:`attend` as they
    are, in the places of keys and values."""

    def latents(kv_nope: Tensor, k_rot: Tensor) -> Any:
        return expand(kv_nope, k_rot) if active() is None else (kv_nope, k_rot)

    return latents
