"""The choice at the join: the search's best and its rivals, each with its own fused operators."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.schemas.fusion import FusionProposal
from shardwright.schemas.plan import Alternative, SearchRecord
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.workflows.planning import Inputs, Joined, certify, does_not_fit, fitting
from shardwright.workflows.stages import Stages

MOST = 13
"""Strategies that are re-certified and priced for one plan: the best, eight rivals, four further meshes."""


@dataclass(frozen=True)
class Chosen:
    """A strategy that fits, its rivals and the story of the choice."""

    joined: Joined
    alternatives: tuple[Alternative, ...]
    explanation: tuple[str, ...]


def choose(
    stages: Stages,
    inputs: Inputs,
    proposals: tuple[FusionProposal, ...],
    best: ParallelStrategy,
    alternatives: tuple[Alternative, ...],
    further: tuple[ParallelStrategy, ...],
    record: SearchRecord,
    explanation: tuple[str, ...],
) -> Chosen:
    """The strategy with the fastest step as run.

    Where no strategy gets a fused operator, what the search found stands as it is.

    Args:
        further: strategies of other meshes that the search did not list.
        explanation: the search's own story, of its best.

    Raises:
        LegalityError: as ``planning.certify``.
        InfeasibleError: as ``planning.fitting``, of the search's best, where nothing fits.
    """

    def certified(strategy: ParallelStrategy) -> Joined:
        return certify(
            stages, inputs.profile, inputs.recipe, inputs.cluster, inputs.targets, proposals, _placed(stages, strategy)
        )

    first = certified(best)
    rivals = tuple(map(certified, [*(one.strategy for one in alternatives), *further][: MOST - 1]))
    joined = (first, *rivals)
    if not any(one.fused for one in joined):
        return Chosen(fitting(first), alternatives, explanation)
    listed = alternatives[: len(rivals)]
    plain = (_listed(first), *listed, *map(_listed, rivals[len(listed) :]))
    ranked = stages.rerank(plain, tuple(one.cost for one in joined), record, inputs.cluster)
    chosen = joined[ranked.chosen]
    if not chosen.cost.feasible:
        raise does_not_fit(first)
    return Chosen(chosen, ranked.alternatives, ranked.explanation)


def _placed(stages: Stages, strategy: ParallelStrategy) -> ParallelStrategy:
    """With places for its experts, where it places them by loads and has none yet."""
    if stages.place is None or strategy.expert_placement != "balanced" or strategy.expert_slots:
        return strategy
    return stages.place(strategy)


def _listed(joined: Joined) -> Alternative:
    """A strategy's figures as the search lists rivals: without fused operators, and without places of experts."""
    cost = joined.eager
    return Alternative(
        strategy=joined.strategy.model_copy(update={"expert_slots": ()}),
        step_ms=cost.time.step_ms,
        reserved_bytes=cost.memory.reserved_bytes,
        gpu_hours=cost.gpu_hours,
        feasible=cost.feasible,
        pareto=False,
        lost_because="",
    )
