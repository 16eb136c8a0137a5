"""Row multiple to which each local expert's received rows are padded.

No cost falls with it: the operators that run pad in device memory themselves. So a search leaves it at 1, and a plan
has more where a person says so, or where exploring asks what it would cost.
"""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Axis, Draws, Violation, draws_of, exchanges
from shardwright.search_spaces.context import SearchContext, nearest

VALUES = (1, 8, 16, 32, 64, 128)


def _legal(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    """Rows are padded where they are received: behind a dispatch between ranks."""
    return VALUES if context.experts and exchanges(draws) else (1,)


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    return _legal(context, draws) if context.explore else (1,)


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    padding, legal = strategy.expert_padding_tokens, _legal(context, draws_of(strategy))
    if padding in legal:
        return ()
    reason = "is not a row tile" if len(legal) > 1 else "pads rows that a dispatch brings, and there is none"
    return (
        Violation(
            rule="expert-padding",
            message=f"expert padding {padding} {reason}",
            nearest_legal=nearest(legal, padding),
        ),
    )


AXIS = Axis("expert_padding_tokens", _choices, lambda s: s.expert_padding_tokens, _check, refines=True)
