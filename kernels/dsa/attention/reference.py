"""Attention over selected keys in plain torch: the meaning that the fused operator must have.

Legend: T queries, S keys, H query heads, G key heads, D width of a query, V width of a value, K selected entries,
B keys of an entry (block size).
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 256
"""Queries whose gathered keys are alive at once."""

LARGEST_SINK = 2e38
"""A larger sink logit is taken as this: it owns all the mass, and stays finite."""


def dsa_attention_reference(
    q_nope: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    indices: Tensor,
    gate: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    block_size: int = 1,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multi-head latent attention in its absorbed form, one key head, over the selected keys.

    Args:
        q_nope: ``[T, H, V]``, each head's query times its part of the key projection.
        q_rope: ``[T, H, R]``, rotated; ``None``, with ``k_rope``, where nothing is.
        latent: ``[S, V]``, normed; key and value at once.
        k_rope: ``[S, R]``, rotated.
        indices, gate, sinks, scale, block_size, bounds: as in ``sparse_gqa_attention_reference``, with one key head;
            indices are ``[T, K]``.

    Returns:
        o ``[T, H, V]`` and lse ``[T, H]``.
    """
    q = q_nope if q_rope is None else torch.cat((q_nope, q_rope), -1)
    k = (latent if k_rope is None else torch.cat((latent, k_rope), -1))[:, None]
    return sparse_gqa_attention_reference(
        q, k, latent[:, None], indices[:, None], gate, sinks, scale=scale, block_size=block_size, bounds=bounds
    )


def sparse_gqa_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    gate: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    block_size: int = 1,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Grouped-query attention; every key head has its own selection.

    Args:
        q: ``[T, H, D]``; head h reads key head ``h // (H / G)``.
        k: ``[S, G, D]``.
        v: ``[S, G, V]``.
        indices: ``[T, G, K]`` integers: key rows, or blocks of ``block_size`` rows; -1 anywhere means nothing.
        gate: ``[T, H, V]`` or ``[T, H]``: the output is multiplied by its sigmoid.
        sinks: ``[H]`` logits of an entry without a value: mass that is lost.
        scale: factor of the scores.
        bounds: ``[T, 2]``: first key that a query may see, and the one past its last.

    Returns:
        o ``[T, H, V]`` in q's dtype; lse ``[T, H]``, the natural log of the sum over keys and sink, fp32 (fp64 for
        fp64), without gradient. A query without a key has o = 0 and lse = -inf, or its sink.
    """
    seen = selected_keys(indices, k.shape[0], block_size, bounds)
    pieces = [
        _rows(q[at], k, v, seen[at], None if gate is None else gate[at], sinks, scale)
        for at in (slice(start, start + CHUNK) for start in range(0, max(1, q.shape[0]), CHUNK))
    ]
    return torch.cat([o for o, _ in pieces]), torch.cat([lse for _, lse in pieces]).detach()


def selected_keys(indices: Tensor, keys: int, block_size: int, bounds: Tensor | None) -> Tensor:
    """``[..., K · block_size]`` key rows, -1 where there is none that the query may see. The first dim is T."""
    rows = indices.long()
    if block_size > 1:
        inside = torch.arange(block_size, device=rows.device)
        rows = torch.where(rows[..., None] >= 0, rows[..., None] * block_size + inside, -1).flatten(-2)
    legal = (rows >= 0) & (rows < keys)
    if bounds is not None:
        shape = (-1, *(1,) * (rows.dim() - 1))
        legal &= (rows >= bounds[:, 0].reshape(shape)) & (rows < bounds[:, 1].reshape(shape))
    return torch.where(legal, rows, -1)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, gate: Tensor | None, sinks: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    (T, H, D), G = q.shape, k.shape[1]
    seen, head = keys >= 0, torch.arange(G, device=q.device)[None, :, None]
    at = keys.clamp_min(0)
    # What a masked slot would read is cleared before any product: 0 · NaN is NaN.
    gathered = torch.where(seen[..., None], k[at, head], 0)
    values = torch.where(seen[..., None], v[at, head], 0)
    scores = torch.einsum("tgrd,tgkd->tgrk", q.reshape(T, G, H // G, D), gathered).to(wide) * scale
    scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
    sink = None if sinks is None else sinks.to(wide).clamp(max=LARGEST_SINK).reshape(G, H // G, 1)
    top = scores.detach().amax(-1, keepdim=True) if keys.shape[-1] else scores.new_full((*scores.shape[:3], 1), -1e30)
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == float("-inf"), 0.0, top)
    mass = torch.exp(scores - top)
    total = mass.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    lse = (top + total.detach().log()).reshape(T, H)
    shares = mass / torch.where(total == 0, 1.0, total)
    o = torch.einsum("tgrk,tgkd->tgrd", shares.to(q.dtype), values).reshape(T, H, v.shape[-1])
    if gate is not None:
        o = o * torch.sigmoid(gate if gate.dim() == 3 else gate[..., None])
    return o, lse
