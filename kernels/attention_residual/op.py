"""Attention residuals as a torch operator: guards, gradient, fake tensors, torch.compile.

Legend: T tokens, R rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.attention_residual import configs, contract
from shardwright.kernels.attention_residual.launches import Kept, Rows, launch_backward, launch_forward
from shardwright.kernels.bound import key_of
from shardwright.kernels.dispatch import direct, wants_gradient

ADMITTED = Admitted()


def admit(rows: Rows, norm: Tensor, projection: Tensor, eps: float) -> object | None:
    """All guards; the layout's token."""
    guards = lambda: contract.check(rows, norm, projection, eps, interpreted=device.interpreted())  # noqa: E731
    return ADMITTED.check((*rows, norm, projection), (len(rows), eps), guards)


def compute_forward(
    rows: Rows, norm: Tensor, projection: Tensor, eps: float, keep: bool, token: object | None
) -> tuple[Tensor, Kept | None]:
    """``y [..., H]``, and what a backward needs where ``keep``, of admitted inputs."""
    H = norm.shape[0]
    y, T = torch.empty_like(rows[0]), rows[0].numel() // H
    sizes = ((len(rows), T), (len(rows), T), (T,))
    found = tuple(torch.empty(size, dtype=torch.float32, device=y.device) for size in sizes) if keep else None
    kept = cast("Kept | None", found)
    launch_forward(rows, norm, projection, eps, y, kept, configs.forward(H), key_of(token, "fwd", keep))
    return y, kept


def compute_backward(
    dy: Tensor,
    rows: Rows,
    norm: Tensor,
    projection: Tensor,
    kept: Kept,
    weight_gradient: bool,
    token: object | None = None,
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """Gradients of all rows, of the norm and of the projection (``None`` where both are frozen).

    An expanded gradient (``y.sum().backward()``) has stride 0; the kernel needs real rows.
    """
    H = norm.shape[0]
    drows = [torch.empty_like(row) for row in rows]
    direction = torch.empty(H, dtype=torch.float32, device=norm.device) if weight_gradient else None
    launch_backward(dy.contiguous(), rows, norm, projection, kept, drows, direction, configs.backward(H), token)
    if direction is None:
        return drows, None, None
    dnorm = (direction * projection.reshape(-1).float()).to(norm.dtype)
    return drows, dnorm, (direction * norm.float()).to(projection.dtype).view(projection.shape)


class AttentionResidual(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(ctx: Any, norm: Tensor, projection: Tensor, eps: float, *rows: Tensor) -> Tensor:
        ctx.token = admit(rows, norm, projection, eps)
        y, kept = compute_forward(rows, norm, projection, eps, True, ctx.token)
        assert kept is not None
        ctx.save_for_backward(norm, projection, *kept, *rows)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        norm, projection, rstd, logit, lse, *rows = ctx.saved_tensors
        norm_learns, projection_learns, _, *rows_learn = ctx.needs_input_grad
        drows, dnorm, dprojection = compute_backward(
            dy, rows, norm, projection, (rstd, logit, lse), norm_learns or projection_learns, ctx.token
        )
        return (
            dnorm if norm_learns else None,
            dprojection if projection_learns else None,
            None,
            *(drow if learns else None for drow, learns in zip(drows, rows_learn, strict=True)),
        )


@torch.library.custom_op("shardwright::attention_residual_forward", mutates_args=())
def attention_residual_forward(
    rows: Sequence[Tensor], norm: Tensor, projection: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``y`` and what a backward needs, as one opaque node for tracers."""
    y, kept = compute_forward(rows, norm, projection, eps, True, admit(rows, norm, projection, eps))
    assert kept is not None
    return y, *kept


@attention_residual_forward.register_fake
def _(rows: Sequence[Tensor], norm: Tensor, projection: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    contract.check_static(rows, norm, projection, eps)
    first = rows[0]
    T = first.numel() // first.shape[-1]
    wide = [first.new_empty(size, dtype=torch.float32) for size in ((len(rows), T), (len(rows), T), (T,))]
    return torch.empty_like(first), wide[0], wide[1], wide[2]


@torch.library.custom_op("shardwright::attention_residual_backward", mutates_args=())
def attention_residual_backward(
    dy: Tensor,
    rows: Sequence[Tensor],
    norm: Tensor,
    projection: Tensor,
    rstd: Tensor,
    logit: Tensor,
    lse: Tensor,
    weight_gradient: bool,
) -> list[Tensor]:
    """Gradients of all rows, then of norm and projection, empty where both are frozen."""
    drows, *others = compute_backward(dy, rows, norm, projection, (rstd, logit, lse), weight_gradient)
    return [*drows, *(norm.new_empty(0) if other is None else other for other in others)]


@attention_residual_backward.register_fake
def _(
    dy: Tensor,
    rows: Sequence[Tensor],
    norm: Tensor,
    projection: Tensor,
    rstd: Tensor,
    logit: Tensor,
    lse: Tensor,
    weight_gradient: bool,
) -> list[Tensor]:
    others = (torch.empty_like(one) if weight_gradient else norm.new_empty(0) for one in (norm, projection))
    return [*(torch.empty_like(row) for row in rows), *others]


def _save(
    ctx: Any, inputs: tuple[Sequence[Tensor], Tensor, Tensor, float], output: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    rows, norm, projection, _ = inputs
    ctx.save_for_backward(norm, projection, *output[1:], *rows)
    ctx.weights_learn = norm.requires_grad, projection.requires_grad
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dy: Tensor | None, *_: Tensor | None
) -> tuple[list[Tensor | None], Tensor | None, Tensor | None, None]:
    norm, projection, rstd, logit, lse, *rows = ctx.saved_tensors
    if dy is None:
        return [None] * len(rows), None, None, None
    norm_learns, projection_learns = ctx.weights_learn
    *drows, dnorm, dprojection = attention_residual_backward(
        dy, rows, norm, projection, rstd, logit, lse, norm_learns or projection_learns
    )
    return [*drows], dnorm if norm_learns else None, dprojection if projection_learns else None, None


attention_residual_forward.register_autograd(_differentiate, setup_context=_save)


def attention_residual(rows: Sequence[Tensor], norm: Tensor, projection: Tensor, eps: float) -> Tensor:
    """Fused ``Σ_r softmax_r((norm × projection) · row_r / rms(row_r)) · row_r``, in fp32 inside.

    Args:
        rows: 1 to 16 tensors ``[..., H]``, contiguous, bf16, fp16 or fp32; read where they lie.
        norm: ``[H]`` of the same dtype. Frozen, it costs no gradient work.
        projection: ``[H]`` or ``[1, H]``, likewise.
        eps: the model's own; there is no default.

    Returns:
        ``[..., H]`` in the rows' dtype.

    Raises:
        KernelError: an input outside ``contract.check``.
    """
    rows = tuple(rows)
    if not direct(*rows, norm, projection):
        return attention_residual_forward(rows, norm, projection, eps)[0]
    if not wants_gradient(*rows, norm, projection):
        return compute_forward(rows, norm, projection, eps, False, admit(rows, norm, projection, eps))[0]
    return cast(Tensor, AttentionResidual.apply(norm, projection, eps, *rows))
