"""The router in plain torch: the meaning that the fused operator must have.

Legend: T tokens, E experts, k chosen experts, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-20
"""Added to the sum that weights are divided by: keeps 0 / 0 out where all chosen scores underflow."""


def choose(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest along the last axis, largest first; of equal values the lower index first.

    NaN counts as larger than everything; -0 equals 0.
    """
    return torch.sort(values + 0.0, dim=-1, descending=True, stable=True).indices[..., :k]


def router_reference(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    k: int,
    scoring: str = "softmax",
    groups: int = 1,
    groups_kept: int = 1,
    group_score: str = "top2",
    renormalise: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chosen experts and their weights; everything in fp32 (fp64 for fp64 logits).

    score = softmax or sigmoid of the logits. ``bias`` picks, the score without it weighs. With groups, each
    group's value is its largest or the sum of its two largest (biased) scores and only the best
    ``groups_kept`` groups stand. Without a bias experts are compared by logit, which orders them as the
    score does and does not saturate.

    Args:
        logits: ``[T, E]``.
        bias: ``[E]``, no gradient.

    Returns:
        weights ``[T, k]``; experts ``[T, k]`` int64, best first; counts ``[E]`` int64; mean probability
        ``[E]`` over tokens (a sigmoid score is divided by its row's sum first).
    """
    T, E = logits.shape
    wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    score = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    by_score = score.detach() if bias is None else score.detach() + bias.detach().to(score.dtype)
    rank = wide.detach() if bias is None else by_score
    if groups > 1:
        members = by_score.reshape(T, groups, E // groups)
        best = members.sort(-1, descending=True).values
        value = best[..., 0] if group_score == "max" else best[..., 0] + best[..., 1]
        kept = torch.zeros(T, groups, dtype=torch.bool, device=logits.device)
        kept.scatter_(1, choose(value, groups_kept), True)
        rank = rank.masked_fill(~kept.repeat_interleave(E // groups, dim=1), float("-inf"))
        # A kept expert may itself be at -inf: order by (kept, rank) so that it stays ahead of a dropped one.
        order = choose(rank, E)
        kept_first = kept.repeat_interleave(E // groups, dim=1).gather(1, order)
        experts = order.gather(1, torch.sort(kept_first.to(torch.int8), dim=1, descending=True, stable=True).indices)
        experts = experts[:, :k]
    else:
        experts = choose(rank, k)
    weights = score.gather(1, experts)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
    weights = weights * scale
    counts = torch.zeros(E, dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, experts.reshape(-1), torch.ones_like(experts.reshape(-1)))
    share = score if scoring == "softmax" else score / (score.sum(-1, keepdim=True) + EPSILON)
    return weights, experts, counts, share.sum(0) / max(T, 1)
