"""The choice at the join: the best strategies as they run, each with its own fused operators."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.schemas.fusion import FusionDecision, FusionProposal
from shardwright.schemas.plan import Alternative, SearchRecord
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.cost.fusion import operator_of
from shardwright.workflows.certifying import Joined, certify, does_not_fit, fitting
from shardwright.workflows.planning import Inputs
from shardwright.workflows.report.units import size
from shardwright.workflows.stages import Stages

FUSED_TRIALS = 64
"""Most trials of the second study, which prices strategies as they run; never more than the first one's."""
MOST = 13
"""Strategies that are certified whole and priced for one plan: the first search's best, and the best as run."""


@dataclass(frozen=True)
class Chosen:
    """A strategy that fits, its rivals and the story of the choice."""

    joined: Joined
    alternatives: tuple[Alternative, ...]
    record: SearchRecord
    explanation: tuple[str, ...]


def choose(
    stages: Stages,
    inputs: Inputs,
    proposals: tuple[FusionProposal, ...],
    best: ParallelStrategy,
    alternatives: tuple[Alternative, ...],
    record: SearchRecord,
    explanation: tuple[str, ...],
) -> Chosen:
    """The strategy with the fastest step as run.

    Where no strategy gets a fused operator, what the search found stands as it is.

    Args:
        best: of the search without fused operators.
        explanation: the search's own story, of its best.

    Raises:
        LegalityError: as ``certifying.certify``.
        InfeasibleError: nothing fits, fused operators counted.
    """

    def certified(strategy: ParallelStrategy) -> Joined:
        return certify(
            stages, inputs.profile, inputs.recipe, inputs.cluster, inputs.targets, proposals, _placed(stages, strategy)
        )

    def decisions(strategy: ParallelStrategy) -> tuple[FusionDecision, ...]:
        return stages.recertify(proposals, strategy, inputs.cluster, inputs.recipe)[1]

    again = stages.search_fused(
        inputs.profile,
        inputs.recipe,
        inputs.cluster,
        inputs.targets,
        decisions,
        best,
        trials=max(1, min(record.trials, FUSED_TRIALS)),
    )
    if again is None:
        return Chosen(fitting(certified(best)), alternatives, record, explanation)
    known = {_unplaced(one): one for one in (best, *again.strategies, *(rival.strategy for rival in alternatives))}
    joined = tuple(certified(strategy) for strategy in list(known.values())[:MOST])
    record = record.model_copy(update={"fused_feasible_strategies": again.feasible})
    plain = tuple(map(_listed, joined))
    ranked = stages.rerank(plain, tuple(one.cost for one in joined), record, inputs.cluster)
    chosen = joined[ranked.chosen]
    if not chosen.cost.feasible:
        raise does_not_fit(chosen)
    return Chosen(chosen, ranked.alternatives, record, (*_only_fused(stages, inputs, chosen), *ranked.explanation))


def _only_fused(stages: Stages, inputs: Inputs, chosen: Joined) -> tuple[str, ...]:
    """A sentence where the strategy does not fit without fused operators, with those that it cannot do without."""
    if chosen.eager.feasible:
        return ()
    memory, needed = chosen.eager.memory, needed_operators(stages, inputs, chosen)
    if needed:
        which, refused = f": {', '.join(needed)}", "a plan without " + ("it" if len(needed) == 1 else "one of them")
    else:
        which, refused = ", any one of which may go", "a plan with too few of them"
    return (
        f"This strategy fits only with fusions{which}. Without fused operators it needs {size(memory.reserved_bytes)} "
        f"a rank and {size(memory.budget_bytes)} are usable; {refused} is refused.",
    )


def needed_operators(stages: Stages, inputs: Inputs, chosen: Joined) -> tuple[str, ...]:
    """Fused operators without which, each by itself, the strategy does not fit; by name."""

    def fits_without(operator: str) -> bool:
        rest = tuple(fusion for fusion in chosen.fusions if operator_of(fusion) != operator)
        strategy, targets = chosen.strategy, inputs.targets
        return stages.estimate(inputs.profile, inputs.recipe, inputs.cluster, strategy, targets, rest).feasible

    operators = sorted({operator_of(fusion) for fusion in chosen.fusions if fusion.provider != "eager"})
    return tuple(operator for operator in operators if not fits_without(operator))


def _unplaced(strategy: ParallelStrategy) -> ParallelStrategy:
    return strategy.model_copy(update={"expert_slots": ()})


def _placed(stages: Stages, strategy: ParallelStrategy) -> ParallelStrategy:
    """With places for its experts, where it places them by loads and has none yet."""
    if stages.place is None or strategy.expert_placement != "balanced" or strategy.expert_slots:
        return strategy
    return stages.place(strategy)


def _listed(joined: Joined) -> Alternative:
    """A strategy's figures as the search lists rivals: without fused operators, and without places of experts."""
    cost = joined.eager
    return Alternative(
        strategy=_unplaced(joined.strategy),
        step_ms=cost.time.step_ms,
        reserved_bytes=cost.memory.reserved_bytes,
        gpu_hours=cost.gpu_hours,
        feasible=cost.feasible,
        pareto=False,
        lost_because="",
    )
