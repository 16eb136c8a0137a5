"""The choice as it will run, among strategies that were certified whole and priced with and without fused operators."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.agents.strategy.explain import explain
from shardwright.agents.strategy.oracle import Priced
from shardwright.agents.strategy.pareto import SHOWN, front, lost_because
from shardwright.agents.strategy.words import gib, milliseconds
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.plan import Alternative, SearchRecord


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
        plain: the first search's best, then others, each with figures without fused operators; ties of step time and
            memory keep this order.
        fused: what each costs with its own.
        record: of both searches.
    """
    priced = [Priced(one.strategy, cost) for one, cost in zip(plain, fused, strict=True)]
    places = range(len(priced))

    def rank(place: int) -> tuple[int, float, float]:
        return priced[place].rank_key[:3]

    chosen = min(places, key=rank)
    best = priced[chosen]
    others = sorted((place for place in places if place != chosen), key=lambda place: (place != 0, rank(place)))
    listed = sorted(others[:SHOWN], key=rank)
    on_front = front((best, *(priced[place] for place in listed)))
    rivals = tuple(
        plain[place].model_copy(
            update={
                "fused_step_ms": priced[place].cost.time.step_ms,
                "fused_reserved_bytes": priced[place].cost.memory.reserved_bytes,
                "feasible": priced[place].cost.feasible,
                "pareto": any(priced[place] is one for one in on_front),
                "lost_because": lost_because(best, priced[place]),
            }
        )
        for place in listed
    )
    changed = chosen and plain[0].feasible
    story = (_changed(priced[0], best, plain[0], plain[chosen]),) if changed else ()
    return Reranked(chosen, rivals, (*story, *explain(best, rivals, record, cluster, fused=True)))


def _changed(first: Priced, best: Priced, first_plain: Alternative, best_plain: Alternative) -> str:
    """Why the first search's best is not the plan's, with both figures each way."""
    theirs, ours = first.strategy.text(), best.strategy.text()
    said = f"Fused operators changed the choice: without them {theirs} is the best, "
    memory = first.cost.memory
    if not first.cost.feasible:
        return (
            f"{said}but with its own it needs {gib(memory.reserved_bytes)} a rank and {gib(memory.budget_bytes)} are "
            f"usable; {ours} fits."
        )
    if not first.within_margin and best.within_margin:
        return (
            f"{said}but with its own it reserves {gib(memory.reserved_bytes)} of {gib(memory.budget_bytes)} a rank, "
            f"beyond the safety margin of 95%; {ours} keeps it."
        )
    fast, slow = best.cost.time.step_ms, first.cost.time.step_ms
    if fast >= slow:
        less = memory.reserved_bytes - best.cost.memory.reserved_bytes
        return f"{said}but with its own it reserves {gib(less)} more than {ours} with its own."
    beside = f"{milliseconds(best_plain.step_ms)}" if best_plain.feasible else "one that does not fit"
    return (
        f"{said}{milliseconds(first_plain.step_ms)} a step beside {beside}; with its own it takes "
        f"{milliseconds(slow)}, and {ours} with its own {milliseconds(fast)}, {(slow - fast) / slow:.1%} less."
    )
