"""Residual add + RMSNorm as a torch operator: guards, launches, gradient, fake tensors, torch.compile.

Legend: T rows, H hidden, P programs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.add_rms_norm import configs, contract
from shardwright.kernels.add_rms_norm.triton import add_rms_norm_bwd_kernel, add_rms_norm_fwd_kernel
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.launch import Launch, columns
from shardwright.kernels.rms_norm.op import reduce_weight_gradient

ADMITTED = Admitted()


def launch_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    y: Tensor,
    total: Tensor,
    rstd: Tensor,
    launch: Launch,
    key: Hashable = None,
) -> None:
    """Fill ``y [T, H]``, ``total [T, H]`` and ``rstd [T]``; nothing is launched for zero rows."""
    H = weight.shape[0]
    T = x.numel() // H
    if T == 0:
        return
    tensors = (x, residual, weight, y, total, rstd)
    if again(key, tensors):
        return
    with device.current(x):
        start(
            key,
            tensors,
            add_rms_norm_fwd_kernel,
            (launch.grid(T, device.multiprocessors(x)),),
            x,
            residual,
            weight,
            y,
            total,
            rstd,
            T,
            H,
            eps,
            ROWS=launch.rows,
            COLUMNS=columns(H),
            STAGES=launch.stages,
            num_warps=launch.warps,
        )


def launch_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    dx: Tensor,
    dweight: Tensor | None,
    launch: Launch,
    token: object | None = None,
) -> None:
    """Fill ``dx [T, H]`` and, where the weight learns, ``dweight [H]``."""
    H = weight.shape[0]
    T = total.numel() // H
    if T == 0:
        if dweight is not None:
            dweight.zero_()
        return
    P = launch.grid(T, device.multiprocessors(total))
    partial = None if dweight is None else torch.empty((P, H), dtype=torch.float32, device=total.device)
    tensors = (dy, dtotal, total, weight, rstd, dx, partial)
    key = key_of(token, "bwd", dtotal is None, dweight is None)
    if again(key, tensors):
        if partial is not None and dweight is not None:
            reduce_weight_gradient(partial, dweight, key_of(token, "dweight"))
        return
    with device.current(total):
        start(
            key,
            tensors,
            add_rms_norm_bwd_kernel,
            (P,),
            dy,
            dy if dtotal is None else dtotal,
            total,
            weight,
            rstd,
            dx,
            rstd if partial is None else partial,
            T,
            H,
            eps,
            SINGLE=H == 1,
            RESIDUAL_GRADIENT=dtotal is not None,
            WEIGHT_GRADIENT=dweight is not None,
            ROWS=launch.rows,
            COLUMNS=columns(H),
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
        if partial is not None and dweight is not None:
            reduce_weight_gradient(partial, dweight, key_of(token, "dweight"))


def admit(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> object | None:
    """All guards; the layout's token."""
    return ADMITTED.check(
        (x, residual, weight), eps, lambda: contract.check(x, residual, weight, eps, interpreted=device.interpreted())
    )


def compute_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, token: object | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``y`` and the sum, both ``[..., H]``, and ``rstd [T]`` in fp32, of admitted inputs."""
    H = weight.shape[0]
    y, total = torch.empty_like(x), torch.empty_like(x)
    rstd = torch.empty(x.numel() // H, dtype=torch.float32, device=x.device)
    launch_forward(x, residual, weight, eps, y, total, rstd, configs.forward(H), key_of(token, "fwd"))
    return y, total, rstd


def compute_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    weight_gradient: bool,
    token: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``dx [..., H]``, the gradient of x and of the residual; ``dweight [H]``, ``None`` where frozen.

    Expanded gradients have stride 0; the kernel needs real rows.
    """
    dx = torch.empty_like(total)
    dweight = torch.empty_like(weight) if weight_gradient else None
    other = None if dtotal is None else dtotal.contiguous()
    launch_backward(
        dy.contiguous(), other, total, weight, rstd, eps, dx, dweight, configs.backward(weight.shape[0]), token
    )
    return dx, dweight


class AddRmsNorm(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.token = admit(x, residual, weight, eps)
        y, total, rstd = compute_forward(x, residual, weight, eps, ctx.token)
        ctx.save_for_backward(total, weight, rstd)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dtotal: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if dy is None:  # only the sum was used: the norm takes no part
            return dtotal, dtotal, None, None
        total, weight, rstd = ctx.saved_tensors
        dx, dweight = compute_backward(dy, dtotal, total, weight, rstd, ctx.eps, ctx.needs_input_grad[2], ctx.token)
        return dx, dx, dweight, None


@torch.library.custom_op("shardwright::add_rms_norm_forward", mutates_args=())
def add_rms_norm_forward(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``y``, the sum and ``rstd [T]`` as one opaque node for tracers."""
    return compute_forward(x, residual, weight, eps, admit(x, residual, weight, eps))


@add_rms_norm_forward.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    contract.check_static(x, residual, weight, eps)
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@torch.library.custom_op("shardwright::add_rms_norm_backward", mutates_args=())
def add_rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor, eps: float, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    """``dx [..., H]``, the gradient of x and of the residual; ``dweight [H]``, empty where frozen."""
    dx, dweight = compute_backward(dy, dtotal, total, weight, rstd, eps, weight_gradient)
    return dx, weight.new_empty(0) if dweight is None else dweight


@add_rms_norm_backward.register_fake
def _(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor, eps: float, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(total), weight.new_empty(weight.shape[0] if weight_gradient else 0)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, total, rstd = output
    ctx.save_for_backward(total, inputs[2], rstd)
    ctx.eps = inputs[3]
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dy: Tensor | None, dtotal: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    if dy is None:
        return dtotal, dtotal, None, None
    dx, dweight = add_rms_norm_backward(dy, dtotal, *ctx.saved_tensors, ctx.eps, ctx.needs_input_grad[2])
    return (
        dx if ctx.needs_input_grad[0] else None,
        dx if ctx.needs_input_grad[1] else None,
        dweight if ctx.needs_input_grad[2] else None,
        None,
    )


add_rms_norm_forward.register_autograd(_differentiate, setup_context=_save)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Fused ``r = x + residual`` and ``y = rms_norm(r)``.

    Args:
        x: ``[..., H]``, contiguous, bf16, fp16 or fp32.
        residual: as ``x``.
        weight: ``[H]`` of the same dtype. A frozen weight costs no gradient work.
        eps: the model's own; there is no default.

    Returns:
        ``y`` and the new residual ``r``, both ``[..., H]`` in x's dtype.

    Raises:
        KernelError: an input outside ``contract.check``.
    """
    if not direct(x, residual, weight):
        y, total, _ = add_rms_norm_forward(x, residual, weight, eps)
        return y, total
    if not wants_gradient(x, residual, weight):
        y, total, _ = compute_forward(x, residual, weight, eps, admit(x, residual, weight, eps))
        return y, total
    return cast(tuple[Tensor, Tensor], AddRmsNorm.apply(x, residual, weight, eps))
