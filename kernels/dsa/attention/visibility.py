"""Which keys each query of a packed batch may see: bounds for blocks, and for the check of single keys.

Legend: T queries, S keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.kernels import guards
from shardwright.kernels.dsa.attention.contract import NAME


def bounds_of(
    T: int,
    device: torch.device | str,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    *,
    causal: bool = True,
    first_query: int = 0,
    keys: int | None = None,
) -> Tensor:
    """``[T, 2]`` int32: the first key that a query may see, and the one past its last.

    Args:
        T: queries on this rank.
        cu_seqlens: ends of the packed documents over the keys, ``0 = c₀ < c₁ < … = keys``; one document where
            ``None``. A tensor's values are read on the host: call this once a batch.
        causal: a query sees its document up to itself; else all of it.
        first_query: position of the first query in the packed keys: a rank of context parallelism owns a run.
        keys: packed keys; ``first_query + T`` where ``None``.

    Raises:
        KernelError: ``cu-seqlens-unsorted`` or ``wrong-shape``.
    """
    S = first_query + T if keys is None else keys
    if first_query < 0 or first_query + T > S:
        what = f"queries {first_query} to {first_query + T} of {S} keys"
        raise guards.refuse(NAME, "wrong-shape", what, "pass the position of the rank's first query")
    ends = [0, S] if cu_seqlens is None else [int(end) for end in cu_seqlens]
    rising = len(ends) > 1 and all(a < b for a, b in itertools.pairwise(ends))
    if not (ends == [0, 0] and S == 0) and not (rising and ends[0] == 0 and ends[-1] == S):
        what = f"cu_seqlens is {ends[:8]}{'…' if len(ends) > 8 else ''} for {S} keys"
        raise guards.refuse(NAME, "cu-seqlens-unsorted", what, f"pass 0, rising ends, {S}")
    edges = torch.tensor(ends, dtype=torch.int64)
    at = torch.arange(first_query, first_query + T)
    document = torch.searchsorted(edges, at, right=True) - 1
    last = at + 1 if causal else edges[(document + 1).clamp(max=len(ends) - 1)]
    return torch.stack([edges[document], last], 1).to(torch.int32).to(device)
