"""The choice as it will run: the search's best and its rivals, each with the fused operators that it may have.

The search prices every strategy without them. Which operators a strategy may have depends on its mesh and base format,
so the fastest one without need not be the fastest as run.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.agents.strategy.explain import explain
from shardwright.agents.strategy.oracle import Priced
from shardwright.agents.strategy.pareto import SHOWN, front, lost_because
from shardwright.agents.strategy.words import gib, milliseconds
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.plan import Alternative, SearchRecord
from shardwright.schemas.words import plural


@dataclass(frozen=True)
class Reranked:
    """The chosen one's position among those that were priced, its rivals, and the story."""

    chosen: int
    alternatives: tuple[Alternative, ...]
    explanation: tuple[str, ...]


def rerank(
    plain: tuple[Alternative, ...], fused: tuple[CostReport, ...], record: SearchRecord, cluster: ClusterSpec
) -> Reranked:
    """Choose among priced strategies by the search's own rule, applied to what they cost as run.

    Args:
        plain: the search's best, its rivals, then others, each with figures without fused operators; ties of step
            time and memory keep this order.
        fused: what each costs with its own. One that does not fit without them is listed, and not chosen.
    """
    priced = [Priced(one.strategy, cost) for one, cost in zip(plain, fused, strict=True)]
    places = range(len(priced))

    def rank(place: int) -> tuple[bool, int, float, float]:
        return not plain[place].feasible, *priced[place].rank_key[:3]

    chosen = min(places, key=rank)
    best = priced[chosen]
    others = sorted((place for place in places if place != chosen), key=lambda place: (place != 0, rank(place)))
    listed = sorted(others[:SHOWN], key=rank)
    on_front = front((best, *(priced[place] for place in listed if plain[place].feasible)))
    rivals = tuple(
        plain[place].model_copy(
            update={
                "fused_step_ms": priced[place].cost.time.step_ms,
                "fused_reserved_bytes": priced[place].cost.memory.reserved_bytes,
                "feasible": plain[place].feasible and priced[place].cost.feasible,
                "pareto": any(priced[place] is one for one in on_front),
                "lost_because": _lost(best, priced[place], plain[place]),
            }
        )
        for place in listed
    )
    story = [_again(len(priced) - 1)]
    if chosen:
        story.append(_changed(priced[0], best, plain[0], plain[chosen]))
    story += explain(best, rivals, record, cluster, fused=True)
    return Reranked(chosen, rivals, tuple(story))


def _lost(best: Priced, rival: Priced, plain: Alternative) -> str:
    if plain.feasible or not rival.cost.feasible:
        return lost_because(best, rival)
    budget = rival.cost.memory.budget_bytes
    return f"does not fit without fused operators: {gib(plain.reserved_bytes)} a rank, {gib(budget)} are usable"


def _again(rivals: int) -> str:
    others = f" and {plural(rivals, 'rival')} were" if rivals else " was"
    return (
        f"The search prices strategies without fused operators; its best{others} priced again, each with its own: "
        "the figures that follow are with them."
    )


def _changed(first: Priced, best: Priced, first_plain: Alternative, best_plain: Alternative) -> str:
    """Why the search's best is not the plan's, with both figures each way."""
    said = f"Fused operators changed the choice: without them {first.strategy.text()} is the search's best, "
    memory = first.cost.memory
    if not first.cost.feasible:
        return (
            f"{said}but with its own it needs {gib(memory.reserved_bytes)} a rank and {gib(memory.budget_bytes)} are "
            f"usable; {best.strategy.text()} fits."
        )
    if not first.within_margin and best.within_margin:
        return (
            f"{said}but with its own it reserves {gib(memory.reserved_bytes)} of {gib(memory.budget_bytes)} a rank, "
            f"beyond the safety margin of 95%; {best.strategy.text()} keeps it."
        )
    ours, theirs = best.cost.time.step_ms, first.cost.time.step_ms
    if ours >= theirs:
        less = memory.reserved_bytes - best.cost.memory.reserved_bytes
        return f"{said}but with its own it reserves {gib(less)} more than {best.strategy.text()} with its own."
    return (
        f"{said}{milliseconds(first_plain.step_ms)} a step beside {milliseconds(best_plain.step_ms)}; with its own it "
        f"takes {milliseconds(theirs)}, and {best.strategy.text()} with its own {milliseconds(ours)}, "
        f"{(theirs - ours) / theirs:.1%} less."
    )
