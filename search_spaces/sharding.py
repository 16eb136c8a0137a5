"""How the runtime spreads parameters: the one rule that legality, memory and communication share.

Legend: E experts, I expert width, e = EP degree, t_x = expert TP degree, z = shards of one EP rank's experts.
Non-expert parameters and their adapters: split by tp, FSDP over shard × ep × cp. Expert stacks ``[E, 2I, H]``
and ``[E, H, I]`` and their adapters: dim 0 split over ep, widths over expert_tp, what is left split by FSDP
over z = shard × tp × cp / expert_tp. A group of one rank is not wrapped: nothing is gathered and nothing is
copied. Replicas hold copies.
"""

from __future__ import annotations

import numpy as np

from shardwright.schemas.profile import ModelShape
from shardwright.search_spaces.cost.plans import Array, Plans


def shard_dim(local: int, shards: int, rows: int, columns: int) -> int:
    """Dimension on which FSDP splits a local stack ``[E / e, rows, columns]``.

    0 while every shard rank gets at least one expert, else 1 or 2 where that divides evenly, else 0
    with padding. Replicas never count: only z is compared with E / e.
    """
    if local >= shards:
        return 0
    return next((dim for dim, size in ((1, rows), (2, columns)) if size % shards == 0), 0)


def padding_factor(shape: ModelShape, ep: int, shards: int) -> float:
    """Stored over real expert values per rank.

    ``ceil(n / z) · z / n`` where a stack is split on dim 0, with n = E / e; 1 elsewhere. Two thirds of the
    values stand in ``[E, 2I, H]``, one third in ``[E, H, I]``.
    """
    if shape.num_experts == 0:
        return 1.0
    hidden, width = shape.expert_hidden_size or shape.hidden_size, shape.expert_intermediate_size
    local = max(shape.num_experts // ep, 1)
    padded = -(-local // shards) * shards / local

    def factor(inner: int, outer: int) -> float:
        return padded if shard_dim(local, shards, inner, outer) == 0 else 1.0

    return (2 * factor(2 * width, hidden) + factor(hidden, width)) / 3


def padding_factors(shape: ModelShape, plans: Plans) -> Array:
    """``padding_factor`` of every plan."""
    pairs = np.stack([plans.ep, plans.expert_shards]).astype(np.int64)
    unique, inverse = np.unique(pairs, axis=1, return_inverse=True)
    known = np.array([padding_factor(shape, int(ep), int(shards)) for ep, shards in unique.T])
    return known[inverse.reshape(-1)]
