"""The grouped LoRA MLP as a torch operator: guards, launches, gradients, fake tensors, torch.compile.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.grouped_lora_mlp import compute, contract
from shardwright.kernels.grouped_lora_mlp.compute import Choice, Kept, Weights
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.launches import launch_zero_tail
from shardwright.kernels.grouped_lora_mlp.rows import Rows
from shardwright.kernels.guards import refuse
from shardwright.kernels.permute.configs import most_tiles
from shardwright.kernels.permute.op import Tiles, make_tiles, tile_buffer_size


@dataclass(frozen=True)
class Adapter:
    """LoRA on one stack: the product gains ``scaling · (x aᵀ) bᵀ``."""

    a: Tensor
    """``[E, r, in]``."""
    b: Tensor
    """``[E, out, r]``."""
    scaling: float


Optional = Tensor | None
ADMITTED = Admitted()


def check(
    x: Tensor, counts: Tensor | None, w: Weights, choice: Choice, *, op: str = contract.NAME, real: bool = True
) -> None:
    """All guards; those on memory only for real tensors.

    Raises:
        KernelError: see ``contract``; ``trains-the-base`` where a base stack wants a gradient.
    """
    contract.check_choice(op, choice.activation, choice.layout)
    contract.check_weights(op, x, w.gate_up, w.down, choice.activation.gated, choice.layout)
    E, H, I = w.gate_up.shape[0], x.shape[1], w.down.shape[1 if choice.layout.order == "in_out" else 2]
    tensors = {"x": x, "gate_up": w.gate_up, "down": w.down}
    F = (2 if choice.activation.gated else 1) * I
    for role, a, b, sizes in (("up", w.up_a, w.up_b, (E, F, H)), ("down", w.down_a, w.down_b, (E, H, I))):
        if (a is None) != (b is None):
            raise refuse(op, "wrong-shape", f"{role} has one adapter factor", "pass both a and b")
        if a is not None and b is not None:
            contract.check_adapter(op, role, a, b, sizes, x)
            tensors |= {f"{role}.a": a, f"{role}.b": b}
    if counts is not None:
        contract.check_counts(op, counts, E)
    refuse_learning_base(op, w)
    if real:
        contract.check_places(op, cast(Any, tensors), interpreted=device.interpreted())


def layer_tensors(w: Weights) -> tuple[Optional, ...]:
    """The stacks and the adapters' factors."""
    return w.gate_up, w.down, w.up_a, w.up_b, w.down_a, w.down_b


def learns_base(w: Weights) -> bool:
    """Whether a base stack wants a gradient, which the guards refuse."""
    return torch.is_grad_enabled() and (w.gate_up.requires_grad or w.down.requires_grad)


def refuse_learning_base(op: str, w: Weights) -> None:
    """Raises: KernelError: ``trains-the-base``. Looks at the grad mode, so it runs before an autograd function."""
    if learns_base(w):
        what = "gate_up or down wants a gradient"
        raise refuse(op, "trains-the-base", what, "freeze the base, or keep this module eager")


def choice_of(
    activation: Activation, layout: Layout, up: Adapter | None, down: Adapter | None
) -> tuple[Choice, tuple[Optional, Optional, Optional, Optional]]:
    """The static choice, and the adapters' factors in the order that operators take them."""
    choice = Choice(
        activation, layout, 0.0 if up is None else float(up.scaling), 0.0 if down is None else float(down.scaling)
    )
    pair = (None, None) if up is None else (up.a, up.b)
    return choice, (*pair, *((None, None) if down is None else (down.a, down.b)))


def encode(choice: Choice) -> tuple[list[float], str]:
    """A choice as an operator's plain arguments."""
    flags = f"{choice.activation.kind}/{choice.layout.order}/{'interleaved' if choice.layout.interleaved else 'halves'}"
    return [*choice.activation.parameters, choice.up_scaling, choice.down_scaling], flags


def decode(numbers: list[float], flags: str) -> Choice:
    """The inverse of ``encode``."""
    kind, order, halves = flags.split("/")
    activation = Activation(cast(Any, kind), (numbers[0], numbers[1], numbers[2]))
    return Choice(activation, Layout(cast(Any, order), halves == "interleaved"), numbers[3], numbers[4])


def kept_list(kept: Kept, like: Tensor) -> list[Tensor]:
    """What is kept as an operator's outputs: empty tensors where nothing is."""
    empty = like.new_empty(0)
    return [t if t is not None else empty.clone() for t in (kept.gu, kept.h, kept.z_up, kept.z_down)]


def kept_of(tensors: tuple[Tensor, ...]) -> Kept:
    """The inverse of ``kept_list``."""
    gu, h, z_up, z_down = (t if t.numel() or t.dim() > 1 else None for t in tensors)
    return Kept(gu, h, z_up, z_down)


def fake_kept(x: Tensor, R: int, w: Weights, choice: Choice) -> list[Tensor]:
    """Shapes of what is kept."""
    I = w.down.shape[1 if choice.layout.order == "in_out" else 2]
    F = (2 if choice.activation.gated else 1) * I
    h = x.new_empty(0) if w.down_a is None else x.new_empty((R, I))
    z_up = x.new_empty(0) if w.up_a is None else x.new_empty((R, w.up_a.shape[1]))
    z_down = x.new_empty(0) if w.down_a is None else x.new_empty((R, w.down_a.shape[1]))
    return [x.new_empty((R, F)), h, z_up, z_down]


def run_forward(
    choice: Choice, w: Weights, x: Tensor, counts: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Kept, object | None]:
    """``y [R, H]``, the tile buffer, what is kept, and the layout's token; rows past ``sum(counts)`` are zero."""
    settings = (choice, learns_base(w))
    token = ADMITTED.check((x, counts, *layer_tensors(w)), settings, lambda: check(x, counts, w, choice))
    tiles = make_tiles(counts, x.shape[0], token)
    rows = Rows(x.shape[0], tiles, token=token)
    y, kept = compute.forward(choice, w, x, rows, keep)
    launch_zero_tail("tail", y, rows)
    return y, tiles.buffer, kept, token


class GroupedLoraMlp(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(
        ctx: Any, choice: Choice, x: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor, *factors: Optional
    ) -> Tensor:
        w = Weights(gate_up, down, *factors)
        y, buffer, kept, ctx.token = run_forward(choice, w, x, counts, keep=True)
        ctx.save_for_backward(x, buffer, gate_up, down, *factors, kept.gu, kept.h, kept.z_up, kept.z_down)
        ctx.choice = choice
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, buffer, gate_up, down, *rest = ctx.saved_tensors
        w, kept = Weights(gate_up, down, *rest[:4]), Kept(*rest[4:])
        needs = ctx.needs_input_grad
        wants = (needs[1], any(needs[5:7]), any(needs[7:9]))
        found = run_backward(ctx.choice, w, x, buffer, kept, dy, wants, ctx.token)
        return (None, found.dx, None, None, None, found.up_a, found.up_b, found.down_a, found.down_b)


def run_backward(
    choice: Choice,
    w: Weights,
    x: Tensor,
    buffer: Tensor,
    kept: Kept,
    dy: Tensor,
    wants: tuple[bool, bool, bool],
    token: object | None = None,
) -> compute.Gradients:
    """Gradients of x (rows past the last expert: zero) and of the adapters."""
    E = w.gate_up.shape[0]
    tiles = Tiles(buffer, E, most_tiles(x.shape[0], E))
    rows = Rows(x.shape[0], tiles, token=token)
    found = compute.backward(
        choice,
        w,
        x,
        rows,
        kept,
        dy.contiguous(),
        None,
        wants_x=wants[0],
        wants_part=False,
        wants_up=wants[1],
        wants_down=wants[2],
    )
    if found.dx is not None:
        launch_zero_tail("dx-tail", found.dx, rows)
    return found


@torch.library.custom_op("shardwright::grouped_lora_mlp_forward", mutates_args=())
def grouped_lora_mlp_forward(
    x: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``y``, the tile buffer, gu, h, z_up, z_down as one opaque node for tracers."""
    w = Weights(gate_up, down, up_a, up_b, down_a, down_b)
    y, buffer, kept, _ = run_forward(decode(numbers, flags), w, x, counts, keep=True)
    gu, h, z_up, z_down = kept_list(kept, x)
    return y, buffer, gu, h, z_up, z_down


@grouped_lora_mlp_forward.register_fake
def _(
    x: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    choice, w = decode(numbers, flags), Weights(gate_up, down, up_a, up_b, down_a, down_b)
    check(x, counts, w, choice, real=False)
    buffer = x.new_empty(tile_buffer_size(x.shape[0], gate_up.shape[0]), dtype=torch.int32)
    gu, h, z_up, z_down = fake_kept(x, x.shape[0], w, choice)
    return torch.empty_like(x), buffer, gu, h, z_up, z_down


@torch.library.custom_op("shardwright::grouped_lora_mlp_backward", mutates_args=())
def grouped_lora_mlp_backward(
    dy: Tensor,
    x: Tensor,
    buffer: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    kept: list[Tensor],
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx and the adapters' gradients; empty where there is no adapter."""
    w = Weights(gate_up, down, up_a, up_b, down_a, down_b)
    found = run_backward(decode(numbers, flags), w, x, buffer, kept_of(tuple(kept)), dy, (True, True, True))
    factors = (found.up_a, found.up_b, found.down_a, found.down_b)
    dx = cast(Tensor, found.dx)
    a, b, c, d = (t if t is not None else x.new_empty(0) for t in factors)
    return dx, a, b, c, d


@grouped_lora_mlp_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    buffer: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    kept: list[Tensor],
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = (x.new_empty(0) if t is None else torch.empty_like(t) for t in (up_a, up_b, down_a, down_b))
    return torch.empty_like(x), a, b, c, d


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, gate_up, down, up_a, up_b, down_a, down_b, numbers, flags = inputs
    ctx.save_for_backward(x, output[1], gate_up, down, up_a, up_b, down_a, down_b, *output[2:])
    ctx.numbers, ctx.flags = numbers, flags
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Any, ...]:
    x, buffer, gate_up, down, up_a, up_b, down_a, down_b, *kept = ctx.saved_tensors
    dx, *found = grouped_lora_mlp_backward(
        dy, x, buffer, gate_up, down, up_a, up_b, down_a, down_b, kept, ctx.numbers, ctx.flags
    )
    factors = (g if given is not None else None for g, given in zip(found, (up_a, up_b, down_a, down_b), strict=True))
    return (dx, None, None, None, *factors, None, None)


grouped_lora_mlp_forward.register_autograd(_differentiate, setup_context=_save)


def grouped_lora_mlp(
    x: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    up: Adapter | None = None,
    low: Adapter | None = None,
    activation: Activation = Activation(),  # noqa: B008  (frozen)
    layout: Layout = Layout(),  # noqa: B008  (frozen)
) -> Tensor:
    """Every expert's MLP on its rows; the base is frozen, gradients go to x and the adapters.

    Args:
        x: ``[R, H]``, rows sorted by expert; rows past ``sum(counts)`` are ignored and give zeros.
        counts: integers ``[E]`` on the device; they are never read by the host. Their sum is at most R.
        gate_up: ``[E, F, H]`` (or as ``layout`` says), F = 2I with a gate, else I.
        down: ``[E, H, I]`` (or as ``layout`` says).
        up: adapter of ``gate_up``; its b has F rows in the stack's own column order.
        low: adapter of ``down``.

    Returns:
        ``[R, H]`` in x's dtype, without routing weights.

    Raises:
        KernelError: an input outside ``check``.
    """
    choice, factors = choice_of(activation, layout, up, low)
    given = [t for t in factors if t is not None]
    if not direct(x, counts, gate_up, down, *given):
        return grouped_lora_mlp_forward(x, counts, gate_up, down, *factors, *encode(choice))[0]
    if not wants_gradient(x, *given):
        return run_forward(choice, Weights(gate_up, down, *factors), x, counts, keep=False)[0]
    refuse_learning_base(contract.NAME, Weights(gate_up, down))
    return cast(Tensor, GroupedLoraMlp.apply(choice, x, counts, gate_up, down, *factors))
