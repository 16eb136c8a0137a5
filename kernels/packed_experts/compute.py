"""Forward and backward of packed expert MLPs on sorted rows, out of the launches. No autograd, no guards.

Few rows an expert: every product decodes its weights as it reads them. Many: the layer's two stacks are dequantised
to the workspace (at most one layer, see ``workspace``), and the ordinary grouped products run on it. What is kept
for the backward is the same either way.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardwright.kernels.grouped_lora_mlp import compute as dense
from shardwright.kernels.grouped_lora_mlp.layer import Choice, Gradients, Held, Kept, Wants, Weights
from shardwright.kernels.grouped_lora_mlp.lora_launch import launch_shrink
from shardwright.kernels.grouped_lora_mlp.rows import LowRank, Rows
from shardwright.kernels.packed_experts import configs, launches, workspace
from shardwright.kernels.packed_experts.launches import PackedProduct
from shardwright.kernels.packed_experts.storage import PackedStack
from shardwright.kernels.permute.tiles import Tiles, make_tiles


@dataclass(frozen=True)
class PackedWeights:
    """Packed stacks, the adapters' factors and the biases; ``None`` where a stack has none."""

    gate_up: PackedStack
    down: PackedStack
    up_a: Tensor | None = None
    up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None
    up_bias: Tensor | None = None
    """``[E, F]`` in the stack's own row order; frozen."""
    down_bias: Tensor | None = None
    """``[E, H]``; frozen."""

    def stacks(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values and scales of both stacks."""
        return self.gate_up.values, self.gate_up.scales, self.down.values, self.down.scales

    def beside(self) -> tuple[Tensor | None, ...]:
        """What goes with the stacks, in the order of the fields: four factors, two biases."""
        return self.up_a, self.up_b, self.down_a, self.down_b, self.up_bias, self.down_bias

    def dequantised(self) -> Weights:
        """The same with bf16 stacks: the workspace's."""
        return Weights(*workspace.dequantised((self.gate_up, self.down)), *self.beside())


def forward(
    choice: Choice,
    w: PackedWeights,
    x: Tensor,
    counts: Tensor,
    keep: bool,
    dequantise: bool,
    token: object | None = None,
) -> tuple[Tensor, Kept, Tiles]:
    """``y [R, H]``, what a backward needs where ``keep``, and the tile list (its offsets end the rows in use)."""
    R, H = x.shape
    if dequantise:
        of = None if token is None else (token, "dequantised")
        rows = Rows(R, make_tiles(counts, R, of), token=of)
        y, kept = dense.forward(choice, w.dequantised(), x, rows, keep)
        return y, kept, rows.tiles
    pieces = configs.pieces(R, counts.shape[0])
    rows = launches.make_rows(counts, R, pieces.rows, token)
    I, interleaved = w.down.shape[2], choice.layout.interleaved
    gu = x.new_empty((R, (2 if choice.activation.gated else 1) * I)) if keep else None
    h = x.new_empty((R, I))
    z_up = z_down = low = None
    if w.up_a is not None and w.up_b is not None:
        rank = w.up_a.shape[1]
        z_up = x.new_empty((R, rank))
        launch_shrink("shrink-up", x, w.up_a, 1, H, choice.up_scaling, rows, False, z_up)
        low = LowRank(z_up, w.up_b, rank, rank, 1)
    gate_up = PackedProduct(x, w.gate_up, rows, pieces, low, w.up_bias)
    launches.launch_gate_up(gate_up, interleaved, choice.activation, gu, h)
    low = None
    if w.down_a is not None and w.down_b is not None:
        rank = w.down_a.shape[1]
        z_down = x.new_empty((R, rank))
        launch_shrink("shrink-down", h, w.down_a, 1, I, choice.down_scaling, rows, False, z_down)
        low = LowRank(z_down, w.down_b, rank, rank, 1)
    y = x.new_empty((R, H))
    launches.launch_down(PackedProduct(h, w.down, rows, pieces, low, w.down_bias), y)
    if not keep:
        return y, Kept(None, None, None, None), rows.tiles
    return y, Kept(gu, h if z_down is not None else None, z_up, z_down), rows.tiles


def backward(
    choice: Choice,
    w: PackedWeights,
    held: Held,
    counts: Tensor,
    dy: Tensor,
    dequantise: bool,
    wants: Wants,
    token: object | None = None,
) -> tuple[Gradients, Tiles]:
    """Gradients of x and of the adapters, where asked for; and the tile list.

    Biases are frozen, and what was kept holds them: no product here adds one. Tensors of ``held`` go as in the ordinary
    backward, but dgu is never written over gu: the kernel that makes it stores dh there before it reads gu.
    """
    R, H = dy.shape
    if dequantise:
        of = None if token is None else (token, "dequantised")
        rows = Rows(R, make_tiles(counts, R, of), token=of)
        return dense.backward(choice, w.dequantised(), held, rows, dy, None, wants), rows.tiles
    assert held.gu is not None
    pieces = configs.pieces(R, counts.shape[0])
    rows = launches.make_rows(counts, R, pieces.rows, token)
    F, I, interleaved = held.gu.shape[1], w.down.shape[2], choice.layout.interleaved
    t_down = t_up = low = None
    if w.down_a is not None and w.down_b is not None:
        rank = w.down_a.shape[1]
        t_down = dy.new_empty((R, rank))
        launch_shrink("shrink-dout", dy, w.down_b, rank, 1, choice.down_scaling, rows, False, t_down)
        low = LowRank(t_down, w.down_a, rank, 1, I)
    down_a, down_b = dense.down_adapter_gradients(w, held, rows, dy, t_down, None, wants)
    held.h = held.z_down = None
    dgu = dy.new_empty((R, F))
    down = PackedProduct(dy, w.down, rows, pieces, low)
    launches.launch_activation_bwd(down, interleaved, choice.activation, held.gu, dgu)
    held.gu = None
    low = None
    if w.up_a is not None and w.up_b is not None:
        rank = w.up_a.shape[1]
        t_up = dy.new_empty((R, rank))
        launch_shrink("shrink-dgu", dgu, w.up_b, rank, 1, choice.up_scaling, rows, False, t_up)
        low = LowRank(t_up, w.up_a, rank, 1, H)
    up_a, up_b = dense.up_adapter_gradients(w, held, rows, dgu, t_up, wants)
    held.x = held.z_up = None
    dx = None
    if wants.x:
        dx = dy.new_empty((R, H))
        launches.launch_dx(PackedProduct(dgu, w.gate_up, rows, pieces, low), dx)
    return Gradients(dx, None, up_a, up_b, down_a, down_b), rows.tiles
