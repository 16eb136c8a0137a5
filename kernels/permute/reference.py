"""Permute and combine in plain torch: the meaning that the fused operators must have.

Legend: T tokens, K experts a token, E experts, R = T·K rows, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor


def route_reference(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stable sort of the (token, slot) entries by expert.

    Args:
        ids: ``[T, K]`` integers; an id outside ``0 .. experts-1`` means "not routed".
        experts: E.

    Returns:
        ``counts [E]``, ``entry [R]`` (the entry that each sorted row comes from; entries of no expert come
        last) and ``place [T, K]`` (each entry's row, -1 where it has none), all int64.
    """
    flat = ids.reshape(-1).long()
    routed = (flat >= 0) & (flat < experts)
    key = torch.where(routed, flat, experts)
    entry = torch.argsort(key, stable=True)
    place = torch.empty_like(entry)
    place[entry] = torch.arange(entry.numel(), device=ids.device)
    counts = torch.bincount(key, minlength=experts + 1)[:experts]
    return counts, entry, torch.where(routed, place, -1).reshape(ids.shape)


def gather_rows_reference(x: Tensor, place: Tensor, rows: int) -> Tensor:
    """``out [rows, H]`` with ``out[place[t, k]] = x[t]``; rows that no entry takes are zero."""
    T, K = place.shape
    routed = place.reshape(-1) >= 0
    token = torch.arange(T, device=x.device).repeat_interleave(K)[routed]
    return x.new_zeros((rows, x.shape[-1])).index_put((place.reshape(-1)[routed],), x[token])


def combine_reference(y: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """``out [T, H]``: the sum over k of ``weights[t, k] · y[place[t, k]]``, one rounding at the end.

    Rows of entries that are not routed are left out before any product, so their content never matters.
    """
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    routed = (place >= 0).unsqueeze(-1)
    if y.shape[0] == 0:
        return y.new_zeros((place.shape[0], y.shape[-1])) + 0 * (y.sum() + weights.sum().to(y.dtype))
    rows = torch.where(routed, y[place.clamp_min(0)].to(wide), 0.0)
    return (rows * weights.unsqueeze(-1).to(wide)).sum(1).to(y.dtype)
