"""Row multiple to which each local expert's tokens are padded; only packed formats need more than 1."""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Axis, Draws, Violation
from shardwright.search_spaces.context import SearchContext, nearest

VALUES = (1, 8, 16, 32, 64, 128)


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    return VALUES if context.experts else (1,)


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    padding = strategy.expert_padding_tokens
    if padding in _choices(context, {}):
        return ()
    return (
        Violation(
            rule="expert-padding",
            message=f"expert padding {padding} is not a row tile"
            if context.experts
            else f"expert padding {padding}: the model has no experts",
            nearest_legal=nearest(_choices(context, {}), padding),
        ),
    )


AXIS = Axis("expert_padding_tokens", _choices, lambda s: s.expert_padding_tokens, _check, refines=True)
