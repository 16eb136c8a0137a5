"""Rows to the ranks of their experts and back: all-to-all with uneven splits.

Legend: T tokens of this rank, K experts per token, R = T·K rows that it sends, E experts, L = E / ep local experts, N
rows received, P of them with their experts' padding (P = N where the plan pads nothing), H hidden.
Every rank of the EP group issues the same collectives in forward and backward, with zero rows too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime.experts.rows import TORCH, Moves, Rows


@dataclass(frozen=True)
class Route:
    """How one batch's rows travel.

    Attributes:
        order: [T·K] places in the token-major list of (token, choice), sorted by expert.
        counts: [E] rows that this rank sends to each expert.
        send, receive: rows to and from each EP rank.
        home: [T, K] row of each choice: the inverse of ``order``.
        groups: where received rows go, grouped by local expert; ``None`` where they come so, or ``place`` says it.
        sizes: rows of each local expert, its padding included, on the host.
        local_counts: [L] the same on the device.
        place: [N] where each received row lies among the P padded ones; ``None`` where nothing is padded.
    """

    leaves: Moves
    counts: Tensor
    send: list[int]
    receive: list[int]
    groups: Moves | None
    sizes: list[int]
    local_counts: Tensor
    place: Tensor | None = None


class _AllToAll(torch.autograd.Function):
    """Exchange rows; the gradient travels the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(gradients[0], ctx.receive, ctx.send, ctx.group), None, None, None


def exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """``all_to_all_single`` on dim 0, without gradient."""
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out


def send_rows(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows to their ranks, and their gradients back."""
    moved: Tensor = _AllToAll.apply(rows, send, receive, group)
    return moved


def plan_route(
    top_k_index: Tensor, num_experts: int, ep: int, group: dist.ProcessGroup | None, by: Rows = TORCH
) -> Route:
    """Sort rows by expert and agree on split sizes (one device-to-host copy).

    Args:
        top_k_index: [T, K] expert of each choice.
        num_experts: E over all ranks.
        ep: size of the EP group.
        group: the EP group; unused at ep = 1.
        by: what sorts.
    """
    counts, leaves = by.sort(top_k_index, num_experts)
    if ep == 1 or group is None:
        return Route(leaves, counts, [], [], None, counts.tolist(), counts)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    both = torch.stack((counts, arriving)).view(2, ep, -1).tolist()
    return route_of(leaves, counts, arriving.view(ep, -1), both[0], both[1])


def route_of(
    leaves: Moves, counts: Tensor, arriving: Tensor, leaving: list[list[int]], coming: list[list[int]]
) -> Route:
    """The route of choices whose counts are known.

    Args:
        leaves: where their rows go.
        counts: [E] rows that this rank sends to each expert.
        arriving: [ep, L] rows from each rank for each local expert.
        leaving, coming: rows to and from each rank by its or our local expert, on the host.
    """
    sizes = [sum(column) for column in zip(*coming, strict=True)]
    groups = Moves(_grouped_home(arriving, sum(sizes)).unsqueeze(1)) if arriving.shape[1] > 1 else None
    send, receive = [sum(row) for row in leaving], [sum(row) for row in coming]
    return Route(leaves, counts, send, receive, groups, sizes, arriving.sum(0))


def _grouped_home(arriving: Tensor, rows: int) -> Tensor:
    """[N] place of each received row among those grouped by local expert, in the order of the ranks.

    Rows of one rank for one expert stay together, so that each such run moves by one number.
    """
    ends, grouped_ends = arriving.reshape(-1).cumsum(0), arriving.mT.reshape(-1).cumsum(0)
    further = grouped_ends.view(arriving.mT.shape).mT.reshape(-1) - ends
    moved = further.repeat_interleave(arriving.reshape(-1), output_size=rows)
    return moved + torch.arange(rows, device=arriving.device)


def padded(route: Route, multiple: int) -> Route:
    """The route whose local experts each get a multiple of rows; an expert without rows stays without.

    The rows between are zeros that no token sent: their products are dropped, and their gradients are zero.
    """
    if multiple == 1:
        return route
    sizes = [-(-size // multiple) * multiple for size in route.sizes]
    counts = (route.local_counts + multiple - 1) // multiple * multiple
    further = (counts.cumsum(0) - counts) - (route.local_counts.cumsum(0) - route.local_counts)
    total = sum(route.sizes)
    place = torch.arange(total, device=counts.device)
    place += further.repeat_interleave(route.local_counts, output_size=total)
    if route.groups is not None:
        place = place[route.groups.home.squeeze(1)]
    return replace(route, groups=None, sizes=sizes, local_counts=counts, place=place)


def grouped(rows: Tensor, route: Route, by: Rows = TORCH) -> Tensor:
    """[N, H] as they came → [P, H] by local expert, padded as the route says."""
    if route.place is not None:
        return rows.new_zeros((sum(route.sizes), *rows.shape[1:])).index_put_((route.place,), rows)
    return rows if route.groups is None else by.spread(rows, route.groups)


def as_they_came(rows: Tensor, route: Route, by: Rows = TORCH) -> Tensor:
    """[P, H] by local expert → [N, H], what :func:`grouped` undoes."""
    if route.place is not None:
        return rows[route.place]
    return rows if route.groups is None else by.collect(rows, route.groups, None)


def leaving(hidden: Tensor, route: Route, weights: Tensor | None = None, by: Rows = TORCH) -> Tensor:
    """[T, H] → [R, H] sorted by expert; multiplied by weights [T, K] first, where they are given."""
    rows = by.spread(hidden, route.leaves)
    return rows if weights is None else rows * weights.reshape(-1, 1)[route.leaves.order].to(rows.dtype)


def dispatch(
    hidden: Tensor, route: Route, group: dist.ProcessGroup | None, weights: Tensor | None = None, by: Rows = TORCH
) -> Tensor:
    """[T, H] → [P, H], grouped by local expert; multiplied by weights [T, K] first, where they are given."""
    rows = leaving(hidden, route, weights, by)
    if route.send and group is not None:
        rows = _AllToAll.apply(rows, route.send, route.receive, group)
    return grouped(rows, route, by)


def combine(rows: Tensor, route: Route, weights: Tensor, group: dist.ProcessGroup | None, by: Rows = TORCH) -> Tensor:
    """[P, H] back to their tokens, weighted and summed: [T, H].

    The sum over K runs in the promoted dtype of rows and weights, in a fixed order.
    """
    rows = as_they_came(rows, route, by)
    if route.send and group is not None:
        rows = _AllToAll.apply(rows, route.receive, route.send, group)
    return by.collect(rows, route.leaves, weights)
