"""Micro-batches in one optimizer step; follows from the batch, the mesh and the micro-batch."""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Axis, Draws, Violation
from shardwright.search_spaces.axes.micro_batch import sequences_per_rank
from shardwright.search_spaces.context import SearchContext


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    sequences = sequences_per_rank(context, draws)
    micro = draws["micro_batch_sequences"]
    return (sequences // micro,) if sequences and sequences % micro == 0 else ()


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    planned, wanted = strategy.global_batch_sequences(), context.global_batch
    if planned == wanted:
        return ()
    ranks = strategy.mesh.data_ranks
    below, above = wanted // ranks * ranks, -(-wanted // ranks) * ranks
    if below == above:
        legal: tuple[str, ...] = (f"micro_batch_sequences × accumulation_steps = {wanted // ranks}",)
    else:
        legal = tuple(f"global_batch_sequences = {batch}" for batch in (below, above) if batch)
    return (
        Violation(
            rule="global-batch",
            message=(
                f"{ranks} data ranks × micro-batch {strategy.micro_batch_sequences} × {strategy.accumulation_steps} "
                f"accumulation steps are {planned} sequences; the recipe asks for {wanted}"
            ),
            nearest_legal=legal,
        ),
    )


AXIS = Axis("accumulation_steps", _choices, lambda s: s.accumulation_steps, _check)
