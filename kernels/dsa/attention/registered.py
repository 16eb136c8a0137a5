"""Sparse attention as registered operators: one opaque node for whatever traces, with its gradient and fake tensors.

Both operators take the parts of a ``Problem`` in its order, for a registered operator takes no objects.
Legend: as in ``problem``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shardwright.kernels.dsa.attention.compute import compute_backward, compute_forward, ordered
from shardwright.kernels.dsa.attention.problem import Problem


@torch.library.custom_op("shardwright::dsa_attention_forward", mutates_args=())
def dsa_attention_forward(
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
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, lse, and the ungated output's parts as one opaque node; the first of these is empty where nothing gates."""
    p = Problem(qn, qr, kn, kr, v, indices, bounds, gate, sinks, scale, block)
    found = compute_forward(p, save, check_indices)
    return found.y, found.lse, (found.y.new_empty(0) if found.o is found.y else found.o), found.low


@dsa_attention_forward.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qn, qr, kn, kr, v, gate, sinks, indices, bounds, scale, block, *_, save = given
    p = Problem(qn, qr, kn, kr, v, indices, bounds, gate, sinks, scale, block)
    p.check_static()
    shape = (qn.shape[0], qn.shape[1], p.DV)
    y = qn.new_empty(shape)
    lse = qn.new_empty(shape[:2], dtype=torch.float32)
    o = qn.new_empty(shape if save and gate is not None else (0,))
    return y, lse, o, qn.new_empty(shape if save else (0,))


@torch.library.custom_op("shardwright::dsa_attention_backward", mutates_args=())
def dsa_attention_backward(
    dy: Tensor,
    qn: Tensor,
    qr: Tensor | None,
    kn: Tensor,
    kr: Tensor | None,
    v: Tensor | None,
    gate: Tensor | None,
    sinks: Tensor | None,
    indices: Tensor,
    bounds: Tensor | None,
    lse: Tensor,
    o: Tensor,
    low: Tensor,
    scale: float,
    block: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients in the order of ``PARTS``; empty where an input is not there."""
    p = Problem(qn, qr, kn, kr, v, indices, bounds, gate, sinks, scale, block)
    found = ordered(compute_backward(p, dy, lse, o, low, deterministic))
    whole = [dy.new_empty(0) if part is None else part.contiguous() for part in found]
    return cast(tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple(whole))


@dsa_attention_backward.register_fake
def _(dy: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    whole = [dy.new_empty(0) if part is None else part.new_empty(part.shape) for part in given[:7]]
    return cast(tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple(whole))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, lse, o, low = output
    ctx.save_for_backward(*inputs[:9], lse, low, y if inputs[5] is None else o)
    ctx.settings = inputs[9:12]
    ctx.mark_non_differentiable(lse, o, low)


def _differentiate(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *parts, indices, bounds, lse, low, o = ctx.saved_tensors
    found = dsa_attention_backward(dy, *parts, indices, bounds, lse, o, low, *ctx.settings)
    wanted = (part if yes else None for part, yes in zip(found, ctx.needs_input_grad[:7], strict=True))
    return (*wanted, *(None,) * 7)


dsa_attention_forward.register_autograd(_differentiate, setup_context=_save)
