"""RMSNorm as a torch operator: guards, launches, gradient, fake tensors, torch.compile.

Legend: T rows, H hidden, P programs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.launch import Launch, columns
from shardwright.kernels.rms_norm import configs, contract
from shardwright.kernels.rms_norm.triton import (
    rms_norm_bwd_kernel,
    rms_norm_bwd_weight_kernel,
    rms_norm_fwd_kernel,
)

ADMITTED = Admitted()


def launch_forward(
    x: Tensor, weight: Tensor, eps: float, y: Tensor, rstd: Tensor, launch: Launch, key: Hashable = None
) -> None:
    """Fill ``y [T, H]`` and ``rstd [T]``; nothing is launched for zero rows."""
    H = weight.shape[0]
    T = x.numel() // H
    if T == 0:
        return
    tensors = (x, weight, y, rstd)
    if again(key, tensors):
        return
    with device.current(x):
        start(
            key,
            tensors,
            rms_norm_fwd_kernel,
            (launch.grid(T, device.multiprocessors(x)),),
            x,
            weight,
            y,
            rstd,
            T,
            H,
            eps,
            RELOAD=launch.reload,
            ROWS=launch.rows,
            COLUMNS=columns(H),
            STAGES=launch.stages,
            num_warps=launch.warps,
        )


def launch_backward(
    dy: Tensor,
    x: Tensor,
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
    T = x.numel() // H
    if T == 0:
        if dweight is not None:
            dweight.zero_()
        return
    P = launch.grid(T, device.multiprocessors(x))
    partial = None if dweight is None else torch.empty((P, H), dtype=torch.float32, device=x.device)
    tensors, key = (dy, x, weight, rstd, dx, partial), key_of(token, "bwd", dweight is None)
    if again(key, tensors):
        if partial is not None and dweight is not None:
            reduce_weight_gradient(partial, dweight, key_of(token, "dweight"))
        return
    with device.current(x):
        start(
            key,
            tensors,
            rms_norm_bwd_kernel,
            (P,),
            dy,
            x,
            weight,
            rstd,
            dx,
            rstd if partial is None else partial,
            T,
            H,
            eps,
            SINGLE=H == 1,
            WEIGHT_GRADIENT=dweight is not None,
            ROWS=launch.rows,
            COLUMNS=columns(H),
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
        if partial is not None and dweight is not None:
            reduce_weight_gradient(partial, dweight, key_of(token, "dweight"))


def reduce_weight_gradient(partial: Tensor, dweight: Tensor, key: Hashable = None) -> None:
    """Add the programs' partial sums ``[P, H]`` into ``dweight [H]``, in a fixed order."""
    P, H = partial.shape
    if again(key, (partial, dweight)):
        return
    start(
        key,
        (partial, dweight),
        rms_norm_bwd_weight_kernel,
        (-(-H // configs.WEIGHT_BLOCK_H),),
        partial,
        dweight,
        P,
        H,
        BLOCK_P=configs.WEIGHT_BLOCK_P,
        BLOCK_H=configs.WEIGHT_BLOCK_H,
        num_warps=configs.WEIGHT_WARPS,
    )


def admit(x: Tensor, weight: Tensor, eps: float) -> object | None:
    """All guards; the layout's token."""
    return ADMITTED.check((x, weight), eps, lambda: contract.check(x, weight, eps, interpreted=device.interpreted()))


def compute_forward(x: Tensor, weight: Tensor, eps: float, token: object | None) -> tuple[Tensor, Tensor]:
    """``y [..., H]`` in x's dtype and ``rstd [T]`` in fp32, of admitted inputs."""
    H = weight.shape[0]
    y = torch.empty_like(x)
    rstd = torch.empty(x.numel() // H, dtype=torch.float32, device=x.device)
    launch_forward(x, weight, eps, y, rstd, configs.forward(H), key_of(token, "fwd"))
    return y, rstd


def compute_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    weight_gradient: bool,
    token: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``dx [..., H]`` and ``dweight [H]`` (``None`` where the weight is frozen).

    An expanded gradient (``y.sum().backward()``) has stride 0; the kernel needs real rows.
    """
    dx = torch.empty_like(x)
    dweight = torch.empty_like(weight) if weight_gradient else None
    launch_backward(dy.contiguous(), x, weight, rstd, eps, dx, dweight, configs.backward(weight.shape[0]), token)
    return dx, dweight


class RmsNorm(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.token = admit(x, weight, eps)
        y, rstd = compute_forward(x, weight, eps, ctx.token)
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = compute_backward(dy, x, weight, rstd, ctx.eps, ctx.needs_input_grad[1], ctx.token)
        return dx, dweight, None


@torch.library.custom_op("shardwright::rms_norm_forward", mutates_args=())
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``y [..., H]`` and ``rstd [T]`` as one opaque node for tracers."""
    return compute_forward(x, weight, eps, admit(x, weight, eps))


@rms_norm_forward.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    contract.check_static(x, weight, eps)
    return torch.empty_like(x), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@torch.library.custom_op("shardwright::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, eps: float, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    """``dx [..., H]`` and ``dweight [H]`` (empty where the weight is frozen)."""
    dx, dweight = compute_backward(dy, x, weight, rstd, eps, weight_gradient)
    return dx, weight.new_empty(0) if dweight is None else dweight


@rms_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, eps: float, weight_gradient: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), weight.new_empty(weight.shape[0] if weight_gradient else 0)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.eps = inputs[2]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    dx, dweight = rms_norm_backward(dy, *ctx.saved_tensors, ctx.eps, ctx.needs_input_grad[1])
    return (dx if ctx.needs_input_grad[0] else None), (dweight if ctx.needs_input_grad[1] else None), None


rms_norm_forward.register_autograd(_differentiate, setup_context=_save)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Fused RMSNorm: ``w · round(x · rsqrt(mean(x²) + eps))``, statistics in fp32.

    Args:
        x: ``[..., H]``, contiguous, bf16, fp16 or fp32.
        weight: ``[H]`` of the same dtype. A frozen weight costs no gradient work.
        eps: the model's own; there is no default.

    Returns:
        ``[..., H]`` in x's dtype.

    Raises:
        KernelError: an input outside ``contract.check``.
    """
    if not direct(x, weight):
        y, _ = rms_norm_forward(x, weight, eps)
        return y
    if not wants_gradient(x, weight):
        return compute_forward(x, weight, eps, admit(x, weight, eps))[0]
    return cast(Tensor, RmsNorm.apply(x, weight, eps))
