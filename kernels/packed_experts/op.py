"""The packed experts as a torch operator: guards, launches, gradients, fake tensors, torch.compile.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device, guards
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.grouped_lora_mlp import contract as grouped_contract
from shardwright.kernels.grouped_lora_mlp.compute import Choice, Gradients, Kept
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.op import (
    Adapter,
    choice_of,
    decode,
    encode,
    kept_list,
    kept_of,
)
from shardwright.kernels.packed_experts import compute, configs, contract, launches
from shardwright.kernels.packed_experts.compute import PackedWeights
from shardwright.kernels.packed_experts.storage import PackedStack

Optional = Tensor | None
ADMITTED = Admitted()


def check(x: Tensor, counts: Tensor, w: PackedWeights, choice: Choice, *, real: bool = True) -> None:
    """All guards; those on memory only for real tensors.

    Raises:
        KernelError: see ``contract`` and ``grouped_lora_mlp.contract``.
    """
    op = contract.NAME
    grouped_contract.check_choice(op, choice.activation, choice.layout)
    contract.check_inputs(op, x, cast(Any, w.gate_up), cast(Any, w.down), choice.activation, choice.layout.interleaved)
    (E, F, H), I = w.gate_up.shape, w.down.shape[2]
    tensors = {"x": x, "counts": counts}
    tensors |= {"gate_up values": w.gate_up.values, "gate_up scales": w.gate_up.scales}
    tensors |= {"down values": w.down.values, "down scales": w.down.scales}
    for role, a, b, sizes in (("up", w.up_a, w.up_b, (E, F, H)), ("down", w.down_a, w.down_b, (E, H, I))):
        if (a is None) != (b is None):
            raise guards.refuse(op, "wrong-shape", f"{role} has one adapter factor", "pass both a and b")
        if a is not None and b is not None:
            grouped_contract.check_adapter(op, role, a, b, sizes, x)
            tensors |= {f"{role}.a": a, f"{role}.b": b}
    grouped_contract.check_counts(op, counts, E)
    if real:
        guards.one_device(op, cast(Any, tensors), interpreted=device.interpreted())
        guards.dense(op, cast(Any, tensors))


def run_forward(
    choice: Choice, w: PackedWeights, x: Tensor, counts: Tensor, keep: bool, dequantise: bool | None = None
) -> tuple[Tensor, Kept, object | None]:
    """``y [R, H]``, what is kept, and the layout's token; rows past ``sum(counts)`` are zero.

    ``dequantise`` overrides the table.
    """
    stacks = (w.gate_up.values, w.gate_up.scales, w.down.values, w.down.scales)
    token = ADMITTED.check(
        (x, counts, *stacks, w.up_a, w.up_b, w.down_a, w.down_b),
        (choice, w.gate_up.kind, w.down.kind),
        lambda: check(x, counts, w, choice),
    )
    chosen = configs.dequantises(x.shape[0], counts.shape[0], trains=keep) if dequantise is None else dequantise
    y, kept, tiles = compute.forward(choice, w, x, counts, keep, chosen, token)
    launches.launch_zero_tail("tail", y, tiles, None if token is None else (token, chosen))
    return y, kept, token


def run_backward(
    choice: Choice,
    w: PackedWeights,
    x: Tensor,
    counts: Tensor,
    kept: Kept,
    dy: Tensor,
    wants: tuple[bool, bool, bool],
    token: object | None = None,
    dequantise: bool | None = None,
) -> Gradients:
    """Gradients of x (rows past the last expert: zero) and of the adapters."""
    chosen = configs.dequantises(x.shape[0], counts.shape[0], trains=True) if dequantise is None else dequantise
    found, tiles = compute.backward(
        choice,
        w,
        x,
        counts,
        kept,
        dy.contiguous(),
        chosen,
        token=token,
        wants_x=wants[0],
        wants_up=wants[1],
        wants_down=wants[2],
    )
    if found.dx is not None:
        launches.launch_zero_tail("dx-tail", found.dx, tiles, None if token is None else (token, chosen))
    return found


class PackedExperts(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(
        ctx: Any, choice: Choice, x: Tensor, counts: Tensor, gate_up: PackedStack, down: PackedStack, *factors: Optional
    ) -> Tensor:
        y, kept, ctx.token = run_forward(choice, PackedWeights(gate_up, down, *factors), x, counts, keep=True)
        ctx.save_for_backward(x, counts, *factors, kept.gu, kept.h, kept.z_up, kept.z_down)
        ctx.choice, ctx.stacks = choice, (gate_up, down)  # frozen and never outputs: no cycle, no version to check
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, counts, *rest = ctx.saved_tensors
        w, kept, needs = PackedWeights(*ctx.stacks, *rest[:4]), Kept(*rest[4:]), ctx.needs_input_grad
        wants = (needs[1], any(needs[5:7]), any(needs[7:9]))
        found = run_backward(ctx.choice, w, x, counts, kept, dy, wants, ctx.token)
        return (None, found.dx, None, None, None, found.up_a, found.up_b, found.down_a, found.down_b)


def _weights(kind: str, stacks: tuple[Tensor, ...], factors: tuple[Optional, ...] = ()) -> PackedWeights:
    gate_up = PackedStack(stacks[0], stacks[1], cast(Any, kind))
    return PackedWeights(gate_up, PackedStack(stacks[2], stacks[3], cast(Any, kind)), *factors)


@torch.library.custom_op("shardwright::packed_experts_forward", mutates_args=())
def packed_experts_forward(
    x: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    kind: str,
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``y``, gu, h, z_up, z_down as one opaque node for tracers."""
    w = _weights(kind, (gate_up, gate_up_scales, down, down_scales), (up_a, up_b, down_a, down_b))
    y, kept, _ = run_forward(decode(numbers, flags), w, x, counts, keep=True)
    gu, h, z_up, z_down = kept_list(kept, x)
    return y, gu, h, z_up, z_down


@packed_experts_forward.register_fake
def _(
    x: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    kind: str,
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    choice = decode(numbers, flags)
    w = _weights(kind, (gate_up, gate_up_scales, down, down_scales), (up_a, up_b, down_a, down_b))
    check(x, counts, w, choice, real=False)
    R, F, I, none = x.shape[0], w.gate_up.shape[1], w.down.shape[2], x.new_empty(0)
    h = none if down_a is None else x.new_empty((R, I))
    z_up = none.clone() if up_a is None else x.new_empty((R, up_a.shape[1]))
    z_down = none.clone() if down_a is None else x.new_empty((R, down_a.shape[1]))
    return torch.empty_like(x), x.new_empty((R, F)), h, z_up, z_down


@torch.library.custom_op("shardwright::packed_experts_backward", mutates_args=())
def packed_experts_backward(
    dy: Tensor,
    x: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    kept: list[Tensor],
    kind: str,
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx and the adapters' gradients; empty where there is no adapter."""
    w = _weights(kind, (gate_up, gate_up_scales, down, down_scales), (up_a, up_b, down_a, down_b))
    found = run_backward(decode(numbers, flags), w, x, counts, kept_of(tuple(kept)), dy, (True, True, True))
    factors = (found.up_a, found.up_b, found.down_a, found.down_b)
    a, b, c, d = (t if t is not None else x.new_empty(0) for t in factors)
    return cast(Tensor, found.dx), a, b, c, d


@packed_experts_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    kept: list[Tensor],
    kind: str,
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = (x.new_empty(0) if t is None else torch.empty_like(t) for t in (up_a, up_b, down_a, down_b))
    return torch.empty_like(x), a, b, c, d


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, kind, numbers, flags = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.kind, ctx.numbers, ctx.flags = kind, numbers, flags
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Any, ...]:
    tensors, kept = ctx.saved_tensors[:10], list(ctx.saved_tensors[10:])
    dx, *found = packed_experts_backward(dy, *tensors, kept, ctx.kind, ctx.numbers, ctx.flags)
    factors = (g if given is not None else None for g, given in zip(found, tensors[6:], strict=True))
    return (dx, None, None, None, None, None, *factors, None, None, None)


packed_experts_forward.register_autograd(_differentiate, setup_context=_save)


def packed_experts(
    x: Tensor,
    counts: Tensor,
    gate_up: PackedStack,
    down: PackedStack,
    *,
    up: Adapter | None = None,
    low: Adapter | None = None,
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
        interleaved: gate and up rows alternate (MXFP4 only).

    Returns:
        ``[R, H]`` in bf16, without routing weights.

    Raises:
        KernelError: an input outside ``check``.
    """
    choice, factors = choice_of(activation, Layout("out_in", interleaved), up, low)
    stacks = (gate_up.values, gate_up.scales, down.values, down.scales)
    given = [t for t in factors if t is not None]
    if not direct(x, counts, *stacks, *given):
        if gate_up.kind != down.kind:
            check(x, counts, PackedWeights(gate_up, down, *factors), choice, real=False)
        return packed_experts_forward(x, counts, *stacks, *factors, gate_up.kind, *encode(choice))[0]
    if not wants_gradient(x, *given):
        return run_forward(choice, PackedWeights(gate_up, down, *factors), x, counts, keep=False)[0]
    return cast(Tensor, PackedExperts.apply(choice, x, counts, gate_up, down, *factors))
