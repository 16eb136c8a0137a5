"""Query/key norm + RoPE as a torch operator: guards, launches, gradient, fake tensors, torch.compile.

Legend: B batch, T tokens, Q and K heads, D head width, W rotary width, P programs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.guards import VECTOR_BYTES
from shardwright.kernels.launch import Launch
from shardwright.kernels.qk_norm_rope import configs, contract
from shardwright.kernels.qk_norm_rope.triton import qk_norm_rope_bwd_kernel, qk_norm_rope_fwd_kernel
from shardwright.kernels.rms_norm.op import reduce_weight_gradient

ADMITTED = Admitted()


class Settings(NamedTuple):
    """What the model fixes."""

    width: int
    pairing: str = "half"
    last: bool = False
    eps: float | None = None
    unit_offset: bool = False


def steps(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, token and head, in values."""
    found = x.stride()[:-1]
    return (0, found[0], found[1]) if len(found) == 2 else (found[0], found[1], found[2])


def table_steps(table: Tensor) -> tuple[int, int]:
    """Strides of batch (0 where all share one table) and token, in values."""
    shared = table.dim() == 2 or table.shape[0] == 1
    return (0 if shared else table.stride(0)), table.stride(-2)


def tile_width(q: Tensor, k: Tensor, settings: Settings) -> int:
    """Columns of the wider of both tiles: what launch configurations go by."""
    return max(configs.tile_width(x.shape[-1], settings.width) for x in (q, k))


def constants(q: Tensor, k: Tensor, cos: Tensor, settings: Settings, norm: bool) -> dict[str, int | bool]:
    """What kernels take at compile time: the model's own sizes and choices."""
    DQ, DK, W = q.shape[-1], k.shape[-1], settings.width
    return {
        "DQ": DQ,
        "DK": DK,
        "W": W,
        "KIND": contract.PAIRINGS.index(settings.pairing),
        "LAST": settings.last,
        "WHOLE": cos.shape[-1] == W and settings.pairing == "half",
        "NORM": norm,
        "UNIT_OFFSET": settings.unit_offset,
        "HALF": configs.power_of_two(W // 2),
        "PASS_Q": configs.power_of_two(DQ - W),
        "PASS_K": configs.power_of_two(DK - W),
    }


def launch_forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    settings: Settings,
    q_out: Tensor,
    k_out: Tensor,
    launch: Launch,
    key: Hashable = None,
) -> None:
    """Fill ``q_out`` and ``k_out`` (dense); nothing is launched for zero tokens."""
    RQ, RK = q.numel() // q.shape[-1], k.numel() // k.shape[-1]
    if RQ == 0:
        return
    tensors = (q, k, q_out, k_out, q_weight, k_weight, cos, sin)
    if again(key, tensors):
        return
    tiles = -(-RQ // launch.rows)
    with device.current(q):
        start(
            key,
            tensors,
            qk_norm_rope_fwd_kernel,
            (tiles - (-RK // launch.rows),),
            q,
            k,
            q_out,
            k_out,
            q if q_weight is None else q_weight,
            k if k_weight is None else k_weight,
            cos,
            sin,
            RQ,
            RK,
            q.shape[-3],
            q.shape[-2],
            k.shape[-2],
            tiles,
            *steps(q),
            *steps(k),
            *table_steps(cos),
            *table_steps(sin),
            settings.eps or 0.0,
            **constants(q, k, cos, settings, q_weight is not None),
            ROWS=launch.rows,
            num_warps=launch.warps,
        )


def share(tiles: tuple[int, int], programs: int) -> tuple[int, int]:
    """Programs for queries and for keys, in proportion to their tiles, at least one each."""
    most = min(sum(tiles), max(2, programs))
    first = min(max(1, round(most * tiles[0] / sum(tiles))), most - 1)
    return min(first, tiles[0]), min(most - first, tiles[1])


def launch_backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    settings: Settings,
    dq: Tensor,
    dk: Tensor,
    dweights: tuple[Tensor, Tensor] | None,
    launch: Launch,
    token: object | None = None,
) -> None:
    """Fill ``dq`` and ``dk`` (dense) and, where the weights learn, both gradients of them."""
    RQ, RK = q.numel() // q.shape[-1], k.numel() // k.shape[-1]
    if RQ == 0:
        for dweight in dweights or ():
            dweight.zero_()
        return
    most = launch.programs_per_sm * device.multiprocessors(q)
    PQ, PK = share((-(-RQ // launch.rows), -(-RK // launch.rows)), most)
    partials: tuple[Tensor | None, Tensor | None] = (None, None)
    if dweights is not None:
        sizes = ((PQ, q.shape[-1]), (PK, k.shape[-1]))
        q_partial, k_partial = (torch.empty(size, dtype=torch.float32, device=q.device) for size in sizes)
        partials = q_partial, k_partial
    tensors = (dq_out, dk_out, q, k, dq, dk, q_weight, k_weight, *partials, cos, sin)
    # Gradients' heads and tokens may lie anywhere: the token does not know their strides.
    key = key_of(token, "bwd", dweights is None, dq_out.stride(), dk_out.stride())
    if again(key, tensors):
        sum_weight_gradients(partials, dweights, token)
        return
    with device.current(q):
        start(
            key,
            tensors,
            qk_norm_rope_bwd_kernel,
            (PQ + PK,),
            dq_out,
            dk_out,
            q,
            k,
            dq,
            dk,
            q if q_weight is None else q_weight,
            k if k_weight is None else k_weight,
            dq if partials[0] is None else partials[0],
            dk if partials[1] is None else partials[1],
            cos,
            sin,
            RQ,
            RK,
            q.shape[-3],
            q.shape[-2],
            k.shape[-2],
            PQ,
            PK,
            *steps(dq_out),
            *steps(dk_out),
            *steps(q),
            *steps(k),
            *table_steps(cos),
            *table_steps(sin),
            settings.eps or 0.0,
            **constants(q, k, cos, settings, q_weight is not None),
            WEIGHT_GRADIENT=dweights is not None,
            ROWS=launch.rows,
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
        sum_weight_gradients(partials, dweights, token)


def sum_weight_gradients(
    partials: tuple[Tensor | None, Tensor | None], dweights: tuple[Tensor, Tensor] | None, token: object | None
) -> None:
    """Both weights' gradients from the programs' partial sums, where they learn."""
    if dweights is None:
        return
    for role, partial, dweight in zip(("dq_weight", "dk_weight"), partials, dweights, strict=True):
        assert partial is not None
        reduce_weight_gradient(partial, dweight, key_of(token, role))


def compute_forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor, object | None]:
    """Guards, then both outputs, dense, in the inputs' dtype; and the layout's token."""
    width, pairing, _, eps, _ = settings
    token = ADMITTED.check(
        (q, k, cos, sin, q_weight, k_weight),
        settings,
        lambda: contract.check(
            q, k, cos, sin, q_weight, k_weight, eps, width, pairing, interpreted=device.interpreted()
        ),
    )
    contract.refuse_learning_tables(cos, sin)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    launch = configs.forward(tile_width(q, k, settings))
    launch_forward(q, k, cos, sin, q_weight, k_weight, settings, q_out, k_out, launch, key_of(token, "fwd"))
    return q_out, k_out, token


def dense_inside(gradient: Tensor) -> Tensor:
    """The gradient where its rows can be read as they lie, else a dense copy.

    Attention hands back ``[B, heads, T, D]`` turned around, which is read in place; an expanded gradient
    (``y.sum().backward()``) has stride 0 inside its rows.
    """
    dense = gradient.stride(-1) == 1 and gradient.data_ptr() % VECTOR_BYTES == 0
    return gradient if dense else gradient.contiguous()


def compute_backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    settings: Settings,
    weight_gradient: bool,
    token: object | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``dq`` and ``dk``, dense; the gradients of both weights (``None`` where they are frozen or absent)."""
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    learns = weight_gradient and q_weight is not None and k_weight is not None
    dweights = (
        (torch.empty_like(q_weight), torch.empty_like(k_weight))
        if learns and q_weight is not None and k_weight is not None
        else None
    )
    launch = configs.backward(tile_width(q, k, settings))
    given = dense_inside(dq_out), dense_inside(dk_out)
    launch_backward(*given, q, k, cos, sin, q_weight, k_weight, settings, dq, dk, dweights, launch, token)
    return (dq, dk, None, None) if dweights is None else (dq, dk, *dweights)


class QkNormRope(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        settings: Settings,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, cos, sin, q_weight, k_weight)
        ctx.settings = settings
        q_out, k_out, ctx.token = compute_forward(q, k, cos, sin, q_weight, k_weight, settings)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, cos, sin, q_weight, k_weight = ctx.saved_tensors
        learns = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
        dq, dk, dq_weight, dk_weight = compute_backward(
            dq_out, dk_out, q, k, cos, sin, q_weight, k_weight, ctx.settings, learns, ctx.token
        )
        return dq, dk, None, None, dq_weight, dk_weight, None


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
    settings = Settings(width, pairing, last, eps, unit_offset)
    q_out, k_out, _ = compute_forward(q, k, cos, sin, q_weight, k_weight, settings)
    return q_out, k_out


@qk_norm_rope_forward.register_fake
def _(
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
    contract.check_static(q, k, cos, sin, q_weight, k_weight, eps, width, pairing)
    return q.new_empty(q.shape), k.new_empty(k.shape)


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
    settings = Settings(width, pairing, last, eps, unit_offset)
    dq, dk, *dweights = compute_backward(dq_out, dk_out, q, k, cos, sin, q_weight, k_weight, settings, weight_gradient)
    dq_weight, dk_weight = (q.new_empty(0) if dweight is None else dweight for dweight in dweights)
    return dq, dk, dq_weight, dk_weight


@qk_norm_rope_backward.register_fake
def _(
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
    dq_weight, dk_weight = (
        weight.new_empty(weight.shape) if weight is not None and weight_gradient else q.new_empty(0)
        for weight in (q_weight, k_weight)
    )
    return q.new_empty(q.shape), k.new_empty(k.shape), dq_weight, dk_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    contract.refuse_learning_tables(inputs[2], inputs[3])
    ctx.save_for_backward(*inputs[:6])
    ctx.settings = inputs[6:]


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
    tensors = [t for t in (q, k, cos, sin, q_weight, k_weight) if t is not None]
    if not direct(*tensors):
        return cast(
            tuple[Tensor, Tensor],
            qk_norm_rope_forward(q, k, cos, sin, q_weight, k_weight, width, pairing, last, eps, unit_offset),
        )
    if not wants_gradient(*tensors):
        q_out, k_out, _ = compute_forward(q, k, cos, sin, q_weight, k_weight, settings)
        return q_out, k_out
    return cast(tuple[Tensor, Tensor], QkNormRope.apply(q, k, cos, sin, q_weight, k_weight, settings))
