"""Kimi K3's own attentions on cut rows: latents and indexer keys are gathered, states of the delta rule pass.

Legend: B rows, T tokens of a rank, S of a sequence, H heads, K chosen keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.checkpoints.models.kimi_k3.attention import (
    DeltaAttention,
    GatedLatentAttention,
    GatedSparseAttention,
    Indexer,
)
from shardwright.checkpoints.models.kimi_k3.delta_rule import delta_rule as whole_rule
from shardwright.checkpoints.models.kimi_k3.norms import wide
from shardwright.runtime.context import Cut, active, gather_tokens
from shardwright.runtime.context_delta import convolution, delta_rule
from shardwright.runtime.context_latent import attended_latents
from shardwright.runtime.context_layers import current, on_cut_rows, part_by_part
from shardwright.runtime.context_pieces import seen_keys


def cut_latent(module: GatedLatentAttention) -> None:
    """The latent attention without positions, with its gate: expanded from the latents of all tokens.

    A sparse one looks at the chosen keys, of all ranks.
    """
    original: Callable[..., Tensor] = module.forward
    if isinstance(module, GatedSparseAttention):
        cut_indexer(module.indexer)

    def forward(x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        cut = active()
        if cut is None:
            return original(x, attention_mask)
        B, T, _ = x.shape
        reduced = module.q_a_layernorm(module.q_a_proj(x))
        query = module.q_b_proj(reduced).view(B, T, module.heads, -1).transpose(1, 2)
        latent, extra = module.kv_a_proj_with_mqa(x).split([module.rank, module.extra], dim=-1)
        own = torch.cat((module.kv_a_layernorm(latent), extra), dim=-1).unsqueeze(1)
        chosen = _chosen(module.indexer, x, reduced, cut) if isinstance(module, GatedSparseAttention) else None
        widths = (module.rank, module.nope, module.value)
        out = attended_latents(cut, query, own, module.kv_b_proj, widths, chosen=chosen)
        out = out.transpose(1, 2).reshape(B, T, -1)
        result: Tensor = module.o_proj(out * torch.sigmoid(wide(module.g_proj(x))).to(x.dtype))
        return result

    module.forward = forward  # type: ignore[method-assign]


def cut_indexer(indexer: Indexer) -> None:
    """Scores of a rank's queries and the keys of all: [B, T, S] in place of [B, S, S]."""
    original: Callable[..., Tensor] = indexer.forward

    def forward(x: Tensor, query: Tensor) -> Tensor:
        cut = active()
        if cut is None:
            return original(x, query)
        B, T, _ = x.shape
        q = wide(indexer.wq_b(query)).view(B, T, indexer.n_heads, -1) * indexer.head_dim**-0.5
        keys = wide(gather_tokens(indexer.k_norm(indexer.wk(x)).unsqueeze(1), cut.place).squeeze(1))
        weights = wide(indexer.weights_proj(x)) * indexer.n_heads**-0.5
        scores = torch.zeros((B, T, cut.tokens), dtype=keys.dtype, device=x.device)
        for head in range(indexer.n_heads):
            scores = scores + weights[..., head, None] * F.relu(q[:, :, head] @ keys.mT)
        return scores

    indexer.forward = forward  # type: ignore[method-assign]


@torch.no_grad()
def _chosen(indexer: Indexer, x: Tensor, query: Tensor, cut: Cut) -> Tensor | None:
    """[B, T, K] places of the keys that the indexer scores highest; ``None`` where it chooses all."""
    if indexer.index_topk >= cut.tokens:
        return None
    scores = indexer(x, query).masked_fill(~seen_keys(cut), float("-inf"))
    return torch.topk(scores, indexer.index_topk, dim=-1).indices.to(torch.int32)


def cut_delta(module: DeltaAttention) -> None:
    """The delta-rule layer: its own forward with the recurrence and the convolutions over cut rows."""
    short: Callable[..., Tensor] = module._short

    def mixed(conv: nn.Conv1d, x: Tensor) -> Tensor:
        cut = active()
        return short(conv, x) if cut is None else F.silu(convolution(x, conv.weight.squeeze(1).to(x.dtype), None, cut))

    module._short = mixed  # type: ignore[method-assign]
    on_cut_rows(module, {"delta_rule": _rule})


def _rule(*streams: Tensor) -> tuple[Tensor, None]:
    """The recurrence in the model's own spelling, over cut rows."""

    def run(parts: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = parts
        return whole_rule(q, k, v, g, beta, state)

    found: Any = delta_rule(part_by_part(run), streams, current())
    return found, None
