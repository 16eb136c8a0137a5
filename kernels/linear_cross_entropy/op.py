"""Head and cross-entropy as a torch operator: guards, gradient, fake tensors, torch.compile.

The forward computes the gradients (the head is frozen, so dx is all there is to it, plus LoRA's); the
backward multiplies them by the loss's own gradient. Saved for it: dx ``[T, H]``, and fp32 da, db of LoRA.

Precision: logits in x's dtype, statistics and loss in fp32, gradient of the logits rounded once to x's
dtype. A mean's 1/n is split as m · 2⁻ᵉ, m in the gradient of the logits and 2⁻ᵉ at the end, so small
probabilities do not underflow and dx is rounded no second time while the incoming gradient is a power of two.

Legend: T tokens, H hidden, V vocabulary, r LoRA rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.linear_cross_entropy import contract, labels
from shardwright.kernels.linear_cross_entropy.chunks import Found, Lora, scaled, walk


def compute_forward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    tokens: Tensor | None,
    lora_scale: float,
    ignore_index: int,
    reduction: str,
    x_gradient: bool,
    lora_gradient: bool,
) -> tuple[Tensor, Found]:
    """Guards, the walk over the chunks, and the loss: a scalar, or ``[...]``; fp32."""
    contract.check(x, weight, targets, lora_a, lora_b, tokens, interpreted=device.interpreted())
    lora = None
    if lora_a is not None and lora_b is not None:
        lora = Lora(lora_a.detach().to(x.dtype), lora_b.detach().to(x.dtype), lora_scale)
    with torch.no_grad():
        found = walk(
            x.reshape(-1, x.shape[-1]),
            weight,
            targets.reshape(-1),
            lora,
            tokens,
            ignore_index=ignore_index,
            mean=reduction == "mean",
            x_gradient=x_gradient,
            lora_gradient=lora_gradient,
        )
        labels.watch(found.counts, weight.shape[0])
        if reduction == "none":
            return found.rows.reshape(targets.shape), found
        total = found.rows.sum()
        divisor = found.counts[0] if tokens is None else tokens.reshape(())
        return (total / divisor if reduction == "mean" else total), found


def compute_backward(gradient: Tensor, part: Tensor, factors: Tensor, dtype: torch.dtype, per_row: bool) -> Tensor:
    """One saved gradient times the loss's own. An expanded gradient (``loss.sum()``) is made real rows first."""
    labels.raise_pending()
    scale = gradient.to(torch.float32).reshape(-1).contiguous()
    return scaled(part, scale, factors, dtype, per_row=per_row)


class LinearCrossEntropy(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        tokens: Tensor | None,
        lora_scale: float,
        ignore_index: int,
        reduction: str,
    ) -> Tensor:
        x_gradient, lora_gradient = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3:5])
        loss, found = compute_forward(
            x, weight, targets, lora_a, lora_b, tokens, lora_scale, ignore_index, reduction, x_gradient, lora_gradient
        )
        ctx.save_for_backward(found.factors, found.dx, found.da, found.db)
        ctx.shape, ctx.per_row = x.shape, reduction == "none"
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, lora_a, lora_b)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        factors, *parts = ctx.saved_tensors
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[3], ctx.needs_input_grad[4])
        dx, da, db = (
            compute_backward(gradient, part, factors, dtype, ctx.per_row) if yes else None
            for part, dtype, yes in zip(parts, ctx.dtypes, wanted, strict=True)
        )
        return (None if dx is None else dx.reshape(ctx.shape)), None, None, da, db, None, None, None, None


@torch.library.custom_op("shardwright::linear_cross_entropy_forward", mutates_args=())
def linear_cross_entropy_forward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    tokens: Tensor | None,
    lora_scale: float,
    ignore_index: int,
    reduction: str,
    x_gradient: bool,
    lora_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, factors, dx, da, db as one opaque node for tracers; a gradient not asked for is empty."""
    loss, found = compute_forward(
        x, weight, targets, lora_a, lora_b, tokens, lora_scale, ignore_index, reduction, x_gradient, lora_gradient
    )
    dx, da, db = (x.new_empty(0) if part is None else part for part in (found.dx, found.da, found.db))
    return loss, found.factors, dx, da, db


@linear_cross_entropy_forward.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    lora_a, lora_b, tokens, lora_scale, _, reduction, x_gradient, lora_gradient = given
    contract.check_static(x, weight, targets, lora_a, lora_b, tokens, lora_scale=lora_scale, reduction=reduction)
    wide = torch.float32
    loss = x.new_empty(targets.shape if reduction == "none" else (), dtype=wide)
    dx = x.new_empty((x.numel() // x.shape[-1], x.shape[-1])) if x_gradient else x.new_empty(0)
    if lora_a is None or lora_b is None or not lora_gradient:
        return loss, x.new_empty(2, dtype=wide), dx, x.new_empty(0), x.new_empty(0)
    da, db = x.new_empty(lora_a.shape, dtype=wide), x.new_empty(lora_b.shape, dtype=wide)
    return loss, x.new_empty(2, dtype=wide), dx, da, db


@torch.library.custom_op("shardwright::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward(
    gradient: Tensor, part: Tensor, factors: Tensor, dtype: torch.dtype, per_row: bool
) -> Tensor:
    """One saved gradient times the loss's own."""
    return compute_backward(gradient, part, factors, dtype, per_row)


@linear_cross_entropy_backward.register_fake
def _(gradient: Tensor, part: Tensor, factors: Tensor, dtype: torch.dtype, per_row: bool) -> Tensor:
    return torch.empty_like(part, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    x, lora_a, lora_b, reduction = inputs[0], inputs[3], inputs[4], inputs[8]
    ctx.shape, ctx.per_row = x.shape, reduction == "none"
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, lora_a, lora_b)]


def _differentiate(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    factors, *parts = ctx.saved_tensors
    wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[3], ctx.needs_input_grad[4])
    dx, da, db = (
        linear_cross_entropy_backward(gradient, part, factors, dtype, ctx.per_row) if yes else None
        for part, dtype, yes in zip(parts, ctx.dtypes, wanted, strict=True)
    )
    return (None if dx is None else dx.reshape(ctx.shape)), None, None, da, db, *(None for _ in range(6))


linear_cross_entropy_forward.register_autograd(_differentiate, setup_context=_save)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    *,
    tokens: Tensor | None = None,
    lora_scale: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of a frozen head's logits, which are never whole in memory.

    A label outside ``0..V-1`` that is not ``ignore_index`` gives NaN at once and the typed error as soon as
    that needs no wait (``labels``). A mean over no token is NaN with gradient 0, as torch defines it.

    Args:
        x: ``[..., H]``, contiguous, bf16, fp16 or fp32.
        weight: ``[V, H]`` of the same dtype, frozen.
        targets: ``[...]`` int64, already shifted.
        lora_a: ``[r, H]`` in x's dtype or fp32; its gradient has its dtype.
        lora_b: ``[V, r]``, likewise.
        tokens: one int64 or fp32 value on x's device that a mean divides by in place of this call's own
            count: the tokens of all micro-batches and ranks. Then the loss needs no factor afterwards, and
            dx no second rounding.
        lora_scale: ``alpha / r``.
        reduction: ``mean`` over the tokens that count, ``sum``, or ``none`` (not with learning LoRA).

    Returns:
        fp32 scalar, or ``[...]`` for ``none``.

    Raises:
        KernelError: an input outside ``contract.check``, or ``label-out-of-range``.
    """
    factors = [factor for factor in (lora_a, lora_b) if factor is not None]
    lora_gradient = wants_gradient(*factors) if factors else False
    contract.check_static(
        x,
        weight,
        targets,
        lora_a,
        lora_b,
        tokens,
        lora_scale=lora_scale,
        reduction=reduction,
        weight_learns=wants_gradient(weight),
        lora_learns=lora_gradient,
    )
    settings = (tokens, lora_scale, ignore_index, reduction)
    if not direct(x, weight, targets, *factors):
        flags = (wants_gradient(x), lora_gradient)
        return linear_cross_entropy_forward(x, weight, targets, lora_a, lora_b, *settings, *flags)[0]
    if not wants_gradient(x, *factors):
        return compute_forward(x, weight, targets, lora_a, lora_b, *settings, False, False)[0]
    return cast(Tensor, LinearCrossEntropy.apply(x, weight, targets, lora_a, lora_b, *settings))
