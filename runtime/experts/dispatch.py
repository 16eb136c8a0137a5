"""Rows to the ranks of their experts and back: all-to-all with uneven splits.

Legend: T tokens of this rank, K experts per token, E experts, L = E / ep local experts, N rows received, P of them with
their experts' padding (P = N where the plan pads nothing), H hidden.
Every rank of the EP group issues the same collectives in forward and backward, with zero rows too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime.experts.balance import rows_of_experts


@dataclass(frozen=True)
class Route:
    """How one batch's rows travel.

    Attributes:
        order: [T·K] places in the token-major list of (token, choice), sorted by expert.
        counts: [E] rows that this rank sends to each expert.
        send, receive: rows to and from each EP rank.
        by_expert: [N] order that groups received rows by local expert; ``None`` where they are grouped already.
        sizes: rows of each local expert, its padding included, on the host.
        local_counts: [L] the same on the device.
        place: [N] where each received row lies among the P padded ones; ``None`` where nothing is padded.
    """

    order: Tensor
    counts: Tensor
    send: list[int]
    receive: list[int]
    by_expert: Tensor | None
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


def plan_route(top_k_index: Tensor, num_experts: int, ep: int, group: dist.ProcessGroup | None) -> Route:
    """Sort rows by expert and agree on split sizes (one device-to-host copy).

    Args:
        top_k_index: [T, K] expert of each choice.
        num_experts: E over all ranks.
        ep: size of the EP group.
        group: the EP group; unused at ep = 1.
    """
    flat = top_k_index.reshape(-1)
    counts = rows_of_experts(flat, num_experts)
    if ep == 1 or group is None:
        order = torch.argsort(flat, stable=True)
        return Route(order, counts, [], [], None, counts.tolist(), counts)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    both = torch.stack((counts, arriving)).view(2, ep, -1).tolist()
    return route_of(top_k_index, counts, arriving.view(ep, -1), both[0], both[1])


def route_of(
    top_k_index: Tensor, counts: Tensor, arriving: Tensor, leaving: list[list[int]], coming: list[list[int]]
) -> Route:
    """The route of choices [T, K] whose counts are known.

    Args:
        top_k_index: [T, K] expert of each choice.
        counts: [E] rows that this rank sends to each expert.
        arriving: [ep, L] rows from each rank for each local expert.
        leaving, coming: rows to and from each rank by its or our local expert, on the host.
    """
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ep, local = arriving.shape
    sizes = [sum(column) for column in zip(*coming, strict=True)]
    by_expert = None
    if local > 1:
        of_part = torch.arange(local, device=flat.device).repeat(ep)
        expert_of_row = of_part.repeat_interleave(arriving.reshape(-1), output_size=sum(sizes))
        by_expert = torch.argsort(expert_of_row, stable=True)
    send, receive = [sum(row) for row in leaving], [sum(row) for row in coming]
    return Route(order, counts, send, receive, by_expert, sizes, arriving.sum(0))


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
    if route.by_expert is not None:
        place = place[inverse(route.by_expert)]
    return replace(route, by_expert=None, sizes=sizes, local_counts=counts, place=place)


def grouped(rows: Tensor, route: Route) -> Tensor:
    """[N, H] as they came → [P, H] by local expert, padded as the route says."""
    if route.place is not None:
        return rows.new_zeros((sum(route.sizes), *rows.shape[1:])).index_put_((route.place,), rows)
    return rows if route.by_expert is None else rows[route.by_expert]


def as_they_came(rows: Tensor, route: Route) -> Tensor:
    """[P, H] by local expert → [N, H], what :func:`grouped` undoes."""
    if route.place is not None:
        return rows[route.place]
    return rows if route.by_expert is None else rows[inverse(route.by_expert)]


def dispatch(
    hidden: Tensor, route: Route, top_k: int, group: dist.ProcessGroup | None, weights: Tensor | None = None
) -> Tensor:
    """[T, H] → [P, H], grouped by local expert; multiplied by weights [T, K] first, where they are given."""
    rows = hidden[route.order // top_k]
    if weights is not None:
        rows = rows * weights.reshape(-1, 1)[route.order].to(rows.dtype)
    if route.send and group is not None:
        rows = _AllToAll.apply(rows, route.send, route.receive, group)
    return grouped(rows, route)


def combine(rows: Tensor, route: Route, weights: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[P, H] back to their tokens, weighted and summed: [T, H].

    The sum over K runs in the promoted dtype of rows and weights, in a fixed order.
    """
    tokens, top_k = weights.shape
    rows = as_they_came(rows, route)
    if route.send and group is not None:
        rows = _AllToAll.apply(rows, route.receive, route.send, group)
    rows = rows[inverse(route.order)].view(tokens, top_k, rows.shape[-1])
    return (rows * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes another."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
