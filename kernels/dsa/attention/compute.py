"""Sparse attention of plain tensors: guards, launches, and the short way through autograd.

Saved for the backward: the inputs, lse, and the ungated output in two parts of its dtype. With one part alone the
sum Σ o · dO, which is subtracted from dP, would carry the output's rounding: where one key has nearly all the share,
that is all that would be left of dS.

Legend: as in ``problem``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.dsa.attention import launches, selection
from shardwright.kernels.dsa.attention.problem import Problem


def compute_forward(p: Problem, save: bool, check_indices: bool) -> launches.Forward:
    """Guards that need real tensors, the check of the selection, and the forward."""
    p.check_places(interpreted=device.interpreted())
    if check_indices:
        selection.watch(p)
    with torch.no_grad():
        return launches.forward(p, save)


def compute_backward(
    p: Problem, dy: Tensor, lse: Tensor, o: Tensor, low: Tensor, deterministic: bool
) -> launches.Gradients:
    """An expanded gradient (``o.sum()``) is made real rows first."""
    selection.raise_pending()
    with torch.no_grad():
        return launches.backward(p, dy, lse, o, low, deterministic)


PARTS = ("qn", "qr", "kn", "kr", "v", "gate", "sinks")
"""Inputs that may learn, in the order in which the operator takes them."""


def ordered(found: launches.Gradients) -> tuple[Tensor | None, ...]:
    return tuple(getattr(found, name) for name in PARTS)


class SparseAttention(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(
        ctx: Any,
        qn: Tensor,
        qr: Tensor | None,
        kn: Tensor,
        kr: Tensor | None,
        v: Tensor | None,
        gate: Tensor | None,
        sinks: Tensor | None,
        indices: Tensor,
        bounds: Tensor | None,
        scale: float,
        block: int,
        deterministic: bool,
        check_indices: bool,
    ) -> tuple[Tensor, Tensor]:
        p = Problem(qn, qr, kn, kr, v, indices, bounds, gate, sinks, scale, block)
        found = compute_forward(p, True, check_indices)
        ctx.save_for_backward(
            qn, qr, kn, kr, v, gate, sinks, indices, bounds, found.lse, found.low, found.y if gate is None else found.o
        )
        ctx.settings = (scale, block, deterministic)
        ctx.mark_non_differentiable(found.lse)
        ctx.set_materialize_grads(False)
        return found.y, found.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 13
        qn, qr, kn, kr, v, gate, sinks, indices, bounds, lse, low, o = ctx.saved_tensors
        scale, block, deterministic = ctx.settings
        p = Problem(qn, qr, kn, kr, v, indices, bounds, gate, sinks, scale, block)
        found = ordered(compute_backward(p, dy, lse, o, low, deterministic))
        wanted = (part if yes else None for part, yes in zip(found, ctx.needs_input_grad[:7], strict=True))
        return (*wanted, *(None,) * 6)
