"""Experts in the places that a plan gives them: where each one lives, and how values get there and back.

A plan lists the expert in each place, over all ranks; EP rank r holds the r-th equal run. An expert may have copies on
several ranks: each gets a part of its rows, their gradients are summed, and equal steps keep them equal. Outside the
running model experts stand in their own order: in files, saves and exports.
Legend: E experts, P places, L = P / ep places of an EP rank, N rows of a rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime.experts.dispatch import exchange
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.strategy import ParallelStrategy

Slots = tuple[int, ...]
"""The expert in each place."""


def check_slots(slots: Slots, experts: int, ep: int, where: str) -> None:
    """Refuse places that do not hold every expert, equally many on each rank and none twice on one.

    Raises:
        LegalityError: ``expert-slots``.
    """
    held = set(slots)
    each = len(slots) // ep
    runs = [slots[rank * each : (rank + 1) * each] for rank in range(ep)]
    if held != set(range(experts)):
        what = f"{len(held)} different numbers from {min(held)} to {max(held)}, the layer has {experts} experts"
    elif each * ep != len(slots):
        what = f"{len(slots)} places over ep {ep}"
    elif twice := [rank for rank, run in enumerate(runs) if len(set(run)) < each]:
        what = f"EP rank {twice[0]} holds an expert twice"
    else:
        return
    raise LegalityError(
        "expert-slots", what, where=where, next_action="plan again with --load-profile, or place experts contiguous"
    )


def slots_of(strategy: ParallelStrategy) -> tuple[Slots, ...]:
    """The expert in each place of each MoE layer, as a plan writes them; empty where experts stand in their own order.

    Raises:
        LegalityError: ``expert-slots`` where the plan wants experts placed or copied and does not say where.
    """
    if not strategy.expert_slots and (strategy.expert_placement == "balanced" or strategy.redundant_experts):
        raise LegalityError(
            "expert-slots",
            f"placement {strategy.expert_placement} with {strategy.redundant_experts} copies a rank names no places",
            where="decision.strategy.expert_slots",
            next_action="plan again with --load-profile, or place experts contiguous",
        )
    return tuple(tuple(int(expert) for expert in layer.split(",")) for layer in strategy.expert_slots)


class Places:
    """Expert numbers of choices into places; copies of an expert take turns by token.

    Which copy a token takes follows from its place in the micro-batch alone, so a recomputation takes the same.
    """

    def __init__(self, slots: Slots, experts: int) -> None:
        places: list[list[int]] = [[] for _ in range(experts)]
        for place, expert in enumerate(slots):
            places[expert].append(place)
        most = max(map(len, places))
        self.table = torch.tensor([[held[turn % len(held)] for turn in range(most)] for held in places])
        self.copies = torch.tensor([len(held) for held in places])

    def of(self, top_k_index: Tensor) -> Tensor:
        """[T, K] experts → [T, K] places."""
        if self.table.device != top_k_index.device:
            self.table, self.copies = self.table.to(top_k_index.device), self.copies.to(top_k_index.device)
        if self.table.shape[1] == 1:
            return self.table[:, 0][top_k_index]
        turn = torch.arange(len(top_k_index), device=top_k_index.device).unsqueeze(1)
        return self.table[top_k_index, turn % self.copies[top_k_index]]


def runs_of(numbers: Slots) -> Iterator[tuple[int, int, int]]:
    """(place, first, stop) of each run of consecutive experts, by place."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield start, numbers[start], numbers[start] + place - start
            start = place


def spans(rows: int, ep: int, shards: int) -> list[range]:
    """Rows of dim 0 that each rank keeps, by (shard rank, EP rank): cut by ep, then by FSDP's rule of equal chunks."""
    local = rows // ep
    each = -(-local // shards)
    return [
        range(rank * local + min(part * each, local), rank * local + min((part + 1) * each, local))
        for part in range(shards)
        for rank in range(ep)
    ]


def regroup(
    values: Tensor, have: list[Slots], want: list[Slots], me: int, group: dist.ProcessGroup, *, add: bool = False
) -> Tensor:
    """Rows [N, …] by their experts from the ranks that have them to the ranks that want them.

    Args:
        have, want: experts of each rank of the group, in the order of its rows.
        me: this rank's place in the group.
        add: sum the rows of all copies; else the first rank's that has one.
    """
    first: dict[int, int] = {}
    for rank, numbers in enumerate(have):
        for number in numbers:
            first.setdefault(number, rank)

    def given(rank: int, wanted: Slots) -> list[int]:
        held = set(have[rank])
        return [number for number in wanted if number in held and (add or first[number] == rank)]

    row = {number: place for place, number in enumerate(have[me])}
    leaving = [[row[number] for number in given(me, wanted)] for wanted in want]
    place = {number: row for row, number in enumerate(want[me])}
    coming = [[place[number] for number in given(rank, want[me])] for rank in range(len(have))]
    rows = values[[one for part in leaving for one in part]]
    came = exchange(rows, [len(part) for part in leaving], [len(part) for part in coming], group)
    target = torch.tensor([one for part in coming for one in part], dtype=torch.int64, device=values.device)
    out = values.new_zeros((len(want[me]), *values.shape[1:]))
    return out.index_add_(0, target, came)
