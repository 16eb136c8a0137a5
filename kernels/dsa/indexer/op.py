"""The lightning indexer as torch operators: the choice, its scores with their gradient (LIG), and rotation.

``dsa_indexer`` chooses and has no gradient. ``indexer_scores`` gives the scores at chosen keys, differentiable in q,
k and weights. Rotation: pass q and k rotated already, or with ``cos`` and ``sin`` and the layout's name; then they
are rotated here in fp32, rounded once, and gradients are turned back.

Legend: T queries, S keys, N indexer heads, D head width, R rotated dims, k chosen keys.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.dsa.indexer import alarms, contract, launches
from shardwright.kernels.dsa.indexer.rotation import rotated
from shardwright.kernels.dsa.indexer.scores import IndexerScores, compute_scores, dsa_indexer_scores


def default_scale(q: Tensor) -> float:
    """``(N · D)^-0.5``: the softmax scale and the mean over heads of DeepSeek-V3.2 and GLM-5."""
    return float((q.shape[1] * q.shape[2]) ** -0.5)


def compute_choice(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor | None,
    top_k: int,
    scale: float,
    query_start: int,
    precision: str,
) -> Tensor:
    """Guards and launches of the choice."""
    contract.check({"q": q, "k": k, "weights": weights}, interpreted=device.interpreted())
    counts = alarms.fresh(q)
    with torch.no_grad():
        where = launches.place(q.shape[0], k.shape[0], query_start, cu_seqlens, counts)
        indices = launches.choose(q, k, weights, top_k, where, counts, precision == "fp8", scale)
    alarms.watch(counts)
    return indices


@torch.library.custom_op("shardwright::dsa_indexer_choice", mutates_args=())
def dsa_indexer_choice(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor | None,
    top_k: int,
    scale: float,
    query_start: int,
    precision: str,
) -> Tensor:
    """The choice as one opaque node for tracers."""
    return compute_choice(q, k, weights, cu_seqlens, top_k, scale, query_start, precision)


@dsa_indexer_choice.register_fake
def _(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor | None,
    top_k: int,
    scale: float,
    query_start: int,
    precision: str,
) -> Tensor:
    return q.new_empty((q.shape[0], top_k), dtype=torch.int32)


def dsa_indexer(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    top_k: int,
    scale: float | None = None,
    query_start: int = 0,
    cu_seqlens: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    layout: str = "half-split",
    precision: str = "exact",
) -> Tensor:
    """The best keys of every query by ``I[t, s] = scale · Σ_h w[t, h] · ReLU(q[t, h] · k[s])``.

    Exact for its own fp32 scores: no key left out scores higher than one taken, the smaller key wins a tie, and
    -0.0 ties with 0.0. Workspace: 256 MiB of scores at most, whatever T; the same input gives the same bits.

    Args:
        q: ``[T, N, D]``, N up to 64, D 16, 32, 64 or 128; bf16 or fp16, contiguous.
        k: ``[S, D]`` of the same dtype.
        weights: ``[T, N]`` in these dtypes or fp32.
        top_k: 1 to 2,048. A query that sees fewer keys takes all of them.
        scale: positive; ``(N · D)^-0.5`` where ``None``.
        query_start: position of query 0 among the keys; query t sees keys up to ``query_start + t``.
        cu_seqlens: ``[B + 1]`` bounds of packed sequences over the keys; a query sees its own one only.
        cos, sin: ``[S, R / 2]`` fp32, row s for key s; q and k are rotated here where given.
        layout: ``half-split`` (DeepSeek-V3.2) or ``interleaved`` (GLM-5).
        precision: ``exact``, or ``fp8``: q and k rounded to e4m3 with one scale a head of a query and a key. The
            choice is then exact for the rounded scores, an approximation of these.

    Returns:
        ``[T, top_k]`` int32 positions in k, ascending, -1 behind them. No gradient.

    Raises:
        KernelError: an input outside the contract; ``nan-scores`` (see ``alarms``).
    """
    contract.check_scored(q, k, weights)
    scale = default_scale(q) if scale is None else scale
    contract.check_static(q, k, weights, top_k=top_k, query_start=query_start, scale=scale, precision=precision)
    with torch.no_grad():
        q, k = rotated(q, k, cos, sin, layout, query_start)
        given = (q, k, weights, cu_seqlens, top_k, scale, query_start, precision)
        return compute_choice(*given) if direct(q, k, weights) else dsa_indexer_choice(*given)


def indexer_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    *,
    scale: float | None = None,
    query_start: int = 0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    layout: str = "half-split",
    deterministic: bool = False,
) -> Tensor:
    """Scores at chosen keys, differentiable: the forward of LIG.

    Args:
        indices: ``[T, k]`` int32, -1 anywhere for nothing.
        deterministic: make dk in a fixed order, at the cost of the gradient of all scores; else fp32 atomics.

    Returns:
        ``[T, k]`` fp32, 0 where the index is -1.

    Raises:
        KernelError: an input outside the contract; ``index-out-of-range`` (see ``alarms``).
    """
    contract.check_scored(q, k, weights)
    contract.check_selection(q, indices)
    contract.check_place(q, k, query_start)
    scale = default_scale(q) if scale is None else scale
    q, k = rotated(q, k, cos, sin, layout, query_start)
    if not direct(q, k, weights, indices):
        return dsa_indexer_scores(q, k, weights, indices, scale, deterministic)
    if not wants_gradient(q, k, weights):
        return compute_scores(q, k, weights, indices, scale)
    return cast(Tensor, IndexerScores.apply(q, k, weights, indices, scale, deterministic))
