"""Latent attention over cut sequences: the latents of all tokens are gathered, and expanded for some heads at a time.

Legend: B sequences, n heads, T tokens of a rank, S of a sequence, r latent width, e width of the part that all heads
share, d, v widths of a head's own key and value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.runtime.context import Cut
from shardwright.runtime.context_gathered import attended_gathered
from shardwright.runtime.context_pieces import attended
from shardwright.runtime.lora.linear import LoraLinear, LoraProduct


def attended_latents(
    cut: Cut,
    query: Tensor,
    own: Tensor,
    up: nn.Module,
    widths: tuple[int, int, int],
    scaling: float | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """[B, n, T, d + e] queries, [B, 1, T, r + e] latents of this rank's tokens → [B, n, T, v].

    Args:
        up: the map of a latent to n times (key, value), [r] → [n · (d + v)].
        widths: r, d and v.
        chosen: as of :func:`~shardwright.runtime.context_pieces.attended`.
    """
    latent_width, nope, value_width = widths
    heads = query.shape[1]
    together = -(-heads // cut.place.cp) if _divides(up) else heads

    def attend(part: Tensor, whole: Tensor, which: slice) -> Tensor:
        latent, shared = whole.split((latent_width, whole.shape[-1] - latent_width), dim=-1)
        each = nope + value_width
        both = some_rows(up, latent.squeeze(1), slice(which.start * each, which.stop * each))
        own_key, value = both.unflatten(-1, (-1, each)).transpose(1, 2).split((nope, value_width), dim=-1)
        key = torch.cat((own_key, shared.expand(-1, own_key.shape[1], -1, -1)), dim=-1)
        return attended(cut, part, key, value, scaling, chosen=chosen)

    groups = tuple(slice(first, min(first + together, heads)) for first in range(0, heads, together))
    return attended_gathered(
        query, own, cut.place, attend, groups, lambda: tuple(one for one in up.parameters() if one.requires_grad)
    )


def _divides(up: Any) -> bool:
    """Whether a map's rows can be used without the others: dropout would draw for each group of them."""
    return type(up) is nn.Linear or (isinstance(up, LoraLinear) and not (up.dropout and up.training))


def some_rows(up: Any, x: Tensor, rows: slice) -> Tensor:
    """[…, r] → the outputs ``rows`` of a linear map, with or without an adapter."""
    if rows == slice(0, up.out_features):
        whole: Tensor = up(x)
        return whole
    bias = None if up.bias is None else up.bias[rows]
    if not isinstance(up, LoraLinear):
        return F.linear(x, up.weight[rows], bias)
    some: Tensor = LoraProduct.apply(x, up.weight[rows], bias, up.lora_a, up.lora_b[rows], up.scaling)
    return some
