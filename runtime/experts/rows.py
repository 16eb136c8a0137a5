"""Rows by expert from tokens, and tokens' sums from rows: by torch, or by the kernels of ``permute``.

Both directions are one node of the graph each, and each is the other's gradient: what is spread is summed in backward,
in the order of a token's choices, and what is summed is spread. No gradient is accumulated by index, which would sort
indices on the device and add in any order.

Legend: T tokens, K choices of a token, E experts, R = T·K rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.runtime.experts.balance import rows_of_experts


@dataclass(frozen=True)
class Moves:
    """Where rows go.

    Attributes:
        home: [T, K] row of each choice.
        known: [R] the inverse, where it was found with it.
    """

    home: Tensor
    known: Tensor | None = None

    @cached_property
    def order(self) -> Tensor:
        """[R] place of each row in the token-major list of choices."""
        return inverse(self.home.reshape(-1)) if self.known is None else self.known


class Rows(Protocol):
    """One way to move rows."""

    def sort(self, choices: Tensor, experts: int) -> tuple[Tensor, Moves]:
        """[T, K] experts → rows of each expert [E], and where the choices' rows go, stable."""

    def spread(self, x: Tensor, moves: Moves) -> Tensor:
        """[T, H] → [R, H]."""

    def collect(self, rows: Tensor, moves: Moves, weights: Tensor | None) -> Tensor:
        """[R, H] and weights [T, K] → [T, H], summed in the wider of both formats; without weights K is 1."""


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes another."""
    found = torch.empty_like(order)
    found[order] = torch.arange(order.numel(), device=order.device, dtype=order.dtype)
    return found


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, home: Tensor) -> Tensor:
        ctx.save_for_backward(home)
        return x.index_select(0, order if home.shape[1] == 1 else order // home.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (home,) = ctx.saved_tensors
        back = gradients[0].index_select(0, home.reshape(-1))
        return (back if home.shape[1] == 1 else back.view(*home.shape, back.shape[-1]).sum(1)), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, home: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None:
            ctx.save_for_backward(order)
            return rows.index_select(0, home.reshape(-1))
        ctx.save_for_backward(order, rows, home, weights)
        back = rows.index_select(0, home.reshape(-1)).view(*home.shape, rows.shape[-1])
        return (back * weights.unsqueeze(-1)).sum(1).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        order, *saved = ctx.saved_tensors
        (dout,) = gradients
        if not saved:
            return dout.index_select(0, order), None, None, None
        rows, home, weights = saved
        drows = dweights = None
        if ctx.needs_input_grad[0]:
            each = weights.reshape(-1).index_select(0, order).unsqueeze(-1)
            drows = (dout.index_select(0, order // home.shape[1]) * each).to(rows.dtype)
        if ctx.needs_input_grad[3]:
            back = rows.index_select(0, home.reshape(-1)).view(*home.shape, rows.shape[-1])
            dweights = (back * dout.unsqueeze(1).to(torch.promote_types(rows.dtype, weights.dtype))).sum(-1)
            dweights = dweights.to(weights.dtype)
        return drows, None, None, dweights


class TorchRows:
    """By torch's own indexing, on every device."""

    def sort(self, choices: Tensor, experts: int) -> tuple[Tensor, Moves]:
        flat = choices.reshape(-1)
        order = torch.argsort(flat, stable=True)
        return rows_of_experts(flat, experts), Moves(inverse(order).view(choices.shape), order)

    def spread(self, x: Tensor, moves: Moves) -> Tensor:
        rows: Tensor = _Spread.apply(x, moves.order, moves.home)
        return rows

    def collect(self, rows: Tensor, moves: Moves, weights: Tensor | None) -> Tensor:
        sums: Tensor = _Collect.apply(rows, moves.order, moves.home, weights)
        return sums


TORCH = TorchRows()
