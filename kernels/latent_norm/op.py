"""Latent norm as a torch operator: guards, launches, gradient, fake tensors, torch.compile.

The norm of a slice and the slice beside it are one operator and not a strided RMSNorm, because of the backward:
autograd would write the latent's gradient and then read both slices' to join them into ``[T, W]``; here one launch
writes the joint gradient once, whether the model splits or slices. The price is a copy of the rest in the forward.

Legend: R rows, W width of the joint projection, H width of the latent, P programs.
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
from shardwright.kernels.gated_rms_norm.op import dense_inside
from shardwright.kernels.gated_rms_norm.rows import RowSteps, row_steps
from shardwright.kernels.latent_norm import configs, contract
from shardwright.kernels.latent_norm.triton import latent_norm_bwd_kernel, latent_norm_fwd_kernel
from shardwright.kernels.launch import Launch, columns
from shardwright.kernels.rms_norm.op import reduce_weight_gradient

ADMITTED = Admitted()


def layout(role: str, tensor: Tensor | None) -> RowSteps:
    """Where the tensor's rows start; anything for a tensor that is not read."""
    if tensor is None:
        return RowSteps(1, 1, 0, 0, 0)
    return row_steps(contract.NAME, role, tensor.shape, tensor.stride())


def launch_forward(
    joint: Tensor,
    weight: Tensor,
    eps: float,
    latent: Tensor,
    rest: Tensor,
    rstd: Tensor,
    launch: Launch,
    key: Hashable = None,
) -> None:
    """Fill ``latent``, ``rest`` (dense) and ``rstd [R]``; nothing is launched for zero rows."""
    W, H = joint.shape[-1], weight.shape[0]
    R = joint.numel() // W
    if R == 0:
        return
    tensors = (joint, weight, latent, rest, rstd)
    if again(key, tensors):
        return
    with device.current(joint):
        start(
            key,
            tensors,
            latent_norm_fwd_kernel,
            (launch.grid(R, device.multiprocessors(joint)),),
            joint,
            weight,
            latent,
            rest,
            rstd,
            *layout("joint", joint),
            R,
            W,
            H,
            eps,
            ROWS=launch.rows,
            COLUMNS=columns(H),
            REST=columns(W - H),
            STAGES=launch.stages,
            num_warps=launch.warps,
        )


def launch_backward(
    dlatent: Tensor | None,
    drest: Tensor | None,
    joint: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    djoint: Tensor,
    dweight: Tensor | None,
    launch: Launch,
    token: object | None = None,
) -> None:
    """Fill ``djoint`` (dense) and, where the weight learns, ``dweight [H]``."""
    W, H = joint.shape[-1], weight.shape[0]
    R = joint.numel() // W
    if dweight is not None and (R == 0 or dlatent is None):
        dweight.zero_()
    if R == 0:
        return
    learns = dweight is not None and dlatent is not None
    P = launch.grid(R, device.multiprocessors(joint))
    partial = torch.empty((P, H), dtype=torch.float32, device=joint.device) if learns else None
    tensors = (dlatent, drest, joint, weight, rstd, djoint, partial)
    # Gradients' rows may lie anywhere: the token does not know their strides.
    key = key_of(token, "bwd", learns, *(None if t is None else t.stride() for t in (dlatent, drest)))
    if again(key, tensors):
        if partial is not None and dweight is not None:
            reduce_weight_gradient(partial, dweight, key_of(token, "dweight"))
        return
    with device.current(joint):
        start(
            key,
            tensors,
            latent_norm_bwd_kernel,
            (P,),
            joint if dlatent is None else dlatent,
            joint if drest is None else drest,
            joint,
            weight,
            rstd,
            djoint,
            rstd if partial is None else partial,
            *layout("dlatent", dlatent),
            *layout("drest", drest),
            *layout("joint", joint),
            R,
            W,
            H,
            eps,
            SINGLE=H == 1,
            LATENT_GRADIENT=dlatent is not None,
            REST_GRADIENT=drest is not None,
            WEIGHT_GRADIENT=learns,
            ROWS=launch.rows,
            COLUMNS=columns(H),
            REST=columns(W - H),
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
        if partial is not None and dweight is not None:
            reduce_weight_gradient(partial, dweight, key_of(token, "dweight"))


def admit(joint: Tensor, weight: Tensor, eps: float) -> object | None:
    """All guards; the layout's token."""
    return ADMITTED.check(
        (joint, weight), eps, lambda: contract.check(joint, weight, eps, interpreted=device.interpreted())
    )


def compute_forward(joint: Tensor, weight: Tensor, eps: float, token: object | None) -> tuple[Tensor, Tensor, Tensor]:
    """The normed latent ``[..., H]``, the rest ``[..., W - H]`` and ``rstd [R]`` in fp32, of admitted inputs."""
    W, H = joint.shape[-1], weight.shape[0]
    latent, rest = joint.new_empty((*joint.shape[:-1], H)), joint.new_empty((*joint.shape[:-1], W - H))
    rstd = joint.new_empty(joint.numel() // W, dtype=torch.float32)
    launch_forward(
        joint, weight, eps, latent, rest, rstd, configs.forward(configs.tile_width(W, H)), key_of(token, "fwd")
    )
    return latent, rest, rstd


def compute_backward(
    dlatent: Tensor | None,
    drest: Tensor | None,
    joint: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    weight_gradient: bool,
    token: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``djoint [..., W]``, dense; ``dweight [H]`` (``None`` where the weight is frozen)."""
    djoint = joint.new_empty(joint.shape)
    dweight = torch.empty_like(weight) if weight_gradient else None
    launch = configs.backward(configs.tile_width(joint.shape[-1], weight.shape[0]))
    given = [None if gradient is None else dense_inside(gradient) for gradient in (dlatent, drest)]
    launch_backward(given[0], given[1], joint, weight, rstd, eps, djoint, dweight, launch, token)
    return djoint, dweight


class LatentNorm(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.token = admit(joint, weight, eps)
        latent, rest, rstd = compute_forward(joint, weight, eps, ctx.token)
        ctx.save_for_backward(joint, weight, rstd)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return latent, rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlatent: Tensor | None, drest: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
        joint, weight, rstd = ctx.saved_tensors
        learns = ctx.needs_input_grad[1]
        djoint, dweight = compute_backward(dlatent, drest, joint, weight, rstd, ctx.eps, learns, ctx.token)
        return djoint, dweight, None


@torch.library.custom_op("shardwright::latent_norm_forward", mutates_args=())
def latent_norm_forward(joint: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normed latent, the rest and ``rstd [R]`` as one opaque node for tracers."""
    return compute_forward(joint, weight, eps, admit(joint, weight, eps))


@latent_norm_forward.register_fake
def _(joint: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    contract.check_static(joint, weight, eps)
    W, H = joint.shape[-1], weight.shape[0]
    latent, rest = joint.new_empty((*joint.shape[:-1], H)), joint.new_empty((*joint.shape[:-1], W - H))
    return latent, rest, joint.new_empty(joint.numel() // W, dtype=torch.float32)


@torch.library.custom_op("shardwright::latent_norm_backward", mutates_args=())
def latent_norm_backward(
    dlatent: Tensor | None,
    drest: Tensor | None,
    joint: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """``djoint [..., W]`` and ``dweight [H]`` (empty where the weight is frozen)."""
    djoint, dweight = compute_backward(dlatent, drest, joint, weight, rstd, eps, weight_gradient)
    return djoint, weight.new_empty(0) if dweight is None else dweight


@latent_norm_backward.register_fake
def _(
    dlatent: Tensor | None,
    drest: Tensor | None,
    joint: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor]:
    return joint.new_empty(joint.shape), weight.new_empty(weight.shape[0] if weight_gradient else 0)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[2])
    ctx.eps = inputs[2]
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dlatent: Tensor | None, drest: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None]:
    djoint, dweight = latent_norm_backward(dlatent, drest, *ctx.saved_tensors, ctx.eps, ctx.needs_input_grad[1])
    return (djoint if ctx.needs_input_grad[0] else None), (dweight if ctx.needs_input_grad[1] else None), None


latent_norm_forward.register_autograd(_differentiate, setup_context=_save)


def latent_norm(joint: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of the first ``H`` columns of a joint projection, and the other columns, in one launch each way.

    Args:
        joint: ``[..., W]``, bf16, fp16 or fp32: ``kv_a_proj_with_mqa``'s output, or any wider row; each row
            dense, rows anywhere (at most three strides).
        weight: ``[H]`` of the same dtype, H < W. A frozen weight costs no gradient work.
        eps: the norm's own (DeepSeek's and Kimi's latent norms keep 1e-6 whatever the model's is).

    Returns:
        The normed latent ``[..., H]`` and the rest ``[..., W - H]``, both contiguous.

    Raises:
        KernelError: an input outside ``contract.check``.
    """
    if not direct(joint, weight):
        latent, rest, _ = latent_norm_forward(joint, weight, eps)
        return latent, rest
    if not wants_gradient(joint, weight):
        latent, rest, _ = compute_forward(joint, weight, eps, admit(joint, weight, eps))
        return latent, rest
    return cast(tuple[Tensor, Tensor], LatentNorm.apply(joint, weight, eps))
