"""What the dense warm-up of an indexer needs of an attention to all keys: each query's log-sum-exp.

Libraries of dense attention keep theirs to themselves, and the loss's target is made of it. In plain torch, some
queries at a time, so that memory does not grow with T²; products in fp32, for lse weighs the heads against each other.
Legend: T queries, S keys, H heads, M attention width.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORE_BYTES = 256 * 1024**2
"""Most memory for the scores of the queries that are alive at once."""


@torch.no_grad()
def lse_of_all(q: Tensor, k: Tensor, first: Tensor, scale: float, query_start: int = 0) -> Tensor:
    """``[T, H]`` fp32, natural, of packed causal documents.

    Args:
        q: ``[T, H, M]``.
        k: ``[S, M]``, one key head.
        first: ``[T]``: first key of each query's document.
        scale: of the scores.
        query_start: place of query 0 among the keys.
    """
    T, H, M = q.shape
    wide, found = k.float(), torch.empty((T, H), dtype=torch.float32, device=q.device)
    step = max(1, SCORE_BYTES // (4 * max(1, H * k.shape[0])))
    keys = torch.arange(k.shape[0], device=q.device)
    for start in range(0, T, step):
        end = min(start + step, T)
        last = query_start + end
        scores = (q[start:end].reshape(-1, M).float() @ wide[:last].mT).unflatten(0, (-1, H)) * scale
        at = keys[query_start + start : last, None]
        seen = (keys[:last] <= at) & (keys[:last] >= first[start:end, None])
        found[start:end] = scores.masked_fill_(~seen[:, None], float("-inf")).logsumexp(-1)
    return found
