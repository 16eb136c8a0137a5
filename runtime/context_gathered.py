"""Attention of a rank's queries on what all ranks hold, gathered for as long as a pass takes.

Only a rank's own keys are kept between forward and backward: backward gathers them again, runs the attention of one
group of heads after another again, and adds up the gathered gradient in fp32, of which each rank gets its tokens' sum.
So what is expanded from latents is never there for more than one group of heads.

Legend: B sequences, n query heads, h gathered heads, T tokens of a rank, S of a sequence, w width of what is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwright.runtime.context import Place, gather_tokens, own_sum

Attend = Callable[[Tensor, Tensor, slice], Tensor]
"""Queries [B, n', T, d] of some heads, all that is gathered [B, h, S, w], and which heads → [B, n', T, v]."""


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        own: Tensor,
        place: Place,
        attend: Attend,
        groups: tuple[slice, ...],
        parameters: Callable[[], tuple[nn.Parameter, ...]],
        *trained: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(query, own)
        ctx.given = place, attend, groups, parameters
        whole = gather_tokens(own, place)
        return torch.cat([attend(query[:, heads], whole, heads) for heads in groups], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, own = ctx.saved_tensors
        place, attend, groups, parameters = ctx.given
        whole = gather_tokens(own, place).requires_grad_()
        into_whole = torch.zeros_like(whole, dtype=torch.promote_types(whole.dtype, torch.float32))
        trained, into_trained, into_query = parameters(), [], []
        for heads in groups:
            with torch.enable_grad():
                part = query[:, heads].detach().requires_grad_()
                out = attend(part, whole, heads)
            found = torch.autograd.grad(out, (part, whole, *trained), gradient[:, heads])
            into_query.append(found[0])
            into_whole += found[1]
            into_trained.append(found[2:])
        summed = (torch.stack(column).sum(0) for column in zip(*into_trained, strict=True))
        into_own = own_sum(into_whole, place).to(own.dtype)
        return torch.cat(into_query, dim=1), into_own, None, None, None, None, *summed


def attended_gathered(
    query: Tensor,
    own: Tensor,
    place: Place,
    attend: Attend,
    groups: tuple[slice, ...],
    parameters: Callable[[], tuple[nn.Parameter, ...]] = tuple,
) -> Tensor:
    """[B, n, T, d] queries, [B, h, T, w] of this rank's tokens → [B, n, T, v]. A collective, in backward too.

    Args:
        attend: no value that it reads besides its arguments may need a gradient, but ``parameters``.
        groups: query heads that run together, in order.
        parameters: those that ``attend`` reads and that are trained, as the module holds them now.
    """
    given = (query, own, place, attend, groups, parameters, *parameters())
    return cast(Tensor, _Gathered.apply(*given))
