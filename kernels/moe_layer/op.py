"""The whole MoE layer as a torch operator: guards, launches, gradients, fake tensors, torch.compile.

Legend: T tokens, K experts a token, E experts, R = T·K rows, H hidden, I expert width, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.grouped_lora_mlp import compute
from shardwright.kernels.grouped_lora_mlp.compute import Choice, Kept, Weights
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.op import (
    Adapter,
    Optional,
    check,
    choice_of,
    decode,
    encode,
    fake_kept,
    kept_list,
    kept_of,
    layer_tensors,
    learns_base,
    refuse_learning_base,
)
from shardwright.kernels.grouped_lora_mlp.rows import Rows
from shardwright.kernels.moe_layer import configs, contract
from shardwright.kernels.moe_layer.triton import weight_grad_kernel
from shardwright.kernels.permute.configs import most_tiles
from shardwright.kernels.permute.op import Tiles, launch_combine, launch_route, tile_buffer_size

ADMITTED = Admitted()


@dataclass(frozen=True)
class Index:
    """A routing as three saved tensors: tile buffer, entry of each row, row of each entry."""

    buffer: Tensor
    entry: Tensor
    place: Tensor

    def rows(self, experts: int, token: object | None) -> Rows:
        R = self.entry.shape[0]
        tiles = Tiles(self.buffer, experts, most_tiles(R, experts))
        return Rows(R, tiles, self.entry, self.place.shape[1], token)


@dataclass(frozen=True)
class Wants:
    """Which gradients are needed."""

    x: bool
    weights: bool
    up: bool
    down: bool


def run_forward(
    choice: Choice, w: Weights, x: Tensor, ids: Tensor, weights: Tensor, keep: bool
) -> tuple[Tensor, Index, Kept, object | None]:
    """``out [T, H]``, the routing's index, what is kept for the backward, and the layout's token."""
    E = w.gate_up.shape[0]

    def guards() -> None:
        check(x, None, w, choice, op=contract.NAME)
        contract.check_routing(x, ids, weights, E, interpreted=device.interpreted())

    token = ADMITTED.check((x, ids, weights, *layer_tensors(w)), (choice, learns_base(w)), guards)
    routing = launch_route(ids, E, token)
    index = Index(routing.tiles.buffer, routing.entry, routing.place)
    rows = Rows(routing.rows, routing.tiles, routing.entry, ids.shape[1], token)
    y, kept = compute.forward(choice, w, x, rows, keep)
    out = torch.empty_like(x)
    launch_combine(y, routing.place, weights, out, key_of(token, "combine"))
    return out, index, kept, token


def run_backward(
    choice: Choice,
    w: Weights,
    x: Tensor,
    weights: Tensor,
    index: Index,
    kept: Kept,
    dout: Tensor,
    wants: Wants,
    token: object | None = None,
) -> tuple[Tensor | None, Tensor | None, compute.Gradients]:
    """``dx [T, H]``, ``dweights [T, K]``, and the adapters' gradients."""
    rows = index.rows(w.gate_up.shape[0], token)
    found = compute.backward(
        choice,
        w,
        x,
        rows,
        kept,
        dout.contiguous(),
        weights,
        wants_x=wants.x,
        wants_part=wants.weights,
        wants_up=wants.up,
        wants_down=wants.down,
    )
    dx = dweights = None
    if found.dx is not None:
        dx = torch.empty_like(x)
        launch_combine(found.dx, index.place, None, dx, key_of(token, "combine-dx"))
    if found.part is not None:
        dweights = torch.empty_like(weights)
        N = weights.numel()
        tensors, key = (found.part, index.place, dweights), key_of(token, "weight-grad")
        if N and not again(key, tensors):
            with device.current(x):
                start(
                    key,
                    tensors,
                    weight_grad_kernel,
                    (-(-N // configs.WEIGHT_ENTRIES),),
                    found.part,
                    index.place,
                    dweights,
                    N,
                    BLOCK=configs.WEIGHT_ENTRIES,
                    num_warps=configs.WEIGHT_WARPS,
                )
    return dx, dweights, found


class MoeLayer(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(
        ctx: Any,
        choice: Choice,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *factors: Optional,
    ) -> Tensor:
        w = Weights(gate_up, down, *factors)
        out, index, kept, ctx.token = run_forward(choice, w, x, ids, weights, keep=True)
        ctx.save_for_backward(
            x, weights, gate_up, down, *factors, index.buffer, index.entry, index.place, *vars(kept).values()
        )
        ctx.choice = choice
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, weights, gate_up, down, *rest = ctx.saved_tensors
        w, index, kept = Weights(gate_up, down, *rest[:4]), Index(*rest[4:7]), Kept(*rest[7:])
        needs = ctx.needs_input_grad
        wants = Wants(needs[1], needs[3], any(needs[6:8]), any(needs[8:10]))
        dx, dweights, found = run_backward(ctx.choice, w, x, weights, index, kept, dout, wants, ctx.token)
        return (None, dx, None, dweights, None, None, found.up_a, found.up_b, found.down_a, found.down_b)


@torch.library.custom_op("shardwright::moe_layer_forward", mutates_args=())
def moe_layer_forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``out``, the routing's index (three), gu, h, z_up, z_down as one opaque node for tracers."""
    w = Weights(gate_up, down, up_a, up_b, down_a, down_b)
    out, index, kept, _ = run_forward(decode(numbers, flags), w, x, ids, weights, keep=True)
    gu, h, z_up, z_down = kept_list(kept, x)
    return out, index.buffer, index.entry, index.place, gu, h, z_up, z_down


@moe_layer_forward.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    choice, w = decode(numbers, flags), Weights(gate_up, down, up_a, up_b, down_a, down_b)
    check(x, None, w, choice, op=contract.NAME, real=False)
    R = ids.shape[0] * ids.shape[1]
    buffer = ids.new_empty(tile_buffer_size(R, gate_up.shape[0]), dtype=torch.int32)
    gu, h, z_up, z_down = fake_kept(x, R, w, choice)
    entry, place = ids.new_empty(R, dtype=torch.int32), torch.empty_like(ids, dtype=torch.int32)
    return torch.empty_like(x), buffer, entry, place, gu, h, z_up, z_down


@torch.library.custom_op("shardwright::moe_layer_backward", mutates_args=())
def moe_layer_backward(
    dout: Tensor,
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    index: list[Tensor],
    kept: list[Tensor],
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dweights and the adapters' gradients; empty where there is no adapter."""
    w = Weights(gate_up, down, up_a, up_b, down_a, down_b)
    dx, dweights, found = run_backward(
        decode(numbers, flags), w, x, weights, Index(*index), kept_of(tuple(kept)), dout, Wants(True, True, True, True)
    )
    factors = (found.up_a, found.up_b, found.down_a, found.down_b)
    a, b, c, d = (t if t is not None else x.new_empty(0) for t in factors)
    return cast(Tensor, dx), cast(Tensor, dweights), a, b, c, d


@moe_layer_backward.register_fake
def _(
    dout: Tensor,
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    index: list[Tensor],
    kept: list[Tensor],
    numbers: list[float],
    flags: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = (x.new_empty(0) if t is None else torch.empty_like(t) for t in (up_a, up_b, down_a, down_b))
    return torch.empty_like(x), torch.empty_like(weights), a, b, c, d


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weights, gate_up, down, up_a, up_b, down_a, down_b, numbers, flags = inputs
    ctx.save_for_backward(x, weights, gate_up, down, up_a, up_b, down_a, down_b, *output[1:])
    ctx.numbers, ctx.flags = numbers, flags
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Any, ...]:
    x, weights, gate_up, down, up_a, up_b, down_a, down_b, *rest = ctx.saved_tensors
    dx, dweights, *found = moe_layer_backward(
        dout, x, weights, gate_up, down, up_a, up_b, down_a, down_b, rest[:3], rest[3:], ctx.numbers, ctx.flags
    )
    factors = (g if given is not None else None for g, given in zip(found, (up_a, up_b, down_a, down_b), strict=True))
    return (dx, None, dweights, None, None, *factors, None, None)


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
    activation: Activation = Activation(),  # noqa: B008  (frozen)
    layout: Layout = Layout(),  # noqa: B008  (frozen)
) -> Tensor:
    """``out[t] = Σ_k weights[t, k] · MLP_{ids[t, k]}(x[t])`` on one device, the base frozen.

    Args:
        x: ``[T, H]``.
        ids: ``[T, K]`` int32 or int64; an id outside 0 .. E-1 adds nothing (a sentinel).
        weights: ``[T, K]`` floating; they get a gradient.
        gate_up, down, up, low: as in ``grouped_lora_mlp``.

    Returns:
        ``[T, H]`` in x's dtype, summed in fp32 in slot order.

    Raises:
        KernelError: an input outside the contracts of ``moe_layer``, ``permute`` or ``grouped_lora_mlp``.
    """
    choice, factors = choice_of(activation, layout, up, low)
    given = [t for t in factors if t is not None]
    if not direct(x, ids, weights, gate_up, down, *given):
        return moe_layer_forward(x, ids, weights, gate_up, down, *factors, *encode(choice))[0]
    if not wants_gradient(x, weights, *given):
        return run_forward(choice, Weights(gate_up, down, *factors), x, ids, weights, keep=False)[0]
    refuse_learning_base(contract.NAME, Weights(gate_up, down))
    return cast(Tensor, MoeLayer.apply(choice, x, ids, weights, gate_up, down, *factors))
