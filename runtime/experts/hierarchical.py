"""Two-stage exchange: a token goes to a node once, whatever the number of its experts there.

Stage one crosses nodes between ranks of the same place in their node: each token is sent once to every node that holds
one of its experts, with its choices and weights. Stage two, inside the node, sends rows to their experts' ranks and
brings the weighted results back, where they are summed by token; one row a token and node returns.
Legend: T tokens, K experts per token, E experts, N nodes of an EP group, n ranks of it in a node, P pairs (token, node)
sent, Q received, M choices that stay in this node, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime.experts.dispatch import combine, dispatch, plan_route, send_rows
from shardwright.runtime.experts.overlap import Compute


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


def in_two_stages(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, compute: Compute, nodes: Nodes, num_experts: int
) -> Tensor:
    """[T, H], [T, K], [T, K] → [T, H].

    Args:
        compute: rows of the local experts, grouped, → the same shape.
        nodes: this EP group's.
        num_experts: E over all ranks.
    """
    per_node = num_experts // nodes.count
    goes = torch.zeros((hidden.shape[0], nodes.count), dtype=torch.bool, device=hidden.device)
    goes.scatter_(1, top_k_index // per_node, True)
    _, token = goes.mT.nonzero(as_tuple=True)
    leaving = goes.sum(0)
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving, group=nodes.across)
    send, receive = torch.stack((leaving, coming)).tolist()
    rows = send_rows(hidden[token], send, receive, nodes.across)
    choices = send_rows(top_k_index[token], send, receive, nodes.across)
    weights = send_rows(top_k_weights[token], send, receive, nodes.across)
    row, choice = (choices // per_node == nodes.node).nonzero(as_tuple=True)
    local = (choices[row, choice] - nodes.node * per_node).unsqueeze(1)
    route = plan_route(local, per_node, nodes.size, nodes.within)
    there = dispatch(rows[row], route, 1, nodes.within)
    back = combine(compute(there, route), route, weights[row, choice].unsqueeze(1), nodes.within)
    partial = torch.zeros_like(rows).index_add(0, row, back)
    home = send_rows(partial, receive, send, nodes.across)
    return torch.zeros_like(hidden).index_add(0, token, home)
