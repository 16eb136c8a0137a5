"""Forward and backward of an expert MLP on sorted rows, out of the launches. No autograd, no guards.

The down product's routing weight is applied to rows of the gradient inside the backward kernel, so that the
whole layer (rows gathered from tokens) and the split operator (received rows) share this one file.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels.grouped_lora_mlp import launches
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.rows import LowRank, Rows


@dataclass(frozen=True)
class Choice:
    """What is fixed when the model is built."""

    activation: Activation
    layout: Layout
    up_scaling: float = 0.0
    down_scaling: float = 0.0


@dataclass(frozen=True)
class Weights:
    """Frozen stacks and the adapters' factors; ``None`` where a stack has no adapter."""

    gate_up: Tensor
    down: Tensor
    up_a: Tensor | None = None
    up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None


@dataclass(frozen=True)
class Kept:
    """What the backward needs: pre-activations [R, F], h [R, I] and the low-rank products (adapters only)."""

    gu: Tensor | None
    h: Tensor | None
    z_up: Tensor | None
    z_down: Tensor | None


@dataclass(frozen=True)
class Gradients:
    dx: Tensor | None
    """Rows [R, H], not yet summed to tokens."""
    part: Tensor | None
    """fp32 [R]: the gradient of each row's routing weight."""
    up_a: Tensor | None
    up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None


def forward(choice: Choice, w: Weights, x: Tensor, rows: Rows, keep: bool) -> tuple[Tensor, Kept]:
    """``y [R, H]`` (unweighted), and what a backward needs where ``keep``. ``x``: tokens or rows."""
    R, H = rows.count, x.shape[1]
    I = w.down.shape[1 if choice.layout.order == "in_out" else 2]
    F = (2 if choice.activation.gated else 1) * I
    gu = x.new_empty((R, F)) if keep else None
    h = x.new_empty((R, I))
    z_up = z_down = low = None
    if w.up_a is not None and w.up_b is not None:
        rank = w.up_a.shape[1]
        z_up = x.new_empty((R, rank))
        launches.launch_shrink("shrink-up", x, w.up_a, 1, H, choice.up_scaling, rows, True, z_up)
        low = LowRank(z_up, w.up_b, rank, rank, 1)
    launches.launch_gate_up(x, w.gate_up, rows, low, choice.activation, choice.layout, gu, h)
    low = None
    if w.down_a is not None and w.down_b is not None:
        rank = w.down_a.shape[1]
        z_down = x.new_empty((R, rank))
        launches.launch_shrink("shrink-down", h, w.down_a, 1, I, choice.down_scaling, rows, False, z_down)
        low = LowRank(z_down, w.down_b, rank, rank, 1)
    y = x.new_empty((R, H))
    launches.launch_product("down", h, w.down, choice.layout.order == "out_in", rows, low, y)
    if not keep:
        return y, Kept(None, None, None, None)
    return y, Kept(gu, h if z_down is not None else None, z_up, z_down)


def backward(
    choice: Choice,
    w: Weights,
    x: Tensor,
    rows: Rows,
    kept: Kept,
    dout: Tensor,
    weights: Tensor | None,
    *,
    wants_x: bool,
    wants_part: bool,
    wants_up: bool,
    wants_down: bool,
) -> Gradients:
    """All gradients that are asked for.

    Args:
        dout: gradient of tokens [T, H] (gathered with the rows' entries) or of rows [R, H].
        weights: routing weights of the entries, flat; ``None`` where rows carry none.
    """
    assert kept.gu is not None
    R, H = rows.count, x.shape[1]
    F = kept.gu.shape[1]
    I = F // (2 if choice.activation.gated else 1)
    t_down = low = None
    if w.down_a is not None and w.down_b is not None:
        rank = w.down_a.shape[1]
        t_down = x.new_empty((R, rank))
        launches.launch_shrink("shrink-dout", dout, w.down_b, rank, 1, choice.down_scaling, rows, True, t_down)
        low = LowRank(t_down, w.down_a, rank, 1, I)
    dh = x.new_empty((R, I))
    # The product runs over H: stored [E, H, I] means depth first.
    launches.launch_product("dh", dout, w.down, choice.layout.order == "in_out", rows, low, dh, gather=True)
    dgu = x.new_empty((R, F))
    part = torch.empty(R, dtype=torch.float32, device=x.device) if wants_part else None
    launches.launch_activation_bwd(dh, rows, choice.activation, choice.layout, kept.gu, weights, dgu, part)
    t_up = low = None
    if w.up_a is not None and w.up_b is not None:
        rank = w.up_a.shape[1]
        t_up = x.new_empty((R, rank))
        launches.launch_shrink("shrink-dgu", dgu, w.up_b, rank, 1, choice.up_scaling, rows, False, t_up)
        low = LowRank(t_up, w.up_a, rank, 1, H)
    dx = None
    if wants_x:
        dx = x.new_empty((R, H))
        launches.launch_product("dx", dgu, w.gate_up, choice.layout.order == "in_out", rows, low, dx)
    up_a = up_b = down_a = down_b = None
    if wants_up and w.up_a is not None and w.up_b is not None:
        assert t_up is not None and kept.z_up is not None
        rank = w.up_a.shape[1]
        up_a, up_b = w.up_a.new_empty(w.up_a.shape), w.up_b.new_empty(w.up_b.shape)
        launches.launch_adapter_grad("up_a", x, t_up, rows, True, None, up_a, 1, H)
        launches.launch_adapter_grad("up_b", dgu, kept.z_up, rows, False, None, up_b, rank, 1)
    if wants_down and w.down_a is not None and w.down_b is not None:
        assert t_down is not None and kept.z_down is not None and kept.h is not None
        rank = w.down_a.shape[1]
        down_a, down_b = w.down_a.new_empty(w.down_a.shape), w.down_b.new_empty(w.down_b.shape)
        launches.launch_adapter_grad("down_a", kept.h, t_down, rows, False, weights, down_a, 1, I)
        launches.launch_adapter_grad("down_b", dout, kept.z_down, rows, True, weights, down_b, rank, 1)
    return Gradients(dx, part, up_a, up_b, down_a, down_b)
