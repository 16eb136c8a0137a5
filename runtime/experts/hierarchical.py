"""Two-stage exchange: a token goes to a node once, whatever the number of its experts there.

Stage one crosses nodes between ranks of the same place in their node: each token is sent once to every node that holds
one of its experts, with its choices and weights. Stage two, inside the node, sends rows to their experts' ranks and
brings the weighted results back, where they are summed by token; one row a token and node returns. In
chunks, one piece crosses nodes while another is in its stage two.
Legend: T tokens, K experts per token, E experts, N nodes of an EP group, n ranks of it in a node, P pairs (token, node)
sent, Q received, M choices that stay in this node, H hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from shardwright.runtime.experts.dispatch import combine, dispatch, padded, plan_route, send_rows
from shardwright.runtime.experts.overlap import COMPUTE, Compute, Flight, finish, start


@dataclass(frozen=True)
class Nodes:
    """How an EP group lies over nodes.

    Attributes:
        across: ranks of the same place in each node, by node.
        within: the ranks of this node.
        count: N.
        size: n.
        node: this rank's.
    """

    across: dist.ProcessGroup
    within: dist.ProcessGroup
    count: int
    size: int
    node: int


def open_nodes(world: int, rank: int, ep: int, devices_per_node: int) -> Nodes | None:
    """Groups for EP groups of ``ep`` neighbouring ranks over nodes; ``None`` where an EP group is inside one node.

    Every rank of the world calls it.
    """
    size = min(ep, devices_per_node)
    if ep == size or ep % size:
        return None
    count = ep // size
    mine: dict[str, dist.ProcessGroup] = {}
    for base in range(0, world, ep):
        members = range(base, base + ep)
        for node in range(count):
            ranks = list(members)[node * size : (node + 1) * size]
            group = dist.new_group(ranks)
            if rank in ranks:
                mine["within"] = group
        for place in range(size):
            ranks = list(members)[place::size]
            group = dist.new_group(ranks)
            if rank in ranks:
                mine["across"] = group
    return Nodes(mine["across"], mine["within"], count, size, rank % ep // size)


@dataclass(frozen=True)
class _Trip:
    """One chunk's rows on their way between nodes: what left, by token, and what comes, with choices and weights."""

    tokens: int
    token: Tensor
    flight: Flight
    rows: Tensor
    choices: Tensor
    weights: Tensor


def in_two_stages(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    compute: Compute,
    nodes: Nodes,
    num_experts: int,
    *,
    chunks: int = 1,
    weigh_inputs: bool = False,
    padding: int = 1,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """[T, H], [T, K], [T, K] → [T, H].

    Args:
        compute: rows of the local experts, grouped, → the same shape.
        nodes: this EP group's.
        num_experts: E over all ranks.
        chunks: pieces of the tokens, of which one crosses nodes while another is spread in its node and computed.
        weigh_inputs: routing weights multiply what an expert gets, not what it gives.
        padding: multiple of rows that each local expert gets of each chunk.
        meanwhile: work of this rank that needs no routed row, done while rows cross between nodes.
    """
    trips = _leave(hidden, top_k_index, top_k_weights, nodes, num_experts // nodes.count, chunks)
    if meanwhile is not None:
        meanwhile()
    homes: deque[tuple[int, Tensor, Tensor, Flight]] = deque()
    while trips:
        trip = trips.popleft()
        rows = finish(trip.rows, trip.flight)
        back = Flight(trip.flight.receive, trip.flight.send, nodes.across)
        with record_function(COMPUTE):
            there = _inside(rows, trip, compute, nodes, num_experts // nodes.count, weigh_inputs, padding)
        homes.append((trip.tokens, trip.token, start(there, back), back))
        del trip, rows, there
    sums = []
    while homes:
        tokens, token, there, back = homes.popleft()
        home = finish(there, back)
        sums.append(home.new_zeros((tokens, hidden.shape[1])).index_add(0, token, home))
    return torch.cat(sums)


def _leave(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, nodes: Nodes, per_node: int, chunks: int
) -> deque[_Trip]:
    """Start stage one of all chunks, with one exchange of counts and one copy to the host for all."""
    goes = torch.zeros((hidden.shape[0], nodes.count), dtype=torch.bool, device=hidden.device)
    parts = goes.scatter_(1, top_k_index // per_node, True).tensor_split(chunks)
    leaving = torch.stack([part.sum(0) for part in parts], dim=1)
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving, group=nodes.across)
    send, receive = torch.stack((leaving, coming)).transpose(1, 2).tolist()
    trips: deque[_Trip] = deque()
    for place, (part, tokens, index, weights) in enumerate(
        zip(
            parts,
            hidden.tensor_split(chunks),
            top_k_index.tensor_split(chunks),
            top_k_weights.tensor_split(chunks),
            strict=True,
        )
    ):
        _, token = part.mT.nonzero(as_tuple=True)
        flight = Flight(send[place], receive[place], nodes.across)
        choices, given = (send_rows(one[token], flight.send, flight.receive, nodes.across) for one in (index, weights))
        trips.append(_Trip(len(tokens), token, flight, start(tokens[token], flight), choices, given))
    return trips


def _inside(
    rows: Tensor, trip: _Trip, compute: Compute, nodes: Nodes, per_node: int, weigh_inputs: bool, padding: int
) -> Tensor:
    """Stage two: [Q, H] to their experts' ranks in this node and back, summed by row."""
    row, choice = (trip.choices // per_node == nodes.node).nonzero(as_tuple=True)
    local = (trip.choices[row, choice] - nodes.node * per_node).unsqueeze(1)
    route = padded(plan_route(local, per_node, nodes.size, nodes.within), padding)
    given = trip.weights[row, choice].unsqueeze(1)
    there = dispatch(rows[row], route, nodes.within, given if weigh_inputs else None)
    back = combine(compute(there, route), route, torch.ones_like(given) if weigh_inputs else given, nodes.within)
    return torch.zeros_like(rows).index_add(0, row, back)
