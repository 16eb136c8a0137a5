"""Gradients of the keys of one run of queries, from its stored shares: by atomics, in key order, or block by block.

Legend: as in ``problem``; C queries of a run, E positions of a stored row of P, W columns of a key's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.dsa.attention import configs
from shardwright.kernels.dsa.attention.backward_triton import blocks_kernel, contributions_kernel, sums_kernel
from shardwright.kernels.dsa.attention.configs import power_of_two
from shardwright.kernels.dsa.attention.problem import Problem, strides_of
from shardwright.kernels.dsa.attention.reference import selected_keys


def _products(p: Problem, do: Tensor, shares: Tensor, ds: Tensor) -> list[tuple[int, int, list[Any], list[int], bool]]:
    """Column, width, operands, their strides, and whether there are two, of each part of a key's gradient."""
    plain = (0, p.DN, [ds, p.qn, shares, do], strides_of(p.qn, do), p.v is None)
    found = [plain]
    if p.qr is not None:
        found.append((p.DN, p.DR, [ds, p.qr, shares, do], strides_of(p.qr, do), False))
    if p.v is not None:
        found.append((p.DN + p.DR, p.DV, [shares, do, ds, p.qn], strides_of(do, p.qn), False))
    return found


def by_key(
    p: Problem, do: Tensor, shares: Tensor, ds: Tensor, dkv: Tensor, start: int, count: int, E: int, ordered: bool
) -> None:
    """Single keys, or small blocks: atomics, or rows in the order of keys and their sums."""
    tile = configs.contributions(p.H // p.G, p.qn.element_size())
    place: Tensor = p.indices
    out = dkv
    if ordered:
        place, ends = in_key_order(p, start, count)
        out = p.qn.new_empty((count * p.G * p.positions, p.W))
    for column, width, operands, apart, second in _products(p, do, shares, ds):
        wide = configs.columns(width)
        contributions_kernel[(count * p.G * -(-width // wide),)](
            *operands,
            p.indices,
            p.indices if p.bounds is None else p.bounds,
            place,
            out,
            start,
            p.positions,
            p.K,
            p.S,
            p.H,
            p.G,
            E,
            *apart,
            p.W,
            column,
            width,
            HEADS=p.H // p.G,
            PARTS=-(-width // wide),
            CW=wide,
            BH=tile.heads,
            BN=tile.keys,
            POSITIONS=power_of_two(p.positions),
            BLOCK=p.block,
            BOUNDED=p.bounds is not None,
            SECOND=second,
            SORTED=ordered,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    if ordered:
        sums_kernel[(p.S * p.G,)](
            out,
            ends,
            dkv,
            WIDTH=p.W,
            MAIN=1 << p.W.bit_length() - 1,
            REST=power_of_two(p.W - (1 << p.W.bit_length() - 1)),
            ROWS=configs.SUM_ROWS,
            num_warps=configs.SUM_WARPS,
        )


def in_key_order(p: Problem, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Row of each pair ``[count, G, K · B]`` when pairs stand by key, then query, then position; and where keys end.

    The second is ``[S · G + 1]``: rows of key ``s · G + g`` lie between its two neighbours in it.
    """
    run = slice(start, start + count)
    keys = selected_keys(p.indices[run], p.S, p.block, None if p.bounds is None else p.bounds[run])
    head = torch.arange(p.G, device=keys.device)[None, :, None]
    flat = torch.where(keys >= 0, keys * p.G + head, p.S * p.G).flatten().to(torch.int32)
    ordered, order = flat.sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    edges = torch.arange(p.S * p.G + 1, device=order.device, dtype=torch.int32)
    return place, torch.searchsorted(ordered, edges, out_int32=True)


def by_block(p: Problem, do: Tensor, shares: Tensor, ds: Tensor, dkv: Tensor, start: int, count: int, E: int) -> None:
    """Blocks of keys: each is summed by the program that owns it."""
    blocks = -(-p.S // p.block)
    entries = p.indices[start : start + count]
    head = torch.arange(p.G, device=entries.device)[None, :, None]
    legal = (entries >= 0) & (entries < blocks)
    flat = torch.where(legal, head * blocks + entries, p.G * blocks).flatten().to(torch.int32)
    ordered, pairs = flat.sort(stable=True)
    edges = torch.arange(p.G * blocks + 1, device=entries.device, dtype=torch.int32)
    ends = torch.searchsorted(ordered, edges, out_int32=True)
    tile = configs.contributions(p.H // p.G, p.qn.element_size())
    for column, width, operands, apart, second in _products(p, do, shares, ds):
        wide = configs.columns(width)
        blocks_kernel[(p.G * blocks * -(-width // wide),)](
            *operands,
            pairs,
            ends,
            dkv,
            start,
            p.K,
            p.S,
            blocks,
            p.H,
            p.G,
            E,
            *apart,
            p.W,
            column,
            width,
            HEADS=p.H // p.G,
            PARTS=-(-width // wide),
            CW=wide,
            BH=tile.heads,
            BLOCK=p.block,
            SECOND=second,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
