"""The short convolution as a torch operator: guards, launches, gradient, fake tensors, torch.compile.

``y, final = short_conv(x, weight)`` is ``silu(causal depthwise conv(x))`` and the inputs that the next piece of the
same document needs. Nothing but the inputs is kept for the backward.

Legend: B batch, T tokens, C channels, J taps, N documents, NT pieces.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device, guards
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.guards import refuse
from shardwright.kernels.kda.documents import Documents, bounds_of
from shardwright.kernels.short_conv import configs, contract
from shardwright.kernels.short_conv.triton import (
    short_conv_bwd_kernel,
    short_conv_fwd_kernel,
    short_conv_taps_kernel,
)

Bounds = tuple[int, ...]
ADMITTED = Admitted()


@lru_cache(maxsize=64)
def _table(bounds: Bounds, piece: int, place: str) -> Tensor:
    """``[NT, 4]`` int32: first token of a piece, begin and end of its document, the document. Keyed by values.

    An empty document has one piece, whose program passes its states on.
    """
    rows = [
        (first, low, high, doc)
        for doc, (low, high) in enumerate(pairwise(bounds))
        for first in range(low, max(high, low + 1), piece)
    ]
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 4).to(place)


def bounds(B: int, T: int, cu_seqlens: Tensor | Sequence[int] | Documents | None) -> Bounds:
    """The documents of a batch ``[B, T]`` as numbers, checked.

    Raises:
        KernelError: ``bad-documents``.
    """
    if isinstance(cu_seqlens, Documents):
        return bounds_of(cu_seqlens.bounds, B * T)
    if cu_seqlens is None:
        return tuple(range(0, B * T + 1, T)) if T else (0,) * (B + 1)
    if B != 1:
        what = f"cu_seqlens with a batch of {B}"
        raise refuse(contract.NAME, "bad-documents", what, "pack documents into a batch of 1")
    return bounds_of(cu_seqlens, T)


def check(x: Tensor, weight: Tensor, initial: Tensor | None, found: Bounds) -> None:
    """All guards, on real tensors.

    Raises:
        KernelError: as ``contract.check_static``; also ``device-mixed``, ``device-unsupported``, ``not-contiguous``
            or ``misaligned``.
    """
    contract.check_static(x, weight, initial, count=len(found) - 1)
    given = {"x": x, "weight": weight} | ({} if initial is None else {"initial": initial})
    guards.one_device(contract.NAME, given, interpreted=device.interpreted())
    guards.dense(contract.NAME, {"x": x})
    for name, tensor in given.items():
        if not tensor.is_contiguous():
            what = f"{name} has gaps or a permuted layout"
            raise refuse(contract.NAME, "not-contiguous", what, f"pass {name}.contiguous()")


def admit(x: Tensor, weight: Tensor, initial: Tensor | None, found: Bounds, silu: bool) -> object | None:
    """All guards; the layout's token."""
    return ADMITTED.check((x, weight, initial), (len(found), silu), lambda: check(x, weight, initial, found))


def compute_forward(
    x: Tensor,
    weight: Tensor,
    initial: Tensor | None,
    found: Bounds,
    silu: bool,
    last: bool,
    token: object | None,
) -> tuple[Tensor, Tensor | None]:
    """``y [B, T, C]`` and, where ``last``, ``final [N, C, J - 1]``, in x's dtype, of admitted inputs."""
    B, T, C = x.shape
    J, walk, piece = weight.shape[1], configs.forward(), configs.piece(B * T, C)
    table, y = _table(found, piece, str(x.device)), torch.empty_like(x)
    final = torch.empty((len(found) - 1, C, J - 1), dtype=x.dtype, device=x.device) if last else None
    tensors = (x, weight, initial, table, y, final)
    key = key_of(token, "fwd", table.shape[0], last)
    if again(key, tensors):
        return y, final
    with device.current(x):
        start(
            key,
            tensors,
            short_conv_fwd_kernel,
            (table.shape[0] * -(-C // walk.channels),),
            x,
            weight,
            x if initial is None else initial,
            table,
            y,
            y if final is None else final,
            C=C,
            J=J,
            BC=walk.channels,
            PIECE=piece,
            ROWS=walk.rows,
            STAGES=walk.stages,
            SILU=silu,
            WITH_INITIAL=initial is not None,
            WITH_FINAL=last,
            **walk.options(),
        )
    return y, final


def compute_backward(
    dy: Tensor | None,
    dfinal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    initial: Tensor | None,
    found: Bounds,
    silu: bool,
    learns: bool,
    token: object | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, of the weight where it learns, and of the initial inputs where there are any."""
    B, T, C = x.shape
    J, walk, piece = weight.shape[1], configs.backward(), configs.piece(B * T, C)
    table, dx = _table(found, piece, str(x.device)), torch.empty_like(x)
    NT = table.shape[0]
    dy = torch.zeros_like(x) if dy is None else dy.to(x.dtype).contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    dinitial = None if initial is None else torch.empty_like(initial)
    shares = torch.empty((NT, J, C), dtype=torch.float32, device=x.device) if learns else None
    dweight = torch.empty_like(weight) if learns else None
    tensors = (dy, x, weight, initial, dfinal, table, dx, shares, dinitial)
    key = key_of(token, "bwd", NT, dfinal is not None, learns)
    if not again(key, tensors):
        with device.current(x):
            start(
                key,
                tensors,
                short_conv_bwd_kernel,
                (NT * -(-C // walk.channels),),
                dy,
                x,
                weight,
                x if initial is None else initial,
                dy if dfinal is None else dfinal,
                table,
                dx,
                dx if shares is None else shares,
                dx if dinitial is None else dinitial,
                C=C,
                J=J,
                BC=walk.channels,
                PIECE=piece,
                ROWS=walk.rows,
                STAGES=walk.stages,
                SILU=silu,
                WITH_INITIAL=initial is not None,
                WITH_FINAL=dfinal is not None,
                WEIGHT_GRADIENT=learns,
                **walk.options(),
            )
    if shares is not None and dweight is not None:
        sum_shares(shares, dweight, key_of(token, "taps", NT))
    return dx, dweight, dinitial


def sum_shares(shares: Tensor, dweight: Tensor, key: Hashable) -> None:
    """Add the pieces' shares ``[NT, J, C]`` into ``dweight [C, J]``, in a fixed order."""
    NT, J, C = shares.shape
    if again(key, (shares, dweight)):
        return
    block = configs.SUMS
    with device.current(shares):
        start(
            key,
            (shares, dweight),
            short_conv_taps_kernel,
            (J * -(-C // block.channels),),
            shares,
            dweight,
            NT,
            C=C,
            J=J,
            BC=block.channels,
            BN=block.pieces,
            num_warps=block.warps,
        )


class ShortConv(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, initial: Tensor | None, found: Bounds, silu: bool, last: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.token = admit(x, weight, initial, found, silu)
        ctx.save_for_backward(x, weight, initial)
        ctx.settings = found, silu
        ctx.set_materialize_grads(False)
        return compute_forward(x, weight, initial, found, silu, last, ctx.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None and dfinal is None:
            return (None,) * 6
        x, weight, initial = ctx.saved_tensors
        found, silu = ctx.settings
        learns = ctx.needs_input_grad[1]
        gradients = compute_backward(dy, dfinal, x, weight, initial, found, silu, learns, ctx.token)
        return *gradients, None, None, None


@torch.library.custom_op("shardwright::short_conv_forward", mutates_args=())
def short_conv_forward(x: Tensor, weight: Tensor, initial: Tensor | None, found: list[int], silu: bool) -> Tensor:
    """``y`` as one opaque node for tracers."""
    bounds = tuple(found)
    return compute_forward(x, weight, initial, bounds, silu, False, admit(x, weight, initial, bounds, silu))[0]


@torch.library.custom_op("shardwright::short_conv_state_forward", mutates_args=())
def short_conv_state_forward(
    x: Tensor, weight: Tensor, initial: Tensor | None, found: list[int], silu: bool
) -> tuple[Tensor, Tensor]:
    """``y`` and ``final`` as one opaque node for tracers."""
    bounds = tuple(found)
    y, final = compute_forward(x, weight, initial, bounds, silu, True, admit(x, weight, initial, bounds, silu))
    assert final is not None
    return y, final


@short_conv_forward.register_fake
def _(x: Tensor, weight: Tensor, initial: Tensor | None, found: list[int], silu: bool) -> Tensor:
    contract.check_static(x, weight, initial, count=len(found) - 1)
    return torch.empty_like(x)


@short_conv_state_forward.register_fake
def _(x: Tensor, weight: Tensor, initial: Tensor | None, found: list[int], silu: bool) -> tuple[Tensor, Tensor]:
    contract.check_static(x, weight, initial, count=len(found) - 1)
    return torch.empty_like(x), x.new_empty((len(found) - 1, x.shape[2], weight.shape[1] - 1))


@torch.library.custom_op("shardwright::short_conv_backward", mutates_args=())
def short_conv_backward(
    dy: Tensor | None,
    dfinal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    initial: Tensor | None,
    found: list[int],
    silu: bool,
    learns: bool,
) -> list[Tensor]:
    """Gradients of the three tensors; empty ones for those that are not there."""
    parts = compute_backward(dy, dfinal, x, weight, initial, tuple(found), silu, learns)
    return [x.new_empty(0) if part is None else part for part in parts]


@short_conv_backward.register_fake
def _(
    dy: Tensor | None,
    dfinal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    initial: Tensor | None,
    found: list[int],
    silu: bool,
    learns: bool,
) -> list[Tensor]:
    given = (x, weight if learns else None, initial)
    return [x.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in given]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.settings = inputs[3:]


def _differentiate(ctx: Any, dy: Tensor | None, dfinal: Tensor | None = None) -> tuple[Tensor | None, ...]:
    x, weight, initial = ctx.saved_tensors
    learns = ctx.needs_input_grad[1]
    dx, dweight, dinitial = short_conv_backward(dy, dfinal, x, weight, initial, *ctx.settings, learns)
    return dx, dweight if learns else None, None if initial is None else dinitial, None, None


short_conv_forward.register_autograd(_differentiate, setup_context=_save)
short_conv_state_forward.register_autograd(_differentiate, setup_context=_save)


def short_conv(
    x: Tensor,
    weight: Tensor,
    initial: Tensor | None = None,
    *,
    silu: bool = True,
    cu_seqlens: Tensor | Sequence[int] | Documents | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution, with SiLU unless ``silu`` is false.

    Args:
        x: ``[B, T, C]``, contiguous, bf16, fp16 or fp32.
        weight: ``[C, J]``, of its own dtype, the last tap on the token itself; J from 2 to 8; no bias.
        initial: ``[N, C, J - 1]``: the inputs before each document; zeros where ``None``.
        cu_seqlens: N + 1 bounds of documents packed into a batch of 1. A device tensor is read, which waits for the
            device: give the numbers, or ``kda.documents.documents(...)`` made once a batch.
        output_final_state: whether the last inputs of each document are wanted.

    Returns:
        ``y [B, T, C]`` in x's dtype, and the last inputs ``[N, C, J - 1]`` or ``None``.

    Raises:
        KernelError: an input outside the contract: ``check``, ``bounds``.
    """
    found = bounds(x.shape[0], x.shape[1], cu_seqlens)
    given = [tensor for tensor in (x, weight, initial) if tensor is not None]
    if not direct(*given):
        if output_final_state:
            return short_conv_state_forward(x, weight, initial, list(found), silu)
        return short_conv_forward(x, weight, initial, list(found), silu), None
    if wants_gradient(*given):
        return cast(tuple[Tensor, Tensor | None], ShortConv.apply(x, weight, initial, found, silu, output_final_state))
    token = admit(x, weight, initial, found, silu)
    return compute_forward(x, weight, initial, found, silu, output_final_state, token)
