"""Moving rows by the kernels of ``permute``: one launch each way, forward and backward.

A plan that runs ``grouped_lora_mlp`` or ``packed_experts`` holds the hash of these kernels too: they are among the
sources of both. Sums run in fp32 in the order of a token's choices and are rounded once.

Legend: T tokens, K choices of a token, R = T·K rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels.permute.op import launch_combine, launch_combine_bwd, launch_gather, route
from shardwright.runtime.experts.rows import Moves


def _key(what: str, rows: Tensor, home: Tensor) -> Hashable:
    """What a launch is bound under: a micro-batch's tokens are as many in every step, received rows are not."""
    return "experts.rows", what, tuple(home.shape), rows.shape[-1]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, home: Tensor) -> Tensor:
        ctx.save_for_backward(home)
        out = x.new_empty((home.numel(), x.shape[-1]))
        launch_gather(x.contiguous(), home, out, _key("spread", x, home))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (home,), (drows,) = ctx.saved_tensors, gradients
        dx = drows.new_empty((home.shape[0], drows.shape[-1]))
        launch_combine(drows.contiguous(), home, None, dx, _key("spread-bwd", drows, home))
        return dx, None


class _Regroup(torch.autograd.Function):
    """Rows where each has one home: a permutation undone. Not bound: how many rows arrive changes every time."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, home: Tensor) -> Tensor:
        ctx.save_for_backward(home)
        out = torch.empty_like(rows)
        launch_combine(rows.contiguous(), home, None, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (home,), (dout,) = ctx.saved_tensors, gradients
        drows = torch.empty_like(dout)
        launch_gather(dout.contiguous(), home, drows)
        return drows, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, home: Tensor, weights: Tensor) -> Tensor:
        rows = rows.contiguous()
        ctx.save_for_backward(rows, home, weights)
        out = rows.new_empty((home.shape[0], rows.shape[-1]))
        launch_combine(rows, home, weights, out, _key("collect", rows, home))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, home, weights = ctx.saved_tensors
        drows, dweights = torch.empty_like(rows), torch.empty_like(weights)
        key = _key("collect-bwd", rows, home)
        launch_combine_bwd(gradients[0].contiguous(), rows, home, weights, drows, dweights, key)
        return drows, None, dweights


class KernelRows:
    """By the kernels of ``permute``, on the device that they run on."""

    def sort(self, choices: Tensor, experts: int) -> tuple[Tensor, Moves]:
        found = route(choices.contiguous(), experts)
        return found.counts, Moves(found.place, found.entry)

    def spread(self, x: Tensor, moves: Moves) -> Tensor:
        rows: Tensor = _Spread.apply(x, moves.home)
        return rows

    def collect(self, rows: Tensor, moves: Moves, weights: Tensor | None) -> Tensor:
        if weights is None:
            moved: Tensor = _Regroup.apply(rows, moves.home)
            return moved
        sums: Tensor = _Collect.apply(rows, moves.home, weights.contiguous())
        return sums
