"""The packed experts as a torch operator: guards, launches, gradients, fake tensors, torch.compile.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels.admitted import Admitted
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.layer import (
    Adapter,
    Choice,
    Gradients,
    Held,
    Kept,
    Optional,
    Wants,
    choice_of,
    decode,
    encode,
    placed,
)
from shardwright.kernels.packed_experts import compute, configs
from shardwright.kernels.packed_experts.admit import check, refuse_learning
from shardwright.kernels.packed_experts.compute import PackedWeights
from shardwright.kernels.packed_experts.storage import PackedStack
from shardwright.kernels.permute.tiles import Tiles

ADMITTED = Admitted()
FACTORS, KEPT = 4, 4
"""Tensors of adapters, which come first among those beside the stacks; tensors that are kept."""


class Forward(NamedTuple):
    """One forward, and what its backward goes on from beside what is kept."""

    y: Tensor
    kept: Kept
    tiles: Tiles
    token: object | None
    """The layout's."""
    dequantised: bool


def forward(
    choice: Choice, w: PackedWeights, x: Tensor, counts: Tensor, keep: bool, dequantise: bool | None = None
) -> Forward:
    """``y [R, H]``, what is kept, and the tile list; rows past ``sum(counts)`` are zero.

    ``dequantise`` overrides the table.
    """
    token = ADMITTED.check(
        (x, counts, *w.stacks(), *w.beside()),
        (choice, w.gate_up.kind, w.down.kind),
        lambda: check(x, counts, w, choice),
    )
    chosen = configs.dequantises(x.shape[0], counts.shape[0], trains=keep) if dequantise is None else dequantise
    y, kept, tiles = compute.forward(choice, w, x, counts, keep, chosen, token)
    return Forward(y, kept, tiles, token, chosen)


def run_forward(
    choice: Choice, w: PackedWeights, x: Tensor, counts: Tensor, keep: bool, dequantise: bool | None = None
) -> tuple[Tensor, Kept, object | None]:
    """``y [R, H]``, what is kept, and the layout's token; see ``forward``."""
    found = forward(choice, w, x, counts, keep, dequantise)
    return found.y, found.kept, found.token


def _dense(dy: Tensor) -> Tensor:
    """A gradient as the kernels read it: without gaps, on a 16-byte boundary."""
    dy = dy.contiguous()
    return dy.clone() if dy.data_ptr() & 15 else dy


def run_backward(
    choice: Choice,
    w: PackedWeights,
    held: Held,
    counts: Tensor,
    dy: Tensor,
    wants: Wants,
    token: object | None = None,
    dequantise: bool | None = None,
) -> Gradients:
    """Gradients of x (rows past the last expert: zero) and of the adapters, with a tile list of its own."""
    R, E = dy.shape[0], counts.shape[0]
    chosen = configs.dequantises(R, E, trains=True) if dequantise is None else dequantise
    tiles = compute.tiles_of(counts, R, chosen, token)
    return compute.backward(choice, w, held, tiles, _dense(dy), chosen, wants, token)


class PackedExperts(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``); ``beside``: ``w.beside()`` where there is any.

    Its backward reads the forward's tile list, some bytes a tile that stay with the node, and so starts a launch less.
    """

    @staticmethod
    def forward(ctx: Any, choice: Choice, x: Tensor, counts: Tensor, w: PackedWeights, *beside: Optional) -> Tensor:
        found = forward(choice, w, x, counts, keep=True)
        ctx.save_for_backward(x, *beside, *found.kept)
        # Stacks are frozen and never outputs: no cycle, no version to check.
        ctx.choice, ctx.w = choice, PackedWeights(w.gate_up, w.down) if beside else w
        ctx.tiles, ctx.token, ctx.dequantised = found.tiles, found.token, found.dequantised
        return found.y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        # Without a graph of the backward there is nothing to forbid, and no grad mode to leave and enter.
        return _differentiated_once(ctx, dy) if torch.is_grad_enabled() else _differentiated(ctx, dy)


def _differentiated(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    beside, needs, w = len(rest) - KEPT, ctx.needs_input_grad, ctx.w
    if beside:
        w = PackedWeights(w.gate_up, w.down, *rest[:beside])
    held = Held.in_backward(x, Kept(*rest[beside:]))
    del x, rest
    wants = Wants(needs[1], up=any(needs[4:6]), low=any(needs[6:8]))
    found = compute.backward(ctx.choice, w, held, ctx.tiles, _dense(dy), ctx.dequantised, wants, ctx.token)
    learned = (found.up_a, found.up_b, found.down_a, found.down_b, None, None)
    return (None, found.dx, None, None, *learned[:beside])


_differentiated_once = once_differentiable(_differentiated)


class Registered(NamedTuple):
    """A packed layer as a registered operator takes it: its stacks, what there is beside them, and the choice."""

    stacks: list[Tensor]
    beside: list[Tensor]
    """Factors, then biases."""
    present: list[bool]
    kind: str
    numbers: list[float]
    flags: str

    @staticmethod
    def of(w: PackedWeights, choice: Choice) -> Registered:
        beside = w.beside()
        given = [tensor for tensor in beside if tensor is not None]
        return Registered(list(w.stacks()), given, [t is not None for t in beside], w.gate_up.kind, *encode(choice))

    def weights(self) -> PackedWeights:
        gate_up, gate_up_scales, down, down_scales = self.stacks
        kind = cast(Any, self.kind)
        stacks = PackedStack(gate_up, gate_up_scales, kind), PackedStack(down, down_scales, kind)
        return PackedWeights(*stacks, *placed(self.beside, self.present))

    def factors(self) -> list[Tensor]:
        """Those of ``beside`` that learn."""
        return self.beside[: sum(self.present[:FACTORS])]

    def choice(self) -> Choice:
        return decode(self.numbers, self.flags)


@torch.library.custom_op("shardwright::packed_experts_forward", mutates_args=())
def packed_experts_forward(
    x: Tensor,
    counts: Tensor,
    stacks: list[Tensor],
    beside: list[Tensor],
    present: list[bool],
    kind: str,
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``y``, gu, h, z_up, z_down as one opaque node for tracers; the layer: see ``Registered``."""
    given = Registered(stacks, beside, present, kind, numbers, flags)
    y, kept, _ = run_forward(given.choice(), given.weights(), x, counts, keep=True)
    gu, h, z_up, z_down = kept.outputs(x)
    return y, gu, h, z_up, z_down


@packed_experts_forward.register_fake
def _(x: Tensor, counts: Tensor, *layer: Any) -> tuple[Tensor, ...]:
    given = Registered(*layer)
    w, none = given.weights(), x.new_empty(0)
    check(x, counts, w, given.choice(), real=False)
    R, F, I = x.shape[0], w.gate_up.shape[1], w.down.shape[2]
    h = none if w.down_a is None else x.new_empty((R, I))
    z_up, z_down = (none.clone() if a is None else x.new_empty((R, a.shape[1])) for a in (w.up_a, w.down_a))
    return torch.empty_like(x), x.new_empty((R, F)), h, z_up, z_down


@torch.library.custom_op("shardwright::packed_experts_backward", mutates_args=())
def packed_experts_backward(
    dy: Tensor,
    x: Tensor,
    counts: Tensor,
    kept: list[Tensor],
    stacks: list[Tensor],
    beside: list[Tensor],
    present: list[bool],
    kind: str,
    numbers: list[float],
    flags: str,
) -> list[Tensor]:
    """dx, then one gradient for each factor."""
    given = Registered(stacks, beside, present, kind, numbers, flags)
    found = run_backward(given.choice(), given.weights(), Held(x, Kept.of(kept)), counts, dy, Wants())
    learned = (found.up_a, found.up_b, found.down_a, found.down_b)
    return [cast(Tensor, found.dx), *(gradient for gradient in learned if gradient is not None)]


@packed_experts_backward.register_fake
def _(dy: Tensor, x: Tensor, counts: Tensor, kept: list[Tensor], *layer: Any) -> list[Tensor]:
    return [torch.empty_like(x), *(torch.empty_like(factor) for factor in Registered(*layer).factors())]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, counts, stacks, beside, *fixed = inputs
    ctx.save_for_backward(x, counts, *output[1:], *stacks, *beside)
    ctx.fixed = fixed
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Any, ...]:
    x, counts, *rest = ctx.saved_tensors
    kept, stacks, beside = rest[:4], rest[4:8], rest[8:]
    dx, *found = packed_experts_backward(dy, x, counts, kept, stacks, beside, *ctx.fixed)
    gradients = [*found, *[None] * (len(beside) - len(found))]
    return dx, None, [None] * 4, gradients, None, None, None, None


packed_experts_forward.register_autograd(_differentiate, setup_context=_save)


def packed_experts(
    x: Tensor,
    counts: Tensor,
    gate_up: PackedStack,
    down: PackedStack,
    *,
    up: Adapter | None = None,
    low: Adapter | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = Activation(),  # noqa: B008  (frozen)
    interleaved: bool = False,
) -> Tensor:
    """Every expert's MLP on its rows, the base kept packed; gradients go to x and the adapters.

    Args:
        x: bf16 ``[R, H]``, rows sorted by expert; rows past ``sum(counts)`` are ignored and give zeros.
        counts: integers ``[E]`` on the device; they are never read by the host. Their sum is at most R.
        gate_up: packed ``[E, F, H]``, F = 2I with a gate, else I; gate rows first unless ``interleaved``.
        down: packed ``[E, H, I]``.
        up: adapter of ``gate_up``; its b has F rows in the stack's own order.
        low: adapter of ``down``.
        up_bias: bf16 ``[E, F]`` in the stack's own row order, added before the activation; frozen.
        down_bias: bf16 ``[E, H]``; frozen.
        interleaved: gate and up rows alternate (MXFP4 only).

    Returns:
        ``[R, H]`` in bf16, without routing weights.

    Raises:
        KernelError: an input outside ``admit.check``; ``trains-the-base`` where a frozen tensor wants a gradient.
    """
    choice, factors = choice_of(activation, Layout("out_in", interleaved), up, low)
    w = PackedWeights(gate_up, down, *factors, up_bias, down_bias)
    beside = w.beside()
    given = [tensor for tensor in beside if tensor is not None]
    refuse_learning(w)
    if not direct(x, counts, *w.stacks(), *given):
        if gate_up.kind != down.kind:
            check(x, counts, w, choice, real=False)
        return packed_experts_forward(x, counts, *Registered.of(w, choice))[0]
    if not wants_gradient(x, *given):
        return forward(choice, w, x, counts, keep=False).y
    return cast(Tensor, PackedExperts.apply(choice, x, counts, w, *(beside if given else ())))
