"""Tensor parallelism: heads are split. The cost model covers degree 1."""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Axis, Draws, Violation
from shardwright.search_spaces.context import SearchContext, divisors, nearest


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    return (1,)


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    heads, tp = context.profile.shape.num_attention_heads, strategy.mesh.tp
    if tp == 1 or (heads and heads % tp == 0):
        return ()
    return (
        Violation(
            rule="heads-divide",
            message=f"tp {tp} does not divide {heads} attention heads",
            nearest_legal=nearest(divisors(heads) if heads else (1,), tp),
        ),
    )


AXIS = Axis("tp", _choices, lambda s: s.mesh.tp, _check)
