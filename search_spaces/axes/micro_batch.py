"""Sequences that one rank runs at once."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, no_rule
from shardwright.search_spaces.context import SearchContext, divisors


def sequences_per_rank(context: SearchContext, draws: Draws) -> int | None:
    """Sequences of one optimizer step on one rank; ``None`` where the batch does not divide."""
    ranks = draws["replicate"] * draws["shard"] * draws["ep"]
    return context.global_batch // ranks if context.global_batch % ranks == 0 else None


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    sequences = sequences_per_rank(context, draws)
    return divisors(sequences) if sequences else ()


AXIS = Axis("micro_batch_sequences", _choices, lambda s: s.micro_batch_sequences, no_rule)
