"""The lightning indexer in plain torch: the meaning that the fused operator must have.

Legend: T queries, S keys, N indexer heads, D head width, R rotated dims, k chosen keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_starts(T: int, query_start: int, cu_seqlens: Tensor | None, device: torch.device | str) -> Tensor:
    """First key of each query's own sequence, ``[T]`` int64."""
    positions = torch.arange(query_start, query_start + T, device=device)
    if cu_seqlens is None:
        return torch.zeros_like(positions)
    bounds = cu_seqlens.to(device).long()
    return bounds[torch.searchsorted(bounds, positions, right=True) - 1]


def visible(T: int, S: int, query_start: int, cu_seqlens: Tensor | None, device: torch.device | str) -> Tensor:
    """``[T, S]``: which keys a query sees, its own sequence up to itself."""
    keys = torch.arange(S, device=device)
    last = torch.arange(query_start, query_start + T, device=device)
    first = row_starts(T, query_start, cu_seqlens, device)
    return (keys[None] <= last[:, None]) & (keys[None] >= first[:, None])


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate the first R dims of every row of ``x [rows, ..., D]`` by its angles ``[rows, R / 2]``.

    ``half-split`` pairs dim i with i + R/2 (DeepSeek-V3.2's indexer), ``interleaved`` 2i with 2i + 1 (GLM-5's).
    """
    half = cos.shape[-1]
    shape = (cos.shape[0], *([1] * (x.dim() - 2)), half)
    wide = x if x.dtype == torch.float64 else x.float()
    c, s = cos.to(wide.dtype).reshape(shape), sin.to(wide.dtype).reshape(shape)
    turned, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    if layout == "interleaved":
        a, b = turned[..., 0::2], turned[..., 1::2]
        made = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        made = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((made, rest), -1).to(x.dtype)


def scores_reference(q: Tensor, k: Tensor, weights: Tensor, scale: float) -> Tensor:
    """``I[t, s] = scale · Σ_h w[t, h] · ReLU(q[t, h] · k[s])``, ``[T, S]``.

    Products in the inputs' dtype, as a bf16 model's einsum gives them; the sum over heads in fp32 (fp64 for fp64).
    """
    dots = torch.einsum("tnd,sd->tns", q, k).relu()
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.einsum("tns,tn->ts", dots.to(wide), weights.to(wide)) * scale


def select_reference(scores: Tensor, seen: Tensor, top_k: int) -> Tensor:
    """The ``top_k`` best seen keys of each row, the smaller key among equals, ascending, -1 at the end; int32.

    A NaN score ranks above every number; -0.0 equals 0.0.
    """
    T, S = scores.shape
    ranks = torch.where(scores.isnan(), torch.inf, scores + 0.0)
    # Stable sorts from the least to the most deciding key: index, score, NaN, seen.
    order = torch.sort(ranks, dim=-1, descending=True, stable=True).indices
    order = _stable_by(order, scores.isnan())
    order = _stable_by(order, seen)
    keep = min(top_k, S)
    chosen = order[:, :keep]
    valid = torch.gather(seen, 1, chosen)
    ascending = torch.where(valid, chosen, S).sort(-1).values
    found = torch.full((T, top_k), -1, dtype=torch.int32, device=scores.device)
    found[:, :keep] = torch.where(ascending == S, -1, ascending).to(torch.int32)
    return found


def _stable_by(order: Tensor, flag: Tensor) -> Tensor:
    """Bring flagged entries of an order to the front, else unchanged."""
    flags = torch.gather(flag.to(torch.int8), 1, order)
    return torch.gather(order, 1, torch.sort(flags, dim=-1, descending=True, stable=True).indices)


def indexer_reference(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    top_k: int,
    scale: float,
    query_start: int = 0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """``indices [T, top_k]`` int32 for rotated q and k."""
    seen = visible(q.shape[0], k.shape[0], query_start, cu_seqlens, q.device)
    return select_reference(scores_reference(q, k, weights, scale), seen, top_k)


def scores_at_reference(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, scale: float) -> Tensor:
    """Scores at chosen keys, ``[T, k]`` fp32 (fp64 for fp64); 0 where the index is -1. Differentiable."""
    chosen = k[indices.clamp_min(0).long()]
    dots = torch.einsum("tnd,tjd->tnj", q, chosen).relu()
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.einsum("tnj,tn->tj", dots.to(wide), weights.to(wide)) * scale
    return torch.where(indices >= 0, scores, 0.0)
