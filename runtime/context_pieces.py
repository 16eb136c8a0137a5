"""Causal attention of a rank's pieces of a sequence on keys and values of all of it, documents apart.

Legend: B sequences, Q query heads, G key heads, T tokens of a rank, S of a sequence, P of a piece, d, v widths,
K chosen keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from shardwright.runtime.context import Cut


def attended(
    cut: Cut,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None = None,
    window: int | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """[B, Q, T, v]: this rank's queries on the keys and values of all S tokens, causal, documents apart.

    Args:
        chosen: [B, T, K] places in the row of the keys that each query looks at, of those that it may see.
    """
    found = []
    for number, part in enumerate(query.split(cut.piece, dim=2)):
        own = None if chosen is None else chosen[:, number * cut.piece : (number + 1) * cut.piece]
        found.append(_piece(cut, number, part, key, value, scaling, window, own))
    return torch.cat(found, dim=2)


def seen_keys(cut: Cut) -> Tensor:
    """[B or 1, T, S]: which keys of its row each of this rank's queries may see."""
    places = torch.arange(cut.tokens, device=cut.positions.device)
    ours = cut.place.own(places.unsqueeze(0))
    seen = places <= ours.unsqueeze(-1)
    return seen if cut.starts is None else seen & (places >= cut.place.own(cut.starts).unsqueeze(-1))


def members(chosen: Tensor, keys: int) -> Tensor:
    """[…, K] places of keys, below 0 for nothing → […, keys]: which of so many keys are chosen."""
    found = torch.zeros((*chosen.shape[:-1], keys + 1), dtype=torch.bool, device=chosen.device)
    return found.scatter_(-1, torch.where(chosen < 0, keys, chosen).long(), True)[..., :keys]


def _piece(
    cut: Cut,
    number: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    chosen: Tensor | None,
) -> Tensor:
    """[B, Q, P, v] of one of this rank's pieces, on the keys that it may see."""
    last = (cut.place.pieces[number] + 1) * cut.piece
    first = cut.earliest[number] if window is None else max(cut.earliest[number], last - cut.piece - window + 1, 0)
    key, value = key[:, :, first:last], value[:, :, first:last]
    if chosen is None:
        masked = _visible(cut, first, last, window)
    else:
        masked = _seen(cut, first, last, window) & members(chosen, cut.tokens)[:, None, :, first:last]
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
    return _seen(cut, first, last, window)


def _seen(cut: Cut, first: int, last: int, window: int | None) -> Tensor:
    """[B or 1, 1, P, last − first], as :func:`_visible`."""
    places = torch.arange(first, last, device=cut.positions.device)
    ours = places[last - first - cut.piece :].unsqueeze(-1)
    seen = places <= ours
    if window is not None:
        seen = seen & (places > ours - window)
    if cut.starts is None:
        return seen[None, None]
    starts = cut.starts[:, last - cut.piece : last]
    return (seen & (places >= starts.unsqueeze(-1))).unsqueeze(1)
