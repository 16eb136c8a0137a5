"""The walk over chunks of queries: scores, target, loss and gradient of each, in bounded workspace.

Legend: T queries, S keys, N indexer heads, D indexer width, H attention heads, G key heads, k chosen keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.dsa.indexer import gradient_launches, launches
from shardwright.kernels.dsa.indexer.configs import Chunk, chunks
from shardwright.kernels.dsa.indexer.gradient_launches import Gradients
from shardwright.kernels.dsa.indexer.launches import Place
from shardwright.kernels.dsa.indexer.scores import add_keys_gradient
from shardwright.kernels.dsa.kl import configs, contract
from shardwright.kernels.dsa.kl.triton import dsa_kl_row_kernel, dsa_kl_scale_kernel, dsa_kl_target_kernel


@dataclass(frozen=True)
class Learner:
    """The indexer's side: what learns."""

    q: Tensor
    k: Tensor
    weights: Tensor
    scale: float


@dataclass(frozen=True)
class Teacher:
    """The attention's side: what gives the target."""

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float


@dataclass(frozen=True)
class Rows:
    """How a chunk's rows lie in memory, and what becomes of them."""

    K: int
    stride: int
    chosen: bool
    """Rows of K chosen keys; else of all keys that a query sees."""
    gradient: bool
    factor: float


def target(
    teacher: Teacher, indices: Tensor | None, where: Place, chunk: Chunk, out: Tensor, K: int, stride: int
) -> None:
    """Probabilities summed over heads, of a chunk's queries, into ``out``."""
    _, H, M = teacher.q.shape
    S, G, _ = teacher.k.shape
    tiles, (DA, DB) = configs.head_tiles(H, G), contract.pieces(M)
    at = configs.SPARSE_TARGET if indices is not None and G * tiles.parts == 1 else configs.TARGET
    dsa_kl_target_kernel[(chunk.rows,)](
        teacher.q,
        teacher.k,
        teacher.lse,
        out if indices is None else indices,
        out if where.starts is None else where.starts,
        out,
        chunk.first,
        S,
        stride,
        where.query_start,
        teacher.scale,
        K=K,
        H=H,
        G=G,
        HEADS=tiles.heads,
        PARTS=tiles.parts,
        DA=DA,
        DB=DB,
        KEYS=at.keys,
        CHOSEN=indices is not None,
        PACKED=where.starts is not None and indices is None,
        num_warps=at.warps,
        num_stages=at.stages,
    )


def row_losses(
    scores: Tensor,
    mass: Tensor,
    losses: Tensor,
    counts: Tensor,
    where: Place,
    chunk: Chunk,
    rows: Rows,
) -> None:
    """Losses of a chunk's queries; their scores become gradients."""
    dsa_kl_row_kernel[(chunk.rows,)](
        scores,
        mass,
        scores if where.starts is None else where.starts,
        losses,
        counts,
        chunk.first,
        rows.stride,
        where.query_start,
        rows.factor,
        K=rows.K,
        CHOSEN=rows.chosen,
        PACKED=where.starts is not None and not rows.chosen,
        GRADIENT=rows.gradient,
        BLOCK=configs.ROW_BLOCK,
        num_warps=configs.ROW_WARPS,
    )


def sparse(
    learner: Learner,
    teacher: Teacher,
    indices: Tensor,
    where: Place,
    counts: Tensor,
    losses: Tensor,
    into: Gradients | None,
    factor: float,
) -> None:
    """Loss over chosen keys: scores and target of k keys a query, ``configs.ROW_BYTES`` each at most."""
    q, k, weights = learner.q, learner.k, learner.weights
    T, K = indices.shape
    step = configs.chunk_rows(T, K)
    mass = torch.empty((min(step, T), K), dtype=torch.float32, device=q.device)
    for first in range(0, T, step):
        chunk = Chunk(first, min(step, T - first), K)
        scores = gradient_launches.pairs(q, k, weights, indices, counts, learner.scale, float("-inf"), chunk)
        target(teacher, indices, where, chunk, mass, K, K)
        rows = Rows(K, K, chosen=True, gradient=into is not None, factor=factor)
        row_losses(scores, mass, losses, counts, where, chunk, rows)
        if into is not None:
            gradient_launches.gradient(q, k, weights, indices, scores, into, where, counts, learner.scale, chunk)
            if into.parts is not None:
                piece = slice(first, first + chunk.rows)
                mine = (q[piece], k, weights[piece], indices[piece], scores)
                add_keys_gradient(*mine, into.parts, learner.scale)


def dense(
    learner: Learner,
    teacher: Teacher,
    where: Place,
    counts: Tensor,
    losses: Tensor,
    into: Gradients | None,
    factor: float,
) -> None:
    """Loss over all seen keys: the warm-up. Scores and target of some queries at a time; a fixed order."""
    q, k, weights = learner.q, learner.k, learner.weights
    plan = chunks(q.shape[0], where.query_start, configs.ROW_BYTES)
    most = max(c.rows * c.stride for c in plan)
    scores, mass = (torch.empty(most, dtype=torch.float32, device=q.device) for _ in range(2))
    score = launches.scorer(q, k, weights, where, learner.scale, 0)
    for chunk in plan:
        score(chunk, scores)
        target(teacher, None, where, chunk, mass, 1, chunk.stride)
        rows = Rows(1, chunk.stride, chosen=False, gradient=into is not None, factor=factor)
        row_losses(scores, mass, losses, counts, where, chunk, rows)
        if into is not None and into.parts is not None:
            gradient_launches.gradient(q, k, weights, None, scores, into, where, counts, learner.scale, chunk)
            gradient_launches.keys_gradient(q, k, weights, scores, into.parts, where, learner.scale, chunk)


def scaled(part: Tensor, scale: Tensor, power: float, dtype: torch.dtype) -> Tensor:
    """``part · scale · power`` in ``dtype``; ``scale`` is one fp32 value on the device."""
    y = torch.empty(part.shape, dtype=dtype, device=part.device)
    n = part.numel()
    if n:
        with device.current(part):
            dsa_kl_scale_kernel[(-(-n // configs.SCALE_BLOCK),)](
                part, scale, y, n, power, BLOCK=configs.SCALE_BLOCK, num_warps=configs.SCALE_WARPS
            )
    return y
