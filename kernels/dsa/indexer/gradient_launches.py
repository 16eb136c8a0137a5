"""Starts of scores at chosen keys and of the gradient of scores (LIG). Nothing here waits for the device.

Legend: T queries, S keys, N indexer heads, D head width, k chosen keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels.dsa.indexer import configs
from shardwright.kernels.dsa.indexer.configs import Chunk
from shardwright.kernels.dsa.indexer.gradient import (
    indexer_gradient_kernel,
    indexer_keys_gradient_kernel,
    indexer_pairs_kernel,
)
from shardwright.kernels.dsa.indexer.launches import Place


def pairs(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, counts: Tensor, scale: float, fill: float, chunk: Chunk
) -> Tensor:
    """fp32 scores ``[rows, k]`` of a chunk's queries at their chosen keys, ``fill`` where there is none."""
    K, (_, N, D) = indices.shape[1], q.shape
    scores = torch.empty((chunk.rows, K), dtype=torch.float32, device=q.device)
    at = configs.PAIRS
    indexer_pairs_kernel[(chunk.rows,)](
        q,
        k,
        weights,
        indices,
        scores,
        counts,
        chunk.first,
        k.shape[0],
        scale,
        fill,
        K=K,
        N=N,
        HEADS=configs.heads(N),
        D=D,
        KEYS=at.keys,
        num_warps=at.warps,
        num_stages=at.stages,
    )
    return scores


@dataclass(frozen=True)
class Gradients:
    """Where gradients of scores are gathered."""

    dq: Tensor
    """``[T, N, D]`` in q's dtype."""
    dk: Tensor
    """``[S, D]`` fp32, added to."""
    dw: Tensor
    """``[T, N]`` fp32."""
    parts: Tensor | None = None
    """``[splits, S, D]`` fp32, added to where keys' gradients are made without atomics."""

    @staticmethod
    def of(q: Tensor, k: Tensor, *, fixed_order: bool) -> Gradients:
        wide = torch.float32
        dw = torch.empty(q.shape[:2], dtype=wide, device=q.device)
        dk = torch.zeros(() if fixed_order else k.shape, dtype=wide, device=k.device)
        shape = (configs.SPLITS, *k.shape)
        parts = torch.zeros(shape, dtype=wide, device=k.device) if fixed_order else None
        return Gradients(torch.empty_like(q), dk, dw, parts)

    def keys(self) -> Tensor:
        """dk, parts added in order."""
        return self.dk if self.parts is None else self.parts.sum(0)


def gradient(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor | None,
    g: Tensor,
    into: Gradients,
    where: Place,
    counts: Tensor,
    scale: float,
    chunk: Chunk,
) -> None:
    """Gradients from ``g``, the gradient of a chunk's scores: ``[rows, k]`` at ``indices``, or one a key seen.

    With ``indices``, dk is added up by atomics; without them by ``keys_gradient``.
    """
    (_, N, D), at = q.shape, configs.SCATTERED_GRADIENT if into.parts is None else configs.GRADIENT
    chosen = indices is not None
    indexer_gradient_kernel[(chunk.rows,)](
        q,
        k,
        weights,
        g if indices is None else indices,
        g if where.starts is None else where.starts,
        g,
        into.dq,
        into.dk,
        into.dw,
        counts,
        chunk.first,
        k.shape[0],
        g.shape[1] if chosen else chunk.stride,
        where.query_start,
        scale,
        K=1 if indices is None else indices.shape[1],
        N=N,
        HEADS=configs.heads(N),
        D=D,
        KEYS=at.keys,
        CHOSEN=chosen,
        PACKED=where.starts is not None and not chosen,
        SCATTER=into.parts is None,
        num_warps=at.warps,
        num_stages=at.stages,
    )


def keys_gradient(
    q: Tensor, k: Tensor, weights: Tensor, g: Tensor, parts: Tensor, where: Place, scale: float, chunk: Chunk
) -> None:
    """Add to ``parts`` the keys' gradients from ``g``, the gradient of all scores of a chunk."""
    (_, N, D), S, at = q.shape, k.shape[0], configs.KEYS_GRADIENT
    seen = min(S, where.query_start + chunk.first + chunk.rows)
    indexer_keys_gradient_kernel[(-(-seen // at.keys), configs.SPLITS)](
        q,
        k,
        weights,
        g if where.starts is None else where.starts,
        g,
        parts,
        chunk.first,
        chunk.rows,
        S,
        chunk.stride,
        where.query_start,
        -(-chunk.rows // configs.SPLITS),
        scale,
        N=N,
        HEADS=configs.heads(N),
        D=D,
        KEYS=at.keys,
        PACKED=where.starts is not None,
        num_warps=at.warps,
        num_stages=at.stages,
    )
