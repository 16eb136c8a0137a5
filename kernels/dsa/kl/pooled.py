"""The loss of an indexer that scores pools of keys: how far its shares of pools are from the attention's.

A pool's target is the attention's probability of its tokens, summed over heads and tokens, and normalised over the
pools that were chosen. Tokens that every query attends to without choosing (those of a pool not yet whole) belong to no
pool, so neither side counts them. The gradient of a pool's score is ``softmax(I) - p``; the target has none.

The target is made by the kernel of the loss over keys, chunk by chunk; what is kept of it is ``[T, C]``.

Legend: T queries, S keys, N indexer heads, D indexer width, H attention heads, G key heads, M attention width, L pools,
C chosen pools of a query, P tokens of a pool.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.kernels import device, guards
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.dsa.indexer import alarms
from shardwright.kernels.dsa.indexer.configs import Chunk
from shardwright.kernels.dsa.indexer.contract import check
from shardwright.kernels.dsa.indexer.launches import Place
from shardwright.kernels.dsa.indexer.op import default_scale, indexer_scores
from shardwright.kernels.dsa.kl import configs, contract, walk


@torch.library.custom_op("shardwright::dsa_kl_pooled_target", mutates_args=())
def pooled_target(
    q_main: Tensor, k_main: Tensor, lse: Tensor, tokens: Tensor, pool: int, attention_scale: float
) -> Tensor:
    """``[T, C]`` fp32: probabilities of each chosen pool's tokens, summed over heads, not normalised.

    Raises:
        KernelError: as ``indexer.contract.check``.
    """
    given = {"q_main": q_main, "k_main": k_main, "lse": lse, "tokens": tokens}
    check({"q": q_main, **given}, interpreted=device.interpreted(), name=contract.NAME)
    T, K = tokens.shape
    found = torch.empty((T, K // pool), dtype=torch.float32, device=q_main.device)
    teacher, where = walk.Teacher(q_main, k_main, lse, attention_scale), Place(0, None)
    step = configs.chunk_rows(T, K)
    mass = torch.empty((min(step, T), K), dtype=torch.float32, device=q_main.device)
    with device.current(q_main):
        for first in range(0, T, step):
            chunk = Chunk(first, min(step, T - first), K)
            walk.target(teacher, tokens, where, chunk, mass, K, K)
            rows = mass[: chunk.rows].unflatten(1, (-1, pool))
            torch.sum(rows, -1, out=found[first : first + chunk.rows])
    return found


@pooled_target.register_fake
def _(q_main: Tensor, k_main: Tensor, lse: Tensor, tokens: Tensor, pool: int, attention_scale: float) -> Tensor:
    return q_main.new_empty((tokens.shape[0], tokens.shape[1] // pool), dtype=torch.float32)


def dsa_pooled_kl(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    q_main: Tensor,
    k_main: Tensor,
    lse: Tensor,
    chosen: Tensor,
    tokens: Tensor,
    *,
    attention_scale: float,
    scale: float | None = None,
    deterministic: bool = False,
) -> Tensor:
    """``KL(p ‖ softmax(I))`` over each query's chosen pools, mean over queries.

    Args:
        q: the indexer's ``[T, N, D]``.
        keys: ``[L, D]``, one a pool, L at most T.
        weights: ``[T, N]``.
        q_main, k_main, lse, attention_scale: as of ``op.dsa_kl``; lse counts all that a query attends to.
        chosen: ``[T, C]`` int32 pools, -1 for nothing.
        tokens: ``[T, C · P]`` int32: the P keys of each chosen pool in order, -1 where there is no pool.
        scale: of the indexer's scores; ``(N · D)^-0.5`` where ``None``.
        deterministic: gradients of keys in a fixed order in place of fp32 atomics.

    Returns:
        fp32 scalar; a query without pools counts with loss 0.

    Raises:
        KernelError: an input outside the contract; ``index-out-of-range`` for a pool that is none, ``nan-scores``;
            ``bad-pools`` where tokens are not whole pools, or there are more pools than queries.
    """
    T, L = q.shape[0], keys.shape[0]
    if chosen.dim() != 2 or tokens.dim() != 2 or not chosen.shape[1] or tokens.shape[1] % chosen.shape[1] or L > T:
        what = f"chosen is {list(chosen.shape)}, tokens are {list(tokens.shape)}, {L} pools of {T} tokens"
        raise guards.refuse(contract.NAME, "bad-pools", what, "pass chosen [T, C], tokens [T, C · P] and T // P keys")
    padded = F.pad(keys, (0, 0, 0, T - L))
    contract.check_static(
        q,
        padded,
        weights,
        q_main,
        k_main,
        lse,
        tokens,
        attention_scale=attention_scale,
        query_start=0,
        reduction="mean",
        main_learns=wants_gradient(q_main, k_main, lse),
    )
    scale = default_scale(q) if scale is None else scale
    scores = indexer_scores(q, padded, weights, chosen, scale=scale, deterministic=deterministic)
    mass = pooled_target(q_main, k_main, lse, tokens, tokens.shape[1] // chosen.shape[1], attention_scale)
    rows = _row_losses(mass, scores, chosen >= 0)
    if direct(rows):
        counts = alarms.fresh(rows)
        counts[alarms.NAN_ROWS] = rows.detach().isnan().sum()
        alarms.watch(counts, contract.NAME)
    return rows.sum() / max(1, T)


def _row_losses(mass: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    """``[T]``: each row's divergence over what it sees; 0 of a row without mass, NaN of one with a NaN in it."""
    total = mass.sum(-1, keepdim=True)
    target = torch.where(total == 0, 0.0, mass / total)
    shown = scores.masked_fill(~seen, float("-inf")).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    log_shares = shown.log_softmax(-1).masked_fill(~seen, 0.0)
    return (torch.xlogy(target, target) - target * log_shares).sum(-1)
