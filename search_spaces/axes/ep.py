"""Expert parallelism: whole experts live on different ranks, equally many on each."""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Axis, Draws, Violation
from shardwright.search_spaces.axes.replicate import left
from shardwright.search_spaces.context import SearchContext, divisors, nearest


def legal_degrees(context: SearchContext, ranks: int) -> tuple[int, ...]:
    """Degrees that divide both the ranks of a replica and the experts; (1,) where there are no stacks of experts."""
    if context.experts == 0 or not context.profile.shape.expert_stacks:
        return (1,)
    return tuple(d for d in divisors(ranks) if context.experts % d == 0)


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    return legal_degrees(context, left(context, draws) // draws["replicate"])


def uneven_shares(experts: int, ep: int) -> list[int]:
    """What an uneven split would give each rank, larger shares first."""
    return [experts // ep + (1 if rank < experts % ep else 0) for rank in range(ep)]


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    ep, experts = strategy.mesh.ep, context.experts
    if ep == 1:
        return ()
    legal = nearest(legal_degrees(context, context.world), ep)
    if experts == 0:
        return (Violation(rule="ep-needs-experts", message=f"ep {ep}: the model has no experts", nearest_legal=legal),)
    if not context.profile.shape.expert_stacks:
        message = f"ep {ep}: the experts of {context.profile.model_type} do not lie in stacks that ranks can share out"
        return (Violation(rule="ep-needs-stacks", message=message, nearest_legal=legal),)
    if experts % ep:
        shares = uneven_shares(experts, ep)
        shown = str(shares) if ep <= 16 else f"{shares[0]} on some ranks and {shares[-1]} on others"
        return (
            Violation(
                rule="ep-divides-experts",
                message=f"ep {ep} does not divide {experts} experts; uneven placement ({shown}) is not supported",
                nearest_legal=legal,
            ),
        )
    return ()


AXIS = Axis("ep", _choices, lambda s: s.mesh.ep, _check)
