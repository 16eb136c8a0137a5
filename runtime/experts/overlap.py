"""Dispatch, experts and combine in pieces, so that one piece travels while another is computed.

The tokens of a micro-batch are cut into chunks. All dispatches are started at once; each chunk's experts run when its
rows are there, and its way back starts at once; the sums wait at the end. What a chunk has used is let go: alive are
all rows on one way, there or back, and one chunk's own copies. An exchange is two nodes of the graph: one starts it,
one waits. Backward turns them round: the waiting node starts the gradient's exchange, the starting node waits for it.
Nodes run in the reverse order of their making, so all gradients of combines are under way before the first chunk's
experts run backward, and no gradient of a dispatch is waited for before all experts are done.

Work that needs no routed row, such as a shared expert, runs between the start of the dispatches and the first wait; its
nodes stand between theirs, so its backward runs while the gradients of the dispatches travel.

On CUDA the exchanges run on the collective library's own stream, on the CPU in gloo's threads.
Legend: T tokens of this rank, C chunks, K experts per token, E experts, L = E / ep local experts, P rows received and
their experts' padding, H hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from shardwright.runtime.experts.dispatch import Route, as_they_came, grouped, leaving, padded, route_of
from shardwright.runtime.experts.rows import TORCH, Rows

COMPUTE, WAIT = "experts:compute", "experts:wait"
"""Names in a profile: a chunk's products, and the host's waits for exchanges."""
Compute = Callable[[Tensor, Route], Tensor]


@dataclass
class Flight:
    """One exchange under way, forward or backward, and what must stay alive until it lands."""

    send: list[int]
    receive: list[int]
    group: dist.ProcessGroup
    work: Any = None
    held: Tensor | None = None
    landed: Tensor | None = None

    def start(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Begin to exchange rows; what comes back is filled when :meth:`wait` returns."""
        self.held = rows.contiguous()
        self.landed = rows.new_empty((sum(receive), *rows.shape[1:]))
        self.work = dist.all_to_all_single(self.landed, self.held, receive, send, group=self.group, async_op=True)
        return self.landed

    def wait(self) -> Tensor:
        """The rows that came, for the current stream."""
        with record_function(WAIT):
            self.work.wait()
        landed = self.landed
        assert landed is not None
        self.work = self.held = self.landed = None
        return landed


class _Start(torch.autograd.Function):
    """Rows leave; in backward their gradient has come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.start(rows, flight.send, flight.receive)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.wait(), None


class _Finish(torch.autograd.Function):
    """Rows have come; in backward their gradient leaves. What it returns only keeps the place of what is under way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.wait().view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        flight: Flight = ctx.flight
        flight.start(gradients[0], flight.receive, flight.send)
        return gradients[0], None


def start(rows: Tensor, flight: Flight) -> Tensor:
    """Rows leave; what is returned is theirs when :func:`finish` has it."""
    leaving: Tensor = _Start.apply(rows, flight)
    return leaving


def finish(rows: Tensor, flight: Flight) -> Tensor:
    """The rows that came, from what :func:`start` returned."""
    landed: Tensor = _Finish.apply(rows, flight)
    return landed


def plan_routes(
    chunks: tuple[Tensor, ...], num_experts: int, ep: int, group: dist.ProcessGroup, by: Rows = TORCH
) -> tuple[Route, ...]:
    """A route for each chunk's choices [t, K], with one exchange of counts and one copy to the host for all."""
    found = [by.sort(chunk, num_experts) for chunk in chunks]
    sent = torch.stack([counts for counts, _ in found]).view(len(chunks), ep, -1).transpose(0, 1).contiguous()
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent, group=group)
    both = torch.stack((sent, arriving)).tolist()
    return tuple(
        route_of(
            leaves, counts, arriving[:, place], [rank[place] for rank in both[0]], [rank[place] for rank in both[1]]
        )
        for place, (counts, leaves) in enumerate(found)
    )


def in_chunks(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    compute: Compute,
    *,
    chunks: int,
    num_experts: int,
    ep: int,
    group: dist.ProcessGroup,
    weigh_inputs: bool,
    padding: int = 1,
    meanwhile: Callable[[], None] | None = None,
    by: Rows = TORCH,
) -> tuple[Tensor, Tensor]:
    """[T, H], [T, K], [T, K] → [T, H] and the rows [E] that this rank sent.

    Args:
        compute: rows [P, H] of the local experts, grouped, → [P, H].
        chunks: C; all ranks have the same.
        weigh_inputs: routing weights multiply what an expert gets, not what it gives.
        padding: multiple of rows that each local expert gets of each chunk.
        meanwhile: work of this rank that needs no routed row, done while all dispatches are under way.
        by: what sorts and moves rows.
    """
    parts = top_k_index.tensor_split(chunks)
    routes = [padded(route, padding) for route in plan_routes(parts, num_experts, ep, group, by)]
    weights = top_k_weights.tensor_split(chunks)
    out_there: deque[tuple[Tensor, Flight]] = deque()
    for tokens, given, route in zip(hidden.tensor_split(chunks), weights, routes, strict=True):
        flight = Flight(route.send, route.receive, group)
        out_there.append((start(leaving(tokens, route, given if weigh_inputs else None, by), flight), flight))
    if meanwhile is not None:
        meanwhile()
    coming_back: deque[tuple[Tensor, Flight]] = deque()
    for route in routes:
        rows = finish(*out_there.popleft())
        with record_function(COMPUTE):
            done = as_they_came(compute(grouped(rows, route, by), route), route, by)
        back = Flight(route.receive, route.send, group)
        coming_back.append((start(done, back), back))
        del rows, done
    sums = []
    for given, route in zip(weights, routes, strict=True):
        after = torch.ones_like(given) if weigh_inputs else given
        sums.append(by.collect(finish(*coming_back.popleft()), route.leaves, after))
    return torch.cat(sums), torch.stack([route.counts for route in routes]).sum(0)
