"""The whole MoE layer as a torch operator: gradients, fake tensors, torch.compile.

Legend: T tokens, K experts a token, E experts, R = T·K rows, H hidden, I expert width, r rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.grouped_lora_mlp.admit import check, refuse_learning
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.layer import (
    PARTS,
    Adapter,
    Choice,
    Held,
    Kept,
    Optional,
    Registered,
    Wants,
    Weights,
    choice_of,
)
from shardwright.kernels.moe_layer import contract
from shardwright.kernels.moe_layer.compute import (
    Index,
    Started,
    end_forward,
    run_backward,
    run_forward,
    start_forward,
)

INDEX = 3
"""Tensors of ``Index``."""


class MoeLayer(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``), up to the values of ``out``: those ``Filled`` makes.

    A checkpoint's recomputation ends with the last tensor that its backward wants. Where that is one of these, as in a
    layer that ends with its experts, the down product and the sums to tokens are not made again.
    """

    @staticmethod
    def forward(
        ctx: Any, into: list[Started], choice: Choice, x: Tensor, ids: Tensor, weights: Tensor, *layer: Optional
    ) -> Tensor:
        started = start_forward(choice, Weights(*cast(Any, layer)), x, ids, weights, keep=True)
        ctx.save_for_backward(x, weights, *layer, *started.index.tensors(), *started.half.kept)
        ctx.choice, ctx.token = choice, started.token
        into.append(started)
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, weights, *rest = ctx.saved_tensors
        w, index = Weights(*rest[:PARTS]), Index(*rest[PARTS : PARTS + INDEX])
        held = Held.in_backward(x, Kept(*rest[PARTS + INDEX :]))
        del x, rest
        needs = ctx.needs_input_grad
        wants = Wants.of(needs[5:], needs[2], needs[4])
        dx, dweights, found = run_backward(ctx.choice, w, held, weights, index, dout, wants, ctx.token)
        return (None, None, dx, None, dweights, *found.of_weights())


class Filled(torch.autograd.Function):
    """``out`` with its values; what it needs beside them is not saved, for its gradient is ``out``'s own."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, started: Started, choice: Choice, w: Weights) -> Tensor:
        end_forward(choice, w, started, out)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return dout, None, None, None


@torch.library.custom_op("shardwright::moe_layer_forward", mutates_args=())
def moe_layer_forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layer: list[Tensor],
    present: list[bool],
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``out``, the routing's index (three), gu, h, z_up, z_down as one opaque node for tracers; ``layer``: see
    ``Registered``."""
    given = Registered(layer, present, numbers, flags)
    out, index, kept, _ = run_forward(given.choice(), given.weights(), x, ids, weights, keep=True)
    gu, h, z_up, z_down = kept.outputs(x)
    return out, *index.tensors(), gu, h, z_up, z_down


@moe_layer_forward.register_fake
def _(x: Tensor, ids: Tensor, weights: Tensor, *layer: Any) -> tuple[Tensor, ...]:
    given = Registered(*layer)
    w, choice = given.weights(), given.choice()
    check(x, None, w, choice, op=contract.NAME, real=False)
    index, kept = Index.shapes(ids, w.gate_up.shape[0]), Kept.shapes(x, ids.shape[0] * ids.shape[1], w, choice)
    return torch.empty_like(x), *index.tensors(), *kept.outputs(x)


@torch.library.custom_op("shardwright::moe_layer_backward", mutates_args=())
def moe_layer_backward(
    dout: Tensor,
    x: Tensor,
    weights: Tensor,
    index: list[Tensor],
    kept: list[Tensor],
    layer: list[Tensor],
    present: list[bool],
    numbers: list[float],
    flags: str,
) -> list[Tensor]:
    """dx, dweights, then one gradient for each tensor of ``layer``; empty where it has none."""
    given = Registered(layer, present, numbers, flags)
    w, choice = given.weights(), given.choice()
    wants = Wants.all(choice, weights=True)
    held = Held(x, Kept.of(kept))
    dx, dweights, found = run_backward(choice, w, held, weights, Index(*index), dout, wants)
    return [cast(Tensor, dx), cast(Tensor, dweights), *given.gradients(found, x)]


@moe_layer_backward.register_fake
def _(dout: Tensor, x: Tensor, weights: Tensor, index: list[Tensor], kept: list[Tensor], *layer: Any) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(weights), *Registered(*layer).shapes()]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weights, layer, *fixed = inputs
    ctx.save_for_backward(x, weights, *output[1:], *layer)
    ctx.fixed = fixed
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Any, ...]:
    x, weights, *rest = ctx.saved_tensors
    index, rest = rest[:INDEX], rest[INDEX:]
    kept, layer = rest[: len(Kept._fields)], rest[len(Kept._fields) :]
    dx, dweights, *found = moe_layer_backward(dout, x, weights, index, kept, layer, *ctx.fixed)
    learned = [g if g.numel() == t.numel() else None for g, t in zip(found, layer, strict=True)]
    return dx, None, dweights, learned, None, None, None


moe_layer_forward.register_autograd(_differentiate, setup_context=_save)


def moe_layer(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
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
    """``out[t] = Σ_k weights[t, k] · MLP_{ids[t, k]}(x[t])`` on one device.

    Args:
        x: ``[T, H]``.
        ids: ``[T, K]`` int32 or int64; an id outside 0 .. E-1 adds nothing (a sentinel).
        weights: ``[T, K]`` floating; they get a gradient.
        gate_up, down, up, low, up_bias, down_bias, trains_base: as in ``grouped_lora_mlp``.

    Returns:
        ``[T, H]`` in x's dtype, summed in fp32 in slot order.

    Raises:
        KernelError: an input outside the contracts of ``moe_layer``, ``permute`` or ``grouped_lora_mlp``.
    """
    choice, factors = choice_of(activation, layout, up, low, trains_base)
    w = Weights(gate_up, down, *factors, up_bias, down_bias)
    if not direct(x, ids, weights, *w.given()):
        return moe_layer_forward(x, ids, weights, *Registered.of(w, choice))[0]
    if not wants_gradient(x, weights, *w.given()):
        return run_forward(choice, w, x, ids, weights, keep=False)[0]
    refuse_learning(contract.NAME, w, choice)
    into: list[Started] = []
    out = MoeLayer.apply(into, choice, x, ids, weights, *w.tensors())
    return cast(Tensor, Filled.apply(out, into[0], choice, w))
