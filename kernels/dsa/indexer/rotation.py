"""Rotation of q and k as a torch operator, plain and traced; gradients are turned back.

Legend: T queries, S keys, N indexer heads, D head width, R rotated dims, k chosen keys.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.dispatch import direct
from shardwright.kernels.dsa.indexer import contract, prepare


class Rotate(torch.autograd.Function):
    """Rotation for plain tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: str, query_start: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.settings = (layout, query_start)
        return prepare.rotate(x, cos, sin, layout, query_start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return prepare.rotate(dy.contiguous(), *ctx.saved_tensors, *ctx.settings, back=True), None, None, None, None


@torch.library.custom_op("shardwright::dsa_indexer_rotate", mutates_args=())
def dsa_indexer_rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str, query_start: int, back: bool) -> Tensor:
    """Rotation as one opaque node for tracers."""
    return prepare.rotate(x.contiguous(), cos, sin, layout, query_start, back=back)


@dsa_indexer_rotate.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, layout: str, query_start: int, back: bool) -> Tensor:
    return torch.empty_like(x)


def _save_rotation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, layout, query_start, back = inputs
    ctx.save_for_backward(cos, sin)
    ctx.settings = (layout, query_start, not back)


def _turn_back(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return dsa_indexer_rotate(dy, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None


dsa_indexer_rotate.register_autograd(_turn_back, setup_context=_save_rotation)


def rotated(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    layout: str,
    query_start: int,
    name: str = contract.NAME,
) -> tuple[Tensor, Tensor]:
    """q and k with their first R dims turned; unchanged without tables.

    Raises:
        KernelError: ``bad-rope``, or what ``contract.check`` refuses.
    """
    contract.check_rope(k, cos, sin, layout, name)
    if cos is None or sin is None:
        return q, k
    contract.check({"q": q, "k": k, "cos": cos, "sin": sin}, interpreted=device.interpreted(), name=name)
    made = []
    for x, start in ((q, query_start), (k, 0)):
        if direct(x, cos, sin):
            made.append(cast(Tensor, Rotate.apply(x, cos, sin, layout, start)))
        else:
            made.append(dsa_indexer_rotate(x, cos, sin, layout, start, False))
    return made[0], made[1]
