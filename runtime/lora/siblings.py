"""Several linear maps of one input as one node, adapted or not: ``y_i = x W_iᵀ + b_i + s_i (x A_iᵀ) B_iᵀ``.

The A of all are one product with x, in forward and in backward, and their gradients of x add up inside the products
instead of in passes of their own: an attention's three projections read x once for all adapters, and write its gradient
once.
Legend: N rows, A [R, in] all A above one another, R sum of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.runtime.lora.linear import LoraLinear

PARTS = 4
"""Tensors of one map: weight, bias, A, B."""


def joint(x: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """``[linear(x) for linear in linears]``: in one node where all of them are maps that it knows.

    Args:
        x: [..., in].
    """
    if len(linears) < 2 or not all(_known(linear, x) for linear in linears):
        return [linear(x) for linear in linears]
    given: list[Tensor | None] = []
    scalings: list[float] = []
    for linear in linears:
        one: Any = linear
        adapted = isinstance(one, LoraLinear)
        given += [one.weight, one.bias, one.lora_a if adapted else None, one.lora_b if adapted else None]
        scalings.append(one.scaling if adapted else 0.0)
    return list(JointProduct.apply(x, tuple(scalings), *given))


def _known(linear: nn.Module, x: Tensor) -> bool:
    """A frozen map in x's format, with an adapter or none, whose own forward nothing watches or replaces."""
    one: Any = linear
    if type(linear) not in (nn.Linear, LoraLinear) or "forward" in linear.__dict__:
        return False
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return False
    frozen = not one.weight.requires_grad and (one.bias is None or not one.bias.requires_grad)
    dropped = isinstance(linear, LoraLinear) and linear.dropout > 0 and linear.training
    return frozen and not dropped and one.weight.dtype == x.dtype


class JointProduct(torch.autograd.Function):
    """The maps as one node. Saved: x, the inner products [N, R], the cast adapters. Frozen tensors get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scalings: tuple[float, ...], *given: Tensor | None) -> tuple[Tensor, ...]:
        flat = x.reshape(-1, x.shape[-1])
        maps = [given[first : first + PARTS] for first in range(0, len(given), PARTS)]
        adapters = [(a, b) for _, _, a, b in maps if a is not None and b is not None]
        bounds = tuple(accumulate((a.shape[0] for a, _ in adapters), initial=0))
        inner = a_all = None
        if adapters:
            a_all = torch.cat([a.to(x.dtype) for a, _ in adapters])
            inner = flat @ a_all.mT
        factors = [b.to(x.dtype) for _, b in adapters]
        left = iter(zip(pairwise(bounds), factors, strict=True))
        outputs = []
        for (weight, bias, a, _), scaling in zip(maps, scalings, strict=True):
            assert weight is not None
            y = F.linear(flat, weight, bias)
            if a is not None:
                assert inner is not None
                (start, stop), b = next(left)
                y.addmm_(inner[:, start:stop], b.mT, alpha=scaling)
            outputs.append(y.view(*x.shape[:-1], y.shape[-1]))
        ctx.save_for_backward(flat, a_all, inner, *(weight for weight, *_ in maps), *factors)
        ctx.adapted = [a is not None for _, _, a, _ in maps]
        ctx.scalings, ctx.shape, ctx.bounds = scalings, x.shape, bounds
        ctx.dtypes = [a.dtype for a, _ in adapters]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat, a_all, inner, *rest = ctx.saved_tensors
        count = len(ctx.adapted)
        weights, factors = rest[:count], rest[count:]
        outer = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        learning = [index for index in range(count) if ctx.adapted[index]]
        scalings = [ctx.scalings[index] for index in learning]
        parts = [(outer[index] @ b).mul_(s) for index, b, s in zip(learning, factors, scalings, strict=True)]
        dinner = torch.cat(parts, dim=1) if parts else None
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(outer[0], weights[0])
            for dy, weight in zip(outer[1:], weights[1:], strict=True):
                dx.addmm_(dy, weight)
            if dinner is not None:
                dx.addmm_(dinner, a_all)
            dx = dx.view(ctx.shape)
        found: list[Tensor | None] = [None] * (PARTS * count)
        da = dinner.mT @ flat if dinner is not None else None
        for place, (index, scaling, dtype) in enumerate(zip(learning, scalings, ctx.dtypes, strict=True)):
            assert da is not None
            start, stop = ctx.bounds[place : place + 2]
            found[PARTS * index + 2] = da[start:stop].to(dtype)
            found[PARTS * index + 3] = (outer[index].mT @ inner[:, start:stop]).mul_(scaling).to(dtype)
        return dx, None, *found
