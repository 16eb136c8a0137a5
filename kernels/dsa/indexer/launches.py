"""Starts of scoring and choosing: chunks, grids, configurations. Nothing here waits for the device.

Legend: T queries, S keys, N indexer heads, D head width, k chosen keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shardwright.kernels import device
from shardwright.kernels.dsa.indexer import alarms, configs, contract
from shardwright.kernels.dsa.indexer.configs import Chunk
from shardwright.kernels.dsa.indexer.prepare import quantise
from shardwright.kernels.dsa.indexer.triton import indexer_score_kernel, indexer_select_kernel

HOPPER = (9, 0)


@dataclass(frozen=True)
class Place:
    """Where queries stand among the keys."""

    query_start: int
    """Position of the first query: more than 0 where a rank holds a part of the queries and all keys."""
    starts: Tensor | None
    """``[T]`` int32, first key of each query's sequence; ``None`` where all begin at key 0."""


def place(T: int, S: int, query_start: int, cu_seqlens: Tensor | None, counts: Tensor) -> Place:
    """Starts of the sequences that queries lie in. Bounds on the host are judged here, on a device by ``alarms``.

    Raises:
        KernelError: ``bad-cu-seqlens``.
    """
    if cu_seqlens is None:
        return Place(query_start, None)
    contract.check_length_tensor(cu_seqlens)
    if cu_seqlens.device.type == "cpu":
        contract.check_lengths(cu_seqlens.tolist(), S)
        bounds = cu_seqlens.to(counts.device)
    else:
        bounds = cu_seqlens
        good = (bounds[0] == 0) & (bounds[-1] == S) & (bounds[1:] >= bounds[:-1]).all()
        counts[alarms.BAD_BOUNDS] += (~good).to(torch.int32)
    positions = torch.arange(query_start, query_start + T, dtype=bounds.dtype, device=counts.device)
    found = bounds[(torch.searchsorted(bounds, positions, right=True) - 1).clamp_min(0)]
    starts = torch.minimum(found.clamp_min(0), positions).cummax(0).values
    return Place(query_start, starts.to(torch.int32))


def scorer(
    q: Tensor, k: Tensor, weights: Tensor, where: Place, scale: float, skip: int, k_scale: Tensor | None = None
) -> Callable[[Chunk, Tensor], None]:
    """A launcher that scores one chunk of queries against all keys that they see.

    Args:
        skip: queries that see at most so many keys may be left out.
    """
    _, N, D = q.shape
    at, HEADS = configs.SCORE, configs.heads(N)
    tiles = device.capability(q) >= HOPPER and not device.interpreted()
    rows = q.reshape(-1, D)
    q_tiles = TensorDescriptor(rows, list(rows.shape), [D, 1], [HEADS, D]) if tiles else rows

    def run(chunk: Chunk, scores: Tensor) -> None:
        columns = where.query_start + chunk.first + chunk.rows
        grid = (-(-columns // at.keys), -(-chunk.rows // configs.QUERIES))
        indexer_score_kernel[grid](
            q_tiles,
            rows,
            k,
            weights,
            weights if k_scale is None else k_scale,
            weights if where.starts is None else where.starts,
            scores,
            chunk.first,
            chunk.rows,
            k.shape[0],
            chunk.stride,
            where.query_start,
            scale,
            SKIP=skip,
            N=N,
            HEADS=HEADS,
            D=D,
            KEYS=at.keys,
            QUERIES=configs.QUERIES,
            TILES=tiles,
            PACKED=where.starts is not None,
            SCALED=k_scale is not None,
            num_warps=at.warps,
            num_stages=at.stages,
        )

    return run


def select(scores: Tensor, chunk: Chunk, where: Place, indices: Tensor, counts: Tensor) -> None:
    """The best keys of a chunk's rows of scores, into ``indices``."""
    K = indices.shape[1]
    at = configs.selecting(where.query_start + chunk.first + chunk.rows)
    indexer_select_kernel[(chunk.rows,)](
        scores,
        indices if where.starts is None else where.starts,
        indices,
        counts,
        chunk.first,
        chunk.stride,
        where.query_start,
        K=K,
        SLOTS=configs.power(K),
        COLUMNS=at.columns,
        PIECE=at.piece,
        PACKED=where.starts is not None,
        num_warps=at.warps,
    )


def choose(
    q: Tensor, k: Tensor, weights: Tensor, top_k: int, where: Place, counts: Tensor, fp8: bool, scale: float
) -> Tensor:
    """``indices [T, top_k]``: score and select chunk after chunk in one workspace.

    Two streams that score one chunk while they select from another gain nothing: 1.21 for 1.23 ms at T 8,192, 21.6
    for 21.3 at T 32,768 (one H200).
    """
    T = q.shape[0]
    indices = torch.empty((T, top_k), dtype=torch.int32, device=q.device)
    if T == 0:
        return indices
    plan = configs.chunks(T, where.query_start)
    scores = torch.empty(max(c.rows * c.stride for c in plan), dtype=torch.float32, device=q.device)
    with device.current(q):
        if fp8:
            low = quantise(q, k, weights)
            score = scorer(low.q, low.k, low.weights, where, scale, top_k, low.k_scale)
        else:
            score = scorer(q, k, weights, where, scale, top_k)
        for chunk in plan:
            score(chunk, scores)
            select(scores, chunk, where, indices, counts)
    return indices
