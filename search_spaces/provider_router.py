"""What eager torch and torch.compile cost for a router after its product.

Legend: T tokens, E experts, k chosen experts, n scores, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.router.cost import PICK_BYTES
from shardwright.kernels.router.cost import cost as router_cost
from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.provider_chain import BYTES, Moves, described


def router(provider: str, dtype: str, T: int, E: int, k: int) -> OpCost:
    """Scores in fp32 over ``[T, E]``, choice of k, their sum and share.

    Eager: cast, scores, selection and its sort, sum, division, cast. Compiled: the selection stays a library call,
    with one kernel before it and one after.
    """
    ours, b = router_cost(T, E, k, dtype), BYTES[dtype]
    n, f = T * E, 4 * T * E
    picks, chosen = T * k * PICK_BYTES, 4 * T * k
    widen = [(n * b, f)] if b != 4 else []
    choose: Moves = [(f, picks), (picks, picks)]
    if provider == "eager":
        forward = [*widen, (f, f), *choose, (chosen, 4 * T), (chosen + 4 * T, chosen), (chosen, T * k * b)]
        shares: Moves = [(T * k * b, chosen), (2 * chosen, chosen), (3 * chosen, 4 * T), (chosen + 4 * T, chosen)]
        narrow = [(f, n * b)] if b != 4 else []
        backward = [*shares, (0, f), (picks, chosen), (2 * f, f), *narrow]
        saved = f + picks
    else:
        forward = [(n * b, f), *choose, (chosen, T * k * b)]
        backward = [(T * k * b + picks, chosen), (0, f), (picks, chosen), (2 * f, n * b)]
        saved = f + picks
    return described(ours, provider, forward, backward, saved)
