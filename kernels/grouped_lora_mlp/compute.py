"""Forward and backward of an expert MLP on sorted rows, out of the launches. No autograd, no guards.

The down product's routing weight is applied to rows of the gradient inside the backward kernel, so that the
whole layer (rows gathered from tokens) and the split operator (received rows) share this one file.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwright.kernels.grouped_lora_mlp.elementwise_launch import BiasPart, launch_activation_bwd
from shardwright.kernels.grouped_lora_mlp.launches import launch_gate_up, launch_product
from shardwright.kernels.grouped_lora_mlp.layer import Choice, Gradients, Held, Kept, Wants, Weights
from shardwright.kernels.grouped_lora_mlp.lora_launch import Side, launch_adapter_grads, launch_shrink
from shardwright.kernels.grouped_lora_mlp.rows import LowRank, Product, Rows
from shardwright.kernels.grouped_lora_mlp.stack_grad_launch import Operand, launch_stack_grad


@dataclass
class Half:
    """A forward before its down product: what that product multiplies, and what a backward needs."""

    h: Tensor
    low: LowRank | None
    kept: Kept


def forward(choice: Choice, w: Weights, x: Tensor, rows: Rows, keep: bool) -> tuple[Tensor, Kept]:
    """``y [R, H]`` (unweighted), and what a backward needs where ``keep``. ``x``: tokens or rows."""
    half = first_half(choice, w, x, rows, keep)
    return second_half(choice, w, half, rows, x.shape[1]), half.kept


def first_half(choice: Choice, w: Weights, x: Tensor, rows: Rows, keep: bool) -> Half:
    """Everything that a backward needs: up product, activation, both adapters' inner values."""
    R, H = rows.count, x.shape[1]
    (I, F), n_first = w.widths(choice), choice.layout.order == "out_in"
    gu, h = x.new_empty((R, F)) if keep else None, x.new_empty((R, I))
    z_up = z_down = low = None
    if w.up_a is not None and w.up_b is not None:
        rank = w.up_a.shape[1]
        z_up = x.new_empty((R, rank))
        launch_shrink("shrink-up", x, w.up_a, 1, H, choice.up_scaling, rows, True, z_up)
        low = LowRank(z_up, w.up_b, rank, rank, 1)
    gate_up = Product(x, w.gate_up, n_first, rows, low, w.up_bias, gather=True)
    launch_gate_up(gate_up, choice.activation, choice.layout, gu, h)
    low = None
    if w.down_a is not None and w.down_b is not None:
        rank = w.down_a.shape[1]
        z_down = x.new_empty((R, rank))
        launch_shrink("shrink-down", h, w.down_a, 1, I, choice.down_scaling, rows, False, z_down)
        low = LowRank(z_down, w.down_b, rank, rank, 1)
    if not keep:
        return Half(h, low, Kept(None, None, None, None))
    return Half(h, low, Kept(gu, h if z_down is not None or choice.trains_base else None, z_up, z_down))


def second_half(choice: Choice, w: Weights, half: Half, rows: Rows, H: int) -> Tensor:
    """``y [R, H]``, unweighted: the down product, of which a backward needs nothing."""
    y = half.h.new_empty((rows.count, H))
    n_first = choice.layout.order == "out_in"
    launch_product("down", Product(half.h, w.down, n_first, rows, half.low, w.down_bias), y)
    return y


def backward(
    choice: Choice, w: Weights, held: Held, rows: Rows, dout: Tensor, weights: Tensor | None, wants: Wants
) -> Gradients:
    """All gradients that are asked for. Each tensor of ``held`` goes as soon as its last reader has started.

    The down stack's gradients come before dh, which may so take the memory of h; those of gate_up before dx, beside
    which only dgu is then alive.

    Args:
        dout: gradient of tokens [T, H] (gathered with the rows' entries) or of rows [R, H].
        weights: routing weights of the entries, flat; ``None`` where rows carry none.
    """
    assert held.gu is not None
    R, H = rows.count, dout.shape[1]
    # Products of gradients run over a stack's other dim: stored [E, N, K] means depth first.
    I, n_first = w.widths(choice)[0], choice.layout.order == "in_out"
    t_down = t_up = low = None
    if w.down_a is not None and w.down_b is not None:
        rank = w.down_a.shape[1]
        t_down = dout.new_empty((R, rank))
        launch_shrink("shrink-dout", dout, w.down_b, rank, 1, choice.down_scaling, rows, True, t_down)
        low = LowRank(t_down, w.down_a, rank, 1, I)
    down_a, down_b = down_adapter_gradients(w, held, rows, dout, t_down, weights, wants)
    down = down_gradient(choice, w, held, rows, dout, weights) if wants.down else None
    held.z_down = None
    dh = held.rows_of_dh(dout, R, I)
    launch_product("dh", Product(dout, w.down, n_first, rows, low, gather=True), dh)
    dgu = held.rows_of_dgu()
    part = torch.empty(R, dtype=torch.float32, device=dout.device) if wants.weights else None
    biased = None if w.down_bias is None else BiasPart(dout, w.down_bias)
    launch_activation_bwd(dh, rows, choice.activation, choice.layout, held.gu, weights, dgu, part, biased)
    held.gu = None
    del dh, t_down
    low = None
    if w.up_a is not None and w.up_b is not None:
        rank = w.up_a.shape[1]
        t_up = dout.new_empty((R, rank))
        launch_shrink("shrink-dgu", dgu, w.up_b, rank, 1, choice.up_scaling, rows, False, t_up)
        low = LowRank(t_up, w.up_a, rank, 1, H)
    up_a, up_b = up_adapter_gradients(w, held, rows, dgu, t_up, wants)
    gate_up = gate_up_gradient(choice, w, held, rows, dgu) if wants.gate_up else None
    held.x = held.z_up = None
    dx = None
    if wants.x:
        dx = dout.new_empty((R, H))
        launch_product("dx", Product(dgu, w.gate_up, n_first, rows, low), dx)
    return Gradients(dx, part, up_a, up_b, down_a, down_b, gate_up, down)


class Factors(Protocol):
    """The adapters' factors of any kind of stacks."""

    @property
    def up_a(self) -> Tensor | None: ...
    @property
    def up_b(self) -> Tensor | None: ...
    @property
    def down_a(self) -> Tensor | None: ...
    @property
    def down_b(self) -> Tensor | None: ...


def down_adapter_gradients(
    w: Factors,
    held: Held,
    rows: Rows,
    dout: Tensor,
    t_down: Tensor | None,
    weights: Tensor | None,
    wants: Wants,
) -> tuple[Tensor | None, Tensor | None]:
    """Those of down_a and down_b; ``t_down``: dout taken to the rank."""
    if not wants.low or w.down_a is None or w.down_b is None:
        return None, None
    assert t_down is not None and held.z_down is not None and held.h is not None
    down_a, down_b = w.down_a.new_empty(w.down_a.shape), w.down_b.new_empty(w.down_b.shape)
    sides = Side(held.h, t_down, False, down_a), Side(dout, held.z_down, True, down_b)
    launch_adapter_grads("down", *sides, rows, weights)
    return down_a, down_b


def up_adapter_gradients(
    w: Factors, held: Held, rows: Rows, dgu: Tensor, t_up: Tensor | None, wants: Wants
) -> tuple[Tensor | None, Tensor | None]:
    """Those of up_a and up_b; ``t_up``: dgu, which holds its routing weights already, taken to the rank."""
    if not wants.up or w.up_a is None or w.up_b is None:
        return None, None
    assert t_up is not None and held.z_up is not None and held.x is not None
    up_a, up_b = w.up_a.new_empty(w.up_a.shape), w.up_b.new_empty(w.up_b.shape)
    sides = Side(held.x, t_up, True, up_a), Side(dgu, held.z_up, False, up_b)
    launch_adapter_grads("up", *sides, rows, None)
    return up_a, up_b


def down_gradient(choice: Choice, w: Weights, held: Held, rows: Rows, dout: Tensor, weights: Tensor | None) -> Tensor:
    """That of the down stack, as it is stored."""
    assert held.h is not None
    down = torch.empty_like(w.down)
    q, p = Operand(dout, gather=True, weighted=True), Operand(held.h)
    launch_stack_grad("down-grad", *((p, q) if choice.layout.order == "in_out" else (q, p)), rows, weights, down)
    return down


def gate_up_gradient(choice: Choice, w: Weights, held: Held, rows: Rows, dgu: Tensor) -> Tensor:
    """That of the gate_up stack, as it is stored; dgu holds its routing weights already."""
    assert held.x is not None
    gate_up = torch.empty_like(w.gate_up)
    q, p = Operand(dgu), Operand(held.x, gather=True)
    launch_stack_grad("gate_up-grad", *((p, q) if choice.layout.order == "in_out" else (q, p)), rows, None, gate_up)
    return gate_up
