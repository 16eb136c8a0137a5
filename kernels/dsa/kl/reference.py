"""The indexer's loss in plain torch: the meaning that the fused operator must have.

Legend: T queries, S keys, H attention heads, G key heads, M attention width, k chosen keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels.dsa.indexer.reference import scores_at_reference, scores_reference, visible


def target_reference(
    q_main: Tensor, k_main: Tensor, lse: Tensor, indices: Tensor | None, seen: Tensor, attention_scale: float
) -> Tensor:
    """The attention's probabilities summed over heads and normalised, ``[T, k]`` or ``[T, S]``; 0 where unseen."""
    T, H, M = q_main.shape
    G = k_main.shape[1]
    grouped = q_main.reshape(T, G, H // G, M)
    if indices is None:
        logits = torch.einsum("tghm,sgm->tghs", grouped, k_main)
    else:
        logits = torch.einsum("tghm,tjgm->tghj", grouped, k_main[indices.clamp_min(0).long()])
    wide = torch.float64 if q_main.dtype == torch.float64 else torch.float32
    logits = logits.flatten(1, 2).to(wide) * attention_scale
    mass = torch.where(seen, (logits - lse.to(wide)[..., None]).exp().sum(1), 0.0)
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, 0.0)


def kl_rows_reference(target: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    """``KL(target ‖ softmax(scores))`` of each row over its seen keys; 0 for a row without mass."""
    any_seen = seen.any(-1, keepdim=True)
    shown = torch.where(seen, scores, -torch.inf)
    shown = torch.where(any_seen, shown, 0.0)
    log_share = torch.where(seen, shown.log_softmax(-1), 0.0)
    terms = torch.where(target > 0, target * (torch.where(target > 0, target, 1.0).log() - log_share), 0.0)
    return terms.sum(-1)


def dsa_kl_reference(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    q_main: Tensor,
    k_main: Tensor,
    lse: Tensor,
    indices: Tensor | None = None,
    *,
    scale: float,
    attention_scale: float,
    query_start: int = 0,
    cu_seqlens: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Loss over chosen keys, or over all seen keys without ``indices``; fp32 scalar (fp64 for fp64).

    The target has no gradient. Shapes as in ``op.dsa_kl``.
    """
    if indices is None:
        seen = visible(q.shape[0], k.shape[0], query_start, cu_seqlens, q.device)
        scores = scores_reference(q, k, weights, scale)
    else:
        seen = indices >= 0
        scores = scores_at_reference(q, k, weights, indices, scale)
    target = target_reference(q_main.detach(), k_main.detach(), lse.detach(), indices, seen, attention_scale)
    rows = kl_rows_reference(target, scores, seen)
    return rows.sum() / max(1, rows.numel()) if reduction == "mean" else rows.sum()


def dsa_pooled_kl_reference(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    q_main: Tensor,
    k_main: Tensor,
    lse: Tensor,
    chosen: Tensor,
    tokens: Tensor,
    *,
    scale: float,
    attention_scale: float,
) -> Tensor:
    """Loss over chosen pools of keys, mean over queries; shapes as in ``pooled.dsa_pooled_kl``."""
    scores = scores_at_reference(q, keys, weights, chosen, scale)
    teacher = (q_main.detach(), k_main.detach(), lse.detach())
    target = (
        target_reference(*teacher, tokens, tokens >= 0, attention_scale).unflatten(1, (chosen.shape[1], -1)).sum(-1)
    )
    return kl_rows_reference(target, scores, chosen >= 0).sum() / max(1, q.shape[0])


def attention_lse(
    q_main: Tensor,
    k_main: Tensor,
    indices: Tensor | None,
    attention_scale: float,
    query_start: int = 0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Log-sum-exp of the attention ``[T, H]`` fp32, some queries at a time: what an attention operator returns."""
    T, H, M = q_main.shape
    S, G, _ = k_main.shape
    found = torch.empty((T, H), dtype=torch.float32, device=q_main.device)
    seen = visible(T, S, query_start, cu_seqlens, q_main.device) if indices is None else indices >= 0
    step = 128
    for first in range(0, T, step):
        piece = slice(first, first + step)
        grouped = q_main[piece].reshape(-1, G, H // G, M)
        if indices is None:
            logits = torch.einsum("tghm,sgm->tghs", grouped, k_main)
        else:
            logits = torch.einsum("tghm,tjgm->tghj", grouped, k_main[indices[piece].clamp_min(0).long()])
        logits = logits.flatten(1, 2).float() * attention_scale
        found[piece] = torch.where(seen[piece][:, None], logits, -torch.inf).logsumexp(-1)
    return found
