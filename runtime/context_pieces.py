"""Causal attention of a rank's pieces of a sequence on keys and values of all of it, documents apart.

Legend: B sequences, Q query heads, G key heads, T tokens of a rank, S of a sequence, P of a piece, d, v widths.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from shardwright.runtime.context import Cut


def attended(
    cut: Cut, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, window: int | None = None
) -> Tensor:
    """[B, Q, T, v]: this rank's queries on the keys and values of all S tokens, causal, documents apart."""
    parts = enumerate(query.split(cut.piece, dim=2))
    return torch.cat([_piece(cut, number, part, key, value, scaling, window) for number, part in parts], dim=2)


def _piece(
    cut: Cut, number: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """[B, Q, P, v] of one of this rank's pieces, on the keys that it may see."""
    last = (cut.place.pieces[number] + 1) * cut.piece
    first = cut.earliest[number] if window is None else max(cut.earliest[number], last - cut.piece - window + 1, 0)
    key, value = key[:, :, first:last], value[:, :, first:last]
    masked = _visible(cut, first, last, window)
    if masked is None:
        bias = causal_lower_right(query.shape[2], last - first)
        return F.scaled_dot_product_attention(query, key, value, bias, scale=scaling, enable_gqa=_grouped(query, key))
    if _grouped(query, key):
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return F.scaled_dot_product_attention(query, key, value, masked, scale=scaling)


def _grouped(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] != key.shape[1]


def _visible(cut: Cut, first: int, last: int, window: int | None) -> Tensor | None:
    """[B or 1, 1, P, last − first]: what the tokens of the piece that ends at ``last`` see; ``None``: all before."""
    if cut.starts is None and (window is None or last <= window):
        return None
    places = torch.arange(first, last, device=cut.positions.device)
    ours = places[last - first - cut.piece :].unsqueeze(-1)
    seen = places <= ours
    if window is not None:
        seen = seen & (places > ours - window)
    if cut.starts is None:
        return seen[None, None]
    starts = cut.starts[:, last - cut.piece : last]
    return (seen & (places >= starts.unsqueeze(-1))).unsqueeze(1)
