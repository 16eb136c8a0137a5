"""The short convolution as a torch operator: guards, launches, gradient, fake tensors, torch.compile.

``y, final = short_conv(x, weight)`` is ``silu(causal depthwise conv(x))`` and the inputs that the next piece of the
same document needs. Nothing but the inputs is kept for the backward.

Legend: B batch, T tokens, C channels, J taps, N documents, NT pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device, guards
from shardwright.kernels.dispatch import direct
from shardwright.kernels.guards import refuse
from shardwright.kernels.kda.documents import Documents, bounds_of
from shardwright.kernels.short_conv import configs, contract
from shardwright.kernels.short_conv.configs import PIECE
from shardwright.kernels.short_conv.triton import short_conv_bwd_kernel, short_conv_fwd_kernel

Bounds = tuple[int, ...]


@lru_cache(maxsize=64)
def _table(bounds: Bounds, place: str) -> Tensor:
    """``[NT, 4]`` int32: first token of a piece, begin and end of its document, the document. Keyed by values."""
    rows = [
        (start, low, high, doc) for doc, (low, high) in enumerate(pairwise(bounds)) for start in range(low, high, PIECE)
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


def compute_forward(x: Tensor, weight: Tensor, initial: Tensor | None, found: Bounds, silu: bool) -> Tensor:
    """``y [B, T, C]`` in x's dtype."""
    check(x, weight, initial, found)
    y, table, C = torch.empty_like(x), _table(found, str(x.device)), x.shape[2]
    tile = configs.forward(initial is not None)
    with device.current(x):
        short_conv_fwd_kernel[(-(-C // tile.BK), table.shape[0])](
            x,
            weight,
            x if initial is None else initial,
            table,
            y,
            C,
            J=weight.shape[1],
            BT=PIECE,
            BC=tile.BK,
            SILU=silu,
            WITH_INITIAL=initial is not None,
            **tile.options(),
        )
    return y


def compute_backward(
    dy: Tensor, x: Tensor, weight: Tensor, initial: Tensor | None, found: Bounds, silu: bool, learns: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, of the weight where it learns, and of the initial inputs where there are any."""
    dy, table = dy.to(x.dtype).contiguous(), _table(found, str(x.device))
    C, J, NT = x.shape[2], weight.shape[1], table.shape[0]
    dx = torch.empty_like(x)
    shares = torch.empty((NT, C, J) if learns else 1, dtype=torch.float32, device=x.device)
    tile = configs.backward(initial is not None)
    dinitial = None if initial is None else torch.zeros(initial.shape, dtype=torch.float32, device=x.device)
    with device.current(x):
        short_conv_bwd_kernel[(-(-C // tile.BK), NT)](
            dy,
            x,
            weight,
            x if initial is None else initial,
            table,
            dx,
            shares,
            shares if dinitial is None else dinitial,
            C,
            J=J,
            BT=PIECE,
            BC=tile.BK,
            SILU=silu,
            WITH_INITIAL=initial is not None,
            WEIGHT_GRADIENT=learns,
            **tile.options(),
        )
    dweight = shares.sum(0).to(weight.dtype) if learns else None
    return dx, dweight, None if dinitial is None or initial is None else dinitial.to(initial.dtype)


class ShortConv(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, initial: Tensor | None, found: Bounds, silu: bool) -> Tensor:
        y = compute_forward(x, weight, initial, found, silu)
        ctx.save_for_backward(x, weight, initial)
        ctx.settings = found, silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, initial = ctx.saved_tensors
        found, silu = ctx.settings
        return *compute_backward(dy, x, weight, initial, found, silu, ctx.needs_input_grad[1]), None, None


@torch.library.custom_op("shardwright::short_conv_forward", mutates_args=())
def short_conv_forward(x: Tensor, weight: Tensor, initial: Tensor | None, found: list[int], silu: bool) -> Tensor:
    """``y`` as one opaque node for tracers."""
    return compute_forward(x, weight, initial, tuple(found), silu)


@short_conv_forward.register_fake
def _(x: Tensor, weight: Tensor, initial: Tensor | None, found: list[int], silu: bool) -> Tensor:
    contract.check_static(x, weight, initial, count=len(found) - 1)
    return torch.empty_like(x)


@torch.library.custom_op("shardwright::short_conv_backward", mutates_args=())
def short_conv_backward(
    dy: Tensor, x: Tensor, weight: Tensor, initial: Tensor | None, found: list[int], silu: bool, learns: bool
) -> list[Tensor]:
    """Gradients of the three tensors; empty ones for those that are not there."""
    parts = compute_backward(dy, x, weight, initial, tuple(found), silu, learns)
    return [x.new_empty(0) if part is None else part for part in parts]


@short_conv_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, initial: Tensor | None, found: list[int], silu: bool, learns: bool
) -> list[Tensor]:
    given = (x, weight if learns else None, initial)
    return [x.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in given]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.settings = inputs[3:]


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, initial = ctx.saved_tensors
    learns = ctx.needs_input_grad[1]
    dx, dweight, dinitial = short_conv_backward(dy, x, weight, initial, *ctx.settings, learns)
    return dx, dweight if learns else None, None if initial is None else dinitial, None, None


short_conv_forward.register_autograd(_differentiate, setup_context=_save)


def last_inputs(x: Tensor, initial: Tensor | None, found: Bounds, taps: int) -> Tensor:
    """The J - 1 inputs that end each document ``[N, C, J - 1]``, those of its initial state where it is shorter."""
    flat, width = x.reshape(-1, x.shape[2]), taps - 1
    pieces = []
    for doc, (low, high) in enumerate(pairwise(found)):
        own = flat[max(low, high - width) : high].T
        missing = width - own.shape[1]
        if missing:
            before = own.new_zeros((x.shape[2], width)) if initial is None else initial[doc].to(x.dtype)
            own = torch.cat((before[:, width - missing :], own), dim=1)
        pieces.append(own)
    return torch.stack(pieces)


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
        y = short_conv_forward(x, weight, initial, list(found), silu)
    elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        y = cast(Tensor, ShortConv.apply(x, weight, initial, found, silu))
    else:
        y = compute_forward(x, weight, initial, found, silu)
    return y, last_inputs(x, initial, found, weight.shape[1]) if output_final_state else None
