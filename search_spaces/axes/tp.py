"""Tensor parallelism: heads are split, tokens between blocks are spread over the same ranks."""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Axis, Draws, Violation
from shardwright.search_spaces.context import SearchContext, divisors, nearest


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    """Degrees up to the load/store domain: eight collectives a layer do not cross network cards."""
    heads = context.profile.shape.num_attention_heads
    left, cp = context.world // (draws["pp"] * draws["cp"]), draws["cp"]
    return tuple(
        d
        for d in divisors(left)
        if d == 1
        or (d * cp <= context.domain and heads and heads % d == 0 and context.sequence_tokens % (2 * cp * d) == 0)
    )


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    heads, tp = context.profile.shape.num_attention_heads, strategy.mesh.tp
    if tp == 1:
        return ()
    if not heads or heads % tp:
        return (
            Violation(
                rule="heads-divide",
                message=f"tp {tp} does not divide {heads} attention heads",
                nearest_legal=nearest(divisors(heads) if heads else (1,), tp),
            ),
        )
    return ()


AXIS = Axis("tp", _choices, lambda s: s.mesh.tp, _check)
