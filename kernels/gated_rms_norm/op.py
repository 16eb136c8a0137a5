"""Gated RMSNorm as a torch operator: guards, launches, gradient, fake tensors, torch.compile.

Legend: R rows, D row width, P programs.
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
from shardwright.kernels.gated_rms_norm import configs, contract
from shardwright.kernels.gated_rms_norm.rows import MOST_STEPS, RowSteps, row_steps, steps
from shardwright.kernels.gated_rms_norm.triton import gated_rms_norm_bwd_kernel, gated_rms_norm_fwd_kernel
from shardwright.kernels.guards import VECTOR_BYTES
from shardwright.kernels.launch import Launch, columns
from shardwright.kernels.rms_norm.op import reduce_weight_gradient

ADMITTED = Admitted()


def layout(role: str, tensor: Tensor) -> RowSteps:
    """Where the tensor's rows start."""
    return row_steps(contract.NAME, role, tensor.shape, tensor.stride())


def dense_inside(gradient: Tensor) -> Tensor:
    """The gradient where its rows can be read as they lie, else a dense copy.

    An expanded gradient (``y.sum().backward()``) has stride 0 inside its rows.
    """
    few = len(steps(gradient.shape[:-1], gradient.stride()[:-1])) <= MOST_STEPS
    aligned = gradient.data_ptr() % VECTOR_BYTES == 0
    return gradient if few and aligned and gradient.stride(-1) == 1 else gradient.contiguous()


def launch_forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    silu: bool,
    y: Tensor,
    rstd: Tensor,
    launch: Launch,
    key: Hashable = None,
) -> None:
    """Fill ``y`` (dense) and ``rstd [R]``; nothing is launched for zero rows."""
    D = weight.shape[0]
    R = x.numel() // D
    if R == 0:
        return
    tensors = (x, gate, weight, y, rstd)
    if again(key, tensors):
        return
    with device.current(x):
        start(
            key,
            tensors,
            gated_rms_norm_fwd_kernel,
            (launch.grid(R, device.multiprocessors(x)),),
            x,
            gate,
            weight,
            y,
            rstd,
            *layout("x", x),
            *layout("gate", gate),
            R,
            D,
            eps,
            SILU=silu,
            ROWS=launch.rows,
            COLUMNS=columns(D),
            STAGES=launch.stages,
            num_warps=launch.warps,
        )


def launch_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    silu: bool,
    dx: Tensor,
    dgate: Tensor,
    dweight: Tensor | None,
    launch: Launch,
    token: object | None = None,
) -> None:
    """Fill ``dx`` and ``dgate`` (dense) and, where the weight learns, ``dweight [D]``."""
    D = weight.shape[0]
    R = x.numel() // D
    if R == 0:
        if dweight is not None:
            dweight.zero_()
        return
    P = launch.grid(R, device.multiprocessors(x))
    partial = None if dweight is None else torch.empty((P, D), dtype=torch.float32, device=x.device)
    tensors = (dy, x, gate, weight, rstd, dx, dgate, partial)
    # A gradient's rows may lie anywhere: the token does not know its strides.
    key = key_of(token, "bwd", dweight is None, dy.stride())
    if again(key, tensors):
        if partial is not None and dweight is not None:
            reduce_weight_gradient(partial, dweight, key_of(token, "dweight"))
        return
    with device.current(x):
        start(
            key,
            tensors,
            gated_rms_norm_bwd_kernel,
            (P,),
            dy,
            x,
            gate,
            weight,
            rstd,
            dx,
            dgate,
            rstd if partial is None else partial,
            *layout("dy", dy),
            *layout("x", x),
            *layout("gate", gate),
            R,
            D,
            eps,
            SILU=silu,
            SINGLE=D == 1,
            WEIGHT_GRADIENT=dweight is not None,
            ROWS=launch.rows,
            COLUMNS=columns(D),
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
        if partial is not None and dweight is not None:
            reduce_weight_gradient(partial, dweight, key_of(token, "dweight"))


def admit(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> object | None:
    """All guards; the layout's token."""
    return ADMITTED.check(
        (x, gate, weight),
        (eps, activation),
        lambda: contract.check(x, gate, weight, eps, activation, interpreted=device.interpreted()),
    )


def compute_forward(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, token: object | None
) -> tuple[Tensor, Tensor]:
    """``y [..., D]`` in x's dtype, dense, and ``rstd [R]`` in fp32, of admitted inputs."""
    D = weight.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.numel() // D, dtype=torch.float32, device=x.device)
    launch_forward(x, gate, weight, eps, activation == "silu", y, rstd, configs.forward(D), key_of(token, "fwd"))
    return y, rstd


def compute_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    activation: str,
    weight_gradient: bool,
    token: object | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``dx`` and ``dgate [..., D]``, dense; ``dweight [D]`` (``None`` where the weight is frozen)."""
    dx, dgate = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    dweight = torch.empty_like(weight) if weight_gradient else None
    launch = configs.backward(weight.shape[0])
    launch_backward(
        dense_inside(dy), x, gate, weight, rstd, eps, activation == "silu", dx, dgate, dweight, launch, token
    )
    return dx, dgate, dweight


class GatedRmsNorm(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
        ctx.token = admit(x, gate, weight, eps, activation)
        y, rstd = compute_forward(x, gate, weight, eps, activation, ctx.token)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.eps, ctx.activation = eps, activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, gate, weight, rstd = ctx.saved_tensors
        dx, dgate, dweight = compute_backward(
            dy, x, gate, weight, rstd, ctx.eps, ctx.activation, ctx.needs_input_grad[2], ctx.token
        )
        return dx, dgate, dweight, None, None


@torch.library.custom_op("shardwright::gated_rms_norm_forward", mutates_args=())
def gated_rms_norm_forward(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str
) -> tuple[Tensor, Tensor]:
    """``y [..., D]`` and ``rstd [R]`` as one opaque node for tracers."""
    return compute_forward(x, gate, weight, eps, activation, admit(x, gate, weight, eps, activation))


@gated_rms_norm_forward.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> tuple[Tensor, Tensor]:
    contract.check_static(x, gate, weight, eps, activation)
    return x.new_empty(x.shape), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@torch.library.custom_op("shardwright::gated_rms_norm_backward", mutates_args=())
def gated_rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    activation: str,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dx``, ``dgate [..., D]`` and ``dweight [D]`` (empty where the weight is frozen)."""
    dx, dgate, dweight = compute_backward(dy, x, gate, weight, rstd, eps, activation, weight_gradient)
    return dx, dgate, weight.new_empty(0) if dweight is None else dweight


@gated_rms_norm_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    activation: str,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), weight.new_empty(weight.shape[0] if weight_gradient else 0)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float, str], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.eps, ctx.activation = inputs[3:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    found = gated_rms_norm_backward(dy, *ctx.saved_tensors, ctx.eps, ctx.activation, ctx.needs_input_grad[2])
    dx, dgate, dweight = (g if wanted else None for g, wanted in zip(found, ctx.needs_input_grad, strict=False))
    return dx, dgate, dweight, None, None


gated_rms_norm_forward.register_autograd(_differentiate, setup_context=_save)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, activation: str) -> Tensor:
    """Fused ``w · x · rsqrt(mean(x²) + eps) · act(gate)``: norm before gate, fp32 inside, one rounding.

    Args:
        x: ``[..., D]``, bf16, fp16 or fp32; each row dense, rows anywhere (at most three strides).
        gate: as ``x`` in shape and dtype, in a layout of its own, before its activation.
        weight: ``[D]`` of x's dtype or fp32. A frozen weight costs no gradient work.
        eps: the model's own; there is no default.
        activation: ``sigmoid`` or ``silu``.

    Returns:
        ``[..., D]`` in x's dtype, contiguous.

    Raises:
        KernelError: an input outside ``contract.check``.
    """
    if not direct(x, gate, weight):
        y, _ = gated_rms_norm_forward(x, gate, weight, eps, activation)
        return y
    if not wants_gradient(x, gate, weight):
        return compute_forward(x, gate, weight, eps, activation, admit(x, gate, weight, eps, activation))[0]
    return cast(Tensor, GatedRmsNorm.apply(x, gate, weight, eps, activation))
