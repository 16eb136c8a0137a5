"""The gate of one family's feed-forward that other families do not have.

Kimi K3 (``checkpoints/models/kimi_k3``): its gate is SiTU.

Legend: T tokens, I width of the gate; b bytes a value.
"""

from __future__ import annotations

from functools import lru_cache

from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.workload import Workload
from shardwright.search_spaces.providers import PROVIDERS, provider_cost

COUNTED_TOKENS = 4096
"""Tokens at which bytes are counted: they grow with tokens alone."""

FAMILY_GATES = {"kimi_k3": "situ"}
"""Operator of a gated feed-forward where it is not ``swiglu``."""

Moved = tuple[float, float]
"""Of a forward and a backward."""


def gate_cost(work: Workload, fused: FusedProviders, tokens: int, width: int) -> OpCost:
    """The gate of a dense feed-forward, ``[tokens, width]``."""
    op = FAMILY_GATES.get(work.profile.model_type, "swiglu")
    if op == "swiglu":
        return fused.cost(op, {"T": tokens, "I": width}, work.dtype)
    chosen = fused.provider("activation")
    return provider_cost(op, chosen if chosen in PROVIDERS else "eager", {"T": tokens, "I": width}, work.dtype)


@lru_cache(maxsize=64)
def eager_gate(model_type: str, dtype: str) -> tuple[Moved, Moved]:
    """(bytes, kernels) of an eager gate, of one value of its result."""
    op = FAMILY_GATES.get(model_type, "swiglu")
    cost = provider_cost(op, "eager", {"T": COUNTED_TOKENS, "I": 1}, dtype)
    forward, backward = (
        ((one.bytes_read + one.bytes_written) / COUNTED_TOKENS, float(one.launches))
        for one in (cost.forward, cost.backward or cost.forward)
    )
    return (forward[0], backward[0]), (forward[1], backward[1])
