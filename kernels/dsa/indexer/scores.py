"""Scores at chosen keys and their gradient (LIG) as torch operators, plain and traced.

Legend: T queries, S keys, N indexer heads, D head width, R rotated dims, k chosen keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.dsa.indexer import alarms, configs, contract, gradient_launches
from shardwright.kernels.dsa.indexer.configs import Chunk
from shardwright.kernels.dsa.indexer.gradient_launches import Gradients
from shardwright.kernels.dsa.indexer.launches import Place


def compute_scores(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, scale: float) -> Tensor:
    """Guards and launch of the scores at chosen keys; 0 where the index is -1."""
    tensors = {"q": q, "k": k, "weights": weights, "indices": indices}
    contract.check(tensors, interpreted=device.interpreted())
    T, counts = q.shape[0], alarms.fresh(q)
    if T == 0:
        return torch.empty(indices.shape, dtype=torch.float32, device=q.device)
    with device.current(q):
        scores = gradient_launches.pairs(q, k, weights, indices, counts, scale, 0.0, Chunk(0, T, 0))
    alarms.watch(counts)
    return scores


def compute_scores_backward(
    g: Tensor, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, scale: float, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """LIG: dq, dk, dw in their inputs' dtypes. An expanded gradient is made real rows first."""
    g = g.to(torch.float32).contiguous()
    into = Gradients.of(q, k, fixed_order=deterministic)
    T, counts = q.shape[0], alarms.fresh(q)
    if T == 0:
        into.dw.zero_()
    else:
        with device.current(q):
            gradient_launches.gradient(q, k, weights, indices, g, into, Place(0, None), counts, scale, Chunk(0, T, 0))
            if into.parts is not None:
                add_keys_gradient(q, k, weights, indices, g, into.parts, scale)
    return into.dq, into.keys().to(k.dtype), into.dw.to(weights.dtype)


def add_keys_gradient(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, g: Tensor, parts: Tensor, scale: float
) -> None:
    """dk of chosen keys in a fixed order: their gradients are spread over rows of all keys, some queries at a time.

    Costs as much as the gradient of all scores; workspace ``configs.SCORE_BYTES``.
    """
    T, S = q.shape[0], k.shape[0]
    stride = configs.round_up(S, configs.ALIGN)
    rows = max(1, configs.SCORE_BYTES // (4 * stride))
    for first in range(0, T, rows):
        chunk = Chunk(first, min(rows, T - first), stride)
        piece = slice(first, first + chunk.rows)
        spread = torch.zeros((chunk.rows, stride), dtype=torch.float32, device=q.device)
        real = (indices[piece] >= 0) & (indices[piece] < S)
        at = torch.where(real, indices[piece], 0).long()
        spread.scatter_add_(1, at, torch.where(real, g[piece], 0.0))
        # Every key counts as seen: what is not chosen has gradient 0.
        gradient_launches.keys_gradient(q, k, weights, spread, parts, Place(S, None), scale, chunk)


class IndexerScores(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, scale: float, deterministic: bool
    ) -> Tensor:
        ctx.save_for_backward(q, k, weights, indices)
        ctx.settings = (scale, deterministic)
        return compute_scores(q, k, weights, indices, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dw = compute_scores_backward(g, *ctx.saved_tensors, *ctx.settings)
        return dq, dk, dw, None, None, None


@torch.library.custom_op("shardwright::dsa_indexer_scores", mutates_args=())
def dsa_indexer_scores(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, scale: float, deterministic: bool
) -> Tensor:
    """Scores at chosen keys as one opaque node for tracers."""
    return compute_scores(q, k, weights, indices, scale)


@dsa_indexer_scores.register_fake
def _(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, scale: float, deterministic: bool) -> Tensor:
    return q.new_empty(indices.shape, dtype=torch.float32)


@torch.library.custom_op("shardwright::dsa_indexer_scores_backward", mutates_args=())
def dsa_indexer_scores_backward(
    g: Tensor, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, scale: float, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """LIG as one opaque node for tracers."""
    return compute_scores_backward(g, q, k, weights, indices, scale, deterministic)


@dsa_indexer_scores_backward.register_fake
def _(
    g: Tensor, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, scale: float, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(weights)


def _save_scores(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _differentiate_scores(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dw = dsa_indexer_scores_backward(g, *ctx.saved_tensors, *ctx.settings)
    return dq, dk, dw, None, None, None


dsa_indexer_scores.register_autograd(_differentiate_scores, setup_context=_save_scores)
