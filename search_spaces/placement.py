"""Where a plan puts its experts: by measured loads, most loaded first, with copies of those that are hottest.

Legend: E experts, e = EP degree, R copies of experts that each EP rank holds beside its own E / e.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heappop, heappush

from shardwright.schemas.strategy import ParallelStrategy

Loads = tuple[tuple[float, ...], ...]
"""For each MoE layer the share of all routed rows that each expert got; shares of a layer add up to 1."""

Ranks = tuple[tuple[int, ...], ...]
"""Experts of each EP rank, ascending."""


@lru_cache(maxsize=4096)
def balanced_ranks(shares: tuple[float, ...], ep: int, redundant: int) -> Ranks:
    """Experts of each EP rank for one layer's measured loads; never worse than runs of neighbours.

    Copies go to the experts with most rows per copy, at most one on a rank. Then copies are placed, those with most
    rows first, each on the emptiest rank that has a free place and does not hold the expert; where only ranks that hold
    it are free, it changes places with an expert of another rank.
    """
    each, experts = len(shares) // ep, range(len(shares))
    copies = copies_of(shares, ep, redundant)
    rows = [share / n for share, n in zip(shares, copies, strict=True)]
    loads, held = [0.0] * ep, [list[int]() for _ in range(ep)]
    for expert in sorted((x for x in experts for _ in range(copies[x])), key=lambda x: (-rows[x], x)):
        free = [rank for rank in range(ep) if len(held[rank]) < each + redundant]
        without = [rank for rank in free if expert not in held[rank]]
        rank = min(without or free, key=lambda r: (loads[r], r))
        coming = expert
        if not without:
            other, coming = _exchange(held, rank, expert)
            held[other][held[other].index(coming)] = expert
            loads[other] += rows[expert] - rows[coming]
        loads[rank] += rows[coming]
        held[rank].append(coming)
    found = tuple(tuple(sorted(one)) for one in held)
    runs = tuple(tuple(experts[rank * each : (rank + 1) * each]) for rank in range(ep))
    return runs if not redundant and imbalance(shares, runs) <= imbalance(shares, found) else found


def copies_of(shares: tuple[float, ...], ep: int, redundant: int) -> list[int]:
    """How often each expert is held, all ranks together."""
    copies = [1] * len(shares)
    hottest = [(-share, expert) for expert, share in enumerate(shares)]
    heapify(hottest)
    for _ in range(redundant * ep if ep > 1 else 0):
        _, expert = heappop(hottest)
        copies[expert] += 1
        if copies[expert] < ep:
            heappush(hottest, (-shares[expert] / copies[expert], expert))
    return copies


def _exchange(held: list[list[int]], rank: int, expert: int) -> tuple[int, int]:
    """(another rank without ``expert``, one of its experts that ``rank`` does not hold).

    There is one: an expert has at most one copy a rank, and the other rank is full where this one is not.
    """
    return next(
        (other, moved)
        for other, there in enumerate(held)
        if expert not in there
        for moved in reversed(there)
        if moved not in held[rank]
    )


def imbalance(shares: tuple[float, ...], ranks: Ranks) -> float:
    """Rows of the fullest rank over the mean, where the copies of an expert share its rows."""
    copies = [0] * len(shares)
    for held in ranks:
        for expert in held:
            copies[expert] += 1
    return max(sum(shares[expert] / copies[expert] for expert in held) for held in ranks) * len(ranks)


def with_places(strategy: ParallelStrategy, loads: Loads) -> ParallelStrategy:
    """A chosen strategy that says where its experts live, where it places them by these loads."""
    if strategy.expert_placement != "balanced" or not loads:
        return strategy
    ep, redundant = strategy.mesh.ep, strategy.redundant_experts
    layers = (balanced_ranks(shares, ep, redundant) for shares in loads)
    slots = tuple(",".join(str(expert) for held in ranks for expert in held) for ranks in layers)
    return strategy.model_copy(update={"expert_slots": slots})


def misplaced(slots: str, experts: int, ep: int, redundant: int) -> str | None:
    """What is wrong with one layer's places; ``None`` where nothing is."""
    places = [int(expert) for expert in slots.split(",")]
    each = experts // ep + redundant
    if len(places) != each * ep:
        return f"{len(places)} places, ep {ep} of {each} each needs {each * ep}"
    if set(places) != set(range(experts)):
        return f"{len(set(places))} different numbers up to {max(places)}, the layer has {experts} experts"
    if any(len(set(places[rank * each : (rank + 1) * each])) < each for rank in range(ep)):
        return "a rank holds an expert twice"
    return None
