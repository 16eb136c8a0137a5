"""The grouped LoRA MLP as a torch operator: guards, gradients, fake tensors, torch.compile.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels.admitted import Admitted
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.grouped_lora_mlp import compute, contract
from shardwright.kernels.grouped_lora_mlp.admit import check, learns_base, refuse_learning
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.launches import launch_zero_tail
from shardwright.kernels.grouped_lora_mlp.layer import (
    PARTS,
    Adapter,
    Choice,
    Gradients,
    Held,
    Kept,
    Optional,
    Registered,
    Wants,
    Weights,
    choice_of,
)
from shardwright.kernels.grouped_lora_mlp.rows import Rows
from shardwright.kernels.permute.configs import most_tiles
from shardwright.kernels.permute.tiles import Tiles, make_tiles, tile_buffer_size

__all__ = ["Adapter", "grouped_lora_mlp"]

ADMITTED = Admitted()


def run_forward(
    choice: Choice, w: Weights, x: Tensor, counts: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Kept, object | None]:
    """``y [R, H]``, the tile buffer, what is kept, and the layout's token; rows past ``sum(counts)`` are zero."""
    settings = (choice, learns_base(w))
    token = ADMITTED.check((x, counts, *w.tensors()), settings, lambda: check(x, counts, w, choice))
    tiles = make_tiles(counts, x.shape[0], token)
    rows = Rows(x.shape[0], tiles, token=token)
    y, kept = compute.forward(choice, w, x, rows, keep)
    launch_zero_tail("tail", y, rows)
    return y, tiles.buffer, kept, token


def run_backward(
    choice: Choice,
    w: Weights,
    held: Held,
    buffer: Tensor,
    dy: Tensor,
    wants: Wants,
    token: object | None = None,
) -> Gradients:
    """Gradients of x (rows past the last expert: zero) and of what learns in the layer."""
    R, E = dy.shape[0], w.gate_up.shape[0]
    rows = Rows(R, Tiles(buffer, E, most_tiles(R, E)), token=token)
    found = compute.backward(choice, w, held, rows, dy.contiguous(), None, wants)
    if found.dx is not None:
        launch_zero_tail("dx-tail", found.dx, rows)
    return found


class GroupedLoraMlp(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(ctx: Any, choice: Choice, x: Tensor, counts: Tensor, *layer: Optional) -> Tensor:
        w = Weights(*cast(Any, layer))
        y, buffer, kept, ctx.token = run_forward(choice, w, x, counts, keep=True)
        ctx.save_for_backward(x, buffer, *layer, *kept)
        ctx.choice = choice
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, buffer, *rest = ctx.saved_tensors
        w, held = Weights(*rest[:PARTS]), Held.in_backward(x, Kept(*rest[PARTS:]))
        del x, rest
        wants = Wants.of(ctx.needs_input_grad[3:], ctx.needs_input_grad[1])
        found = run_backward(ctx.choice, w, held, buffer, dy, wants, ctx.token)
        return (None, found.dx, None, *found.of_weights())


@torch.library.custom_op("shardwright::grouped_lora_mlp_forward", mutates_args=())
def grouped_lora_mlp_forward(
    x: Tensor, counts: Tensor, layer: list[Tensor], present: list[bool], numbers: list[float], flags: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``y``, the tile buffer, gu, h, z_up, z_down as one opaque node for tracers; ``layer``: see ``Registered``."""
    given = Registered(layer, present, numbers, flags)
    y, buffer, kept, _ = run_forward(given.choice(), given.weights(), x, counts, keep=True)
    gu, h, z_up, z_down = kept.outputs(x)
    return y, buffer, gu, h, z_up, z_down


@grouped_lora_mlp_forward.register_fake
def _(x: Tensor, counts: Tensor, *layer: Any) -> tuple[Tensor, ...]:
    given = Registered(*layer)
    w, choice = given.weights(), given.choice()
    check(x, counts, w, choice, real=False)
    buffer = x.new_empty(tile_buffer_size(x.shape[0], w.gate_up.shape[0]), dtype=torch.int32)
    return torch.empty_like(x), buffer, *Kept.shapes(x, x.shape[0], w, choice).outputs(x)


@torch.library.custom_op("shardwright::grouped_lora_mlp_backward", mutates_args=())
def grouped_lora_mlp_backward(
    dy: Tensor,
    x: Tensor,
    buffer: Tensor,
    kept: list[Tensor],
    layer: list[Tensor],
    present: list[bool],
    numbers: list[float],
    flags: str,
) -> list[Tensor]:
    """dx, then one gradient for each tensor of ``layer``; empty where it has none."""
    given = Registered(layer, present, numbers, flags)
    w, choice = given.weights(), given.choice()
    found = run_backward(choice, w, Held(x, Kept.of(kept)), buffer, dy, Wants.all(choice))
    return [cast(Tensor, found.dx), *given.gradients(found, x)]


@grouped_lora_mlp_backward.register_fake
def _(dy: Tensor, x: Tensor, buffer: Tensor, kept: list[Tensor], *layer: Any) -> list[Tensor]:
    return [torch.empty_like(x), *Registered(*layer).shapes()]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, layer, *fixed = inputs
    ctx.save_for_backward(x, output[1], *output[2:], *layer)
    ctx.fixed = fixed
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Any, ...]:
    x, buffer, *rest = ctx.saved_tensors
    kept, layer = rest[: len(Kept._fields)], rest[len(Kept._fields) :]
    dx, *found = grouped_lora_mlp_backward(dy, x, buffer, kept, layer, *ctx.fixed)
    return (
        dx,
        None,
        [g if g.numel() == t.numel() else None for g, t in zip(found, layer, strict=True)],
        None,
        None,
        None,
    )


grouped_lora_mlp_forward.register_autograd(_differentiate, setup_context=_save)


def grouped_lora_mlp(
    x: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    up: Adapter | None = None,
    low: Adapter | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = Activation(),  # noqa: B008  (frozen)
    layout: Layout = Layout(),  # noqa: B008  (frozen)
    trains_base: bool = False,
) -> Tensor:
    """Every expert's MLP on its rows; gradients go to x, the adapters and, where asked, the stacks.

    Args:
        x: ``[R, H]``, rows sorted by expert; rows past ``sum(counts)`` are ignored and give zeros.
        counts: integers ``[E]`` on the device; they are never read by the host. Where they pass R rows in
            all they are cut; a negative one is none.
        gate_up: ``[E, F, H]`` (or as ``layout`` says), F = 2I with a gate, else I.
        down: ``[E, H, I]`` (or as ``layout`` says).
        up: adapter of ``gate_up``; its b has F rows in the stack's own column order.
        low: adapter of ``down``.
        up_bias: ``[E, F]`` in the stack's own column order, added before the activation; frozen.
        down_bias: ``[E, H]``; frozen.
        trains_base: the stacks get gradients, in their own dtype and layout. Else one that wants a gradient is
            refused.

    Returns:
        ``[R, H]`` in x's dtype, without routing weights.

    Raises:
        KernelError: an input outside ``admit.check``.
    """
    choice, factors = choice_of(activation, layout, up, low, trains_base)
    w = Weights(gate_up, down, *factors, up_bias, down_bias)
    if not direct(x, counts, *w.given()):
        return grouped_lora_mlp_forward(x, counts, *Registered.of(w, choice))[0]
    if not wants_gradient(x, *w.given()):
        return run_forward(choice, w, x, counts, keep=False)[0]
    refuse_learning(contract.NAME, w, choice)
    return cast(Tensor, GroupedLoraMlp.apply(choice, x, counts, *w.tensors()))
