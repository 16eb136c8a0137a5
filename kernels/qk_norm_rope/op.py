"""Query/key norm + RoPE as a torch operator: guards, gradient, fake tensors, torch.compile.

Legend: B batch, T tokens, Q and K heads, D head width, W rotary width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.bound import key_of
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.guards import VECTOR_BYTES
from shardwright.kernels.qk_norm_rope import configs, contract
from shardwright.kernels.qk_norm_rope.launches import Inputs, Pair, Settings, launch_backward, launch_forward

ADMITTED = Admitted()
INPUTS = 6
"""Tensors of ``Inputs``."""


def compute_forward(given: Inputs, settings: Settings) -> tuple[Tensor, Tensor, object | None]:
    """Guards, then both outputs, dense, in the inputs' dtype; and the layout's token."""
    width, pairing, _, eps, _ = settings
    token = ADMITTED.check(
        given, settings, lambda: contract.check(*given, eps, width, pairing, interpreted=device.interpreted())
    )
    contract.refuse_learning_tables(given.cos, given.sin)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given[:2])
    launch_forward(given, settings, (q_out, k_out), configs.forward(given.width(settings)), key_of(token, "fwd"))
    return q_out, k_out, token


def dense_inside(gradient: Tensor) -> Tensor:
    """The gradient where its rows can be read as they lie, else a dense copy.

    Attention hands back ``[B, heads, T, D]`` turned around, which is read in place; an expanded gradient
    (``y.sum().backward()``) has stride 0 inside its rows.
    """
    dense = gradient.stride(-1) == 1 and gradient.data_ptr() % VECTOR_BYTES == 0
    return gradient if dense else gradient.contiguous()


def compute_backward(
    d_out: Pair, given: Inputs, settings: Settings, weight_gradient: bool, token: object | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``dq`` and ``dk``, dense; the gradients of both weights (``None`` where they are frozen or absent)."""
    q, k, _, _, q_weight, k_weight = given
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    dweights = None
    if weight_gradient and q_weight is not None and k_weight is not None:
        dweights = torch.empty_like(q_weight), torch.empty_like(k_weight)
    launch = configs.backward(given.width(settings))
    dense = dense_inside(d_out[0]), dense_inside(d_out[1])
    launch_backward(dense, given, settings, (dq, dk), dweights, launch, token)
    return (dq, dk, None, None) if dweights is None else (dq, dk, *dweights)


class QkNormRope(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*given)
        ctx.settings = settings
        q_out, k_out, ctx.token = compute_forward(Inputs(*cast(Any, given)), settings)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:
        learns = any(ctx.needs_input_grad[5:])
        given = Inputs(*ctx.saved_tensors)
        dq, dk, *dweights = compute_backward((dq_out, dk_out), given, ctx.settings, learns, ctx.token)
        return None, dq, dk, None, None, *dweights


@torch.library.custom_op("shardwright::qk_norm_rope_forward", mutates_args=())
def qk_norm_rope_forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    width: int,
    pairing: str,
    last: bool,
    eps: float | None,
    unit_offset: bool,
) -> tuple[Tensor, Tensor]:
    """Both rotated tensors as one opaque node for tracers."""
    given, settings = Inputs(q, k, cos, sin, q_weight, k_weight), Settings(width, pairing, last, eps, unit_offset)
    q_out, k_out, _ = compute_forward(given, settings)
    return q_out, k_out


@qk_norm_rope_forward.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    tensors, settings = Inputs(*given[:INPUTS]), Settings(*given[INPUTS:])
    contract.check_static(*tensors, settings.eps, settings.width, settings.pairing)
    return tensors.q.new_empty(tensors.q.shape), tensors.k.new_empty(tensors.k.shape)


@torch.library.custom_op("shardwright::qk_norm_rope_backward", mutates_args=())
def qk_norm_rope_backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    width: int,
    pairing: str,
    last: bool,
    eps: float | None,
    unit_offset: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dq``, ``dk`` and the weights' gradients (empty where they are frozen or absent)."""
    given, settings = Inputs(q, k, cos, sin, q_weight, k_weight), Settings(width, pairing, last, eps, unit_offset)
    dq, dk, *dweights = compute_backward((dq_out, dk_out), given, settings, weight_gradient)
    dq_weight, dk_weight = (q.new_empty(0) if dweight is None else dweight for dweight in dweights)
    return dq, dk, dq_weight, dk_weight


@qk_norm_rope_backward.register_fake
def _(dq_out: Tensor, dk_out: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, _, _, *weights = given[:INPUTS]
    dq_weight, dk_weight = (q.new_empty(w.shape if w is not None and given[-1] else 0) for w in weights)
    return q.new_empty(q.shape), k.new_empty(k.shape), dq_weight, dk_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    contract.refuse_learning_tables(inputs[2], inputs[3])
    ctx.save_for_backward(*inputs[:INPUTS])
    ctx.settings = inputs[INPUTS:]


def _differentiate(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    found = qk_norm_rope_backward(dq_out, dk_out, *ctx.saved_tensors, *ctx.settings, needs[4] or needs[5])
    dq, dk, dq_weight, dk_weight = (
        gradient if needs[at] else None for gradient, at in zip(found, (0, 1, 4, 5), strict=True)
    )
    return dq, dk, None, None, dq_weight, dk_weight, None, None, None, None, None


qk_norm_rope_forward.register_autograd(_differentiate, setup_context=_save)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    width: int,
    pairing: str = "half",
    last: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float | None = None,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm over each head (where weights are given), then RoPE, of queries and keys in one launch.

    Args:
        q: ``[T, Q, D]`` or ``[B, T, Q, D]``, bf16, fp16 or fp32; each head dense, heads and tokens anywhere:
            a slice of a joint projection, or ``[B, Q, T, D]`` transposed.
        k: as ``q`` with its own heads and, where it rotates alone (MLA), its own width.
        cos: ``[T, W]`` or ``[T, W/2]``, or ``[B, T, ...]`` where batches have positions of their own; any of
            the dtypes. No gradient reaches it.
        sin: as ``cos``.
        width: rotary width W, even; the other dimensions of a head pass unchanged.
        pairing: ``half``, ``interleaved`` or ``interleaved-to-half`` (see ``reference.rotate_reference``).
        last: whether the last W dimensions of a head rotate instead of the first.
        q_weight: ``[D]`` in q's dtype or fp32; ``None`` together with ``k_weight``: no norm.
        k_weight: as ``q_weight`` for the keys.
        eps: the model's own, with the weights and only with them; there is no default.
        unit_offset: whether weights are stored as their distance from 1 (Qwen3-Next).

    Returns:
        Rotated queries and keys in the inputs' shapes and dtype, contiguous, never the inputs' memory.

    Raises:
        KernelError: an input outside ``contract.check``.
    """
    settings = Settings(width, pairing, last, eps, unit_offset)
    given = Inputs(q, k, cos, sin, q_weight, k_weight)
    tensors = [tensor for tensor in given if tensor is not None]
    if not direct(*tensors):
        return cast(tuple[Tensor, Tensor], qk_norm_rope_forward(*given, *settings))
    if not wants_gradient(*tensors):
        q_out, k_out, _ = compute_forward(given, settings)
        return q_out, k_out
    return cast(tuple[Tensor, Tensor], QkNormRope.apply(settings, *given))
