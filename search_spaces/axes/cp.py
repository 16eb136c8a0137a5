"""Context parallelism: a sequence is cut into 2·cp pieces, so that causal work is even."""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Axis, Draws, Violation
from shardwright.search_spaces.context import SearchContext, divisors, nearest


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    """Degrees up to the domain: the ring of keys and values stays off the network cards."""
    left = context.world // draws["pp"]
    return tuple(
        d for d in divisors(left) if d == 1 or (d <= context.domain and context.sequence_tokens % (2 * d) == 0)
    )


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    cp, tokens = strategy.mesh.cp, context.sequence_tokens
    if cp == 1:
        return ()
    if tokens % (2 * cp) == 0:
        return ()
    legal = tuple(d for d in divisors(tokens) if tokens % (2 * d) == 0) or (1,)
    return (
        Violation(
            rule="sequence-divides",
            message=f"{tokens} tokens do not divide into 2·cp = {2 * cp} pieces",
            nearest_legal=nearest(legal, cp),
        ),
    )


AXIS = Axis("cp", _choices, lambda s: s.mesh.cp, _check)
