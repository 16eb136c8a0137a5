"""Forward and backward of packed expert MLPs on sorted rows, out of the launches. No autograd, no guards.

Few rows an expert: every product decodes its weights as it reads them. Many: the layer's two stacks are dequantised
to the workspace (at most one layer, see ``workspace``), and the ordinary grouped products run on it. What is kept
for the backward is the same either way.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from shardwright.kernels.grouped_lora_mlp import compute as dense
from shardwright.kernels.grouped_lora_mlp.launches import launch_product
from shardwright.kernels.grouped_lora_mlp.layer import Choice, Gradients, Held, Kept, Wants, Weights
from shardwright.kernels.grouped_lora_mlp.lora_launch import launch_shrink
from shardwright.kernels.grouped_lora_mlp.rows import LowRank, Product, Rows
from shardwright.kernels.packed_experts import configs, launches, lists, passes, series, workspace
from shardwright.kernels.packed_experts.copies_launch import launch_zero_tail
from shardwright.kernels.packed_experts.launches import PackedProduct
from shardwright.kernels.packed_experts.storage import PackedStack
from shardwright.kernels.permute.configs import TILE_ROWS
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

    @property
    def bare(self) -> bool:
        """Whether there is no adapter."""
        return self.up_a is None and self.down_a is None

    def biases(self) -> list[Tensor]:
        """Those that there are."""
        return [bias for bias in (self.up_bias, self.down_bias) if bias is not None]

    def bias_names(self) -> tuple[str | None, str | None]:
        """Names of the two biases; ``None`` where there is none."""
        return None if self.up_bias is None else "up_bias", None if self.down_bias is None else "down_bias"

    def copies(self, token: object | None = None) -> tuple[Tensor, Tensor]:
        """bf16 stacks: the workspace's."""
        return workspace.dequantised((self.gate_up, self.down), token)


def forward(
    choice: Choice,
    w: PackedWeights,
    x: Tensor,
    counts: Tensor,
    keep: bool,
    dequantise: bool,
    token: object | None = None,
) -> tuple[Tensor, Kept, Tiles]:
    """``y [R, H]``, what a backward needs where ``keep``, and the tile list; rows of no expert are zero."""
    run = _forward_of_copies if dequantise else _forward_in_loop
    return run(choice, w, x, counts, keep, _of(token, dequantise))


def backward(
    choice: Choice,
    w: PackedWeights,
    held: Held,
    tiles: Tiles,
    dy: Tensor,
    dequantise: bool,
    wants: Wants,
    token: object | None = None,
) -> Gradients:
    """Gradients of x (rows of no expert: zero) and of the adapters, where asked for.

    Biases are frozen, and what was kept holds them: no product here adds one. Tensors of ``held`` go as in the ordinary
    backward, but dgu is never written over gu where stacks are decoded in the loop: the kernel that makes it stores dh
    there before it reads gu.

    Args:
        tiles: the forward's, or ``tiles_of`` the same counts.
    """
    run = _backward_of_copies if dequantise else _backward_in_loop
    return run(choice, w, held, Rows(dy.shape[0], tiles, token=_of(token, dequantise)), dy, wants)


def tile_rows(R: int, experts: int, dequantise: bool) -> int:
    """Most rows of a tile."""
    return TILE_ROWS if dequantise else configs.pieces(R, experts).rows


def tiles_of(counts: Tensor, R: int, dequantise: bool, token: object | None = None) -> Tiles:
    """The tile list alone."""
    return make_tiles(counts, R, _of(token, dequantise), tile_rows(R, counts.shape[0], dequantise))


def _of(token: object | None, dequantise: bool) -> Hashable:
    """What launches are bound under: the same role is another launch on copies."""
    return None if token is None else (token, "dequantised") if dequantise else (token,)


def _forward_of_copies(
    choice: Choice, w: PackedWeights, x: Tensor, counts: Tensor, keep: bool, of: Hashable
) -> tuple[Tensor, Kept, Tiles]:
    (R, H), E, copies = x.shape, counts.shape[0], w.copies(of)
    if not keep:
        rows = Rows(R, make_tiles(counts, R, of), token=of)
        y, kept = dense.forward(choice, Weights(*copies, *w.beside()), x, rows, keep)
        launch_zero_tail("tail", y, rows.tiles, of)
        return y, kept, rows.tiles
    tiles, y = lists.empty(R, E, x.device, TILE_ROWS), x.new_empty((R, H))
    whole = of is not None and w.bare
    known = series.find((of, "forward")) if whole else None
    if known is not None:
        gu, h = x.new_empty((R, copies[0].shape[1])), x.new_empty((R, copies[1].shape[2]))
        if series.again(known, (x, counts, *copies, *tiles.parts, gu, h, y, *w.biases())):
            return y, Kept(gu, None, None, None), tiles
        del gu, h
    lists.launch_begin(counts, tiles, y, TILE_ROWS, of)
    rows, wide = Rows(R, tiles, token=of), Weights(*copies, *w.beside())
    half = dense.first_half(choice, wide, x, rows, keep)
    launch_product("down", Product(half.h, wide.down, True, rows, half.low, wide.down_bias), y)
    if whole:
        passes.keep_forward_of_copies(of, w.bias_names())
    return y, half.kept, tiles


def _backward_of_copies(
    choice: Choice, w: PackedWeights, held: Held, rows: Rows, dy: Tensor, wants: Wants
) -> Gradients:
    (R, H), of, tiles, gu = dy.shape, rows.token, rows.tiles, held.gu
    wide, narrow = w.copies(of)
    assert gu is not None
    whole = of is not None and w.bare and wants.x
    known = series.find((of, "dgu")) if whole else None
    if known is not None:
        parts = lists.parts_of(tiles)
        dh, dgu = held.rows_of_dh(dy, R, narrow.shape[2]), held.rows_of_dgu()
        if series.again(known, (dy, narrow, dh, gu, dgu, *parts)):
            held.gu = held.x = None
            del dh, gu
            dx = dy.new_empty((R, H))
            if not series.again(series.find((of, "dx")), (dgu, wide, dx, *parts)):
                launch_product("dx", Product(dgu, wide, False, rows), dx)
                launch_zero_tail("dx-tail", dx, tiles, of)
            return Gradients(dx, None)
        del dh, dgu
    del gu
    found = dense.backward(choice, Weights(wide, narrow, *w.beside()), held, rows, dy, None, wants)
    if found.dx is not None:
        launch_zero_tail("dx-tail", found.dx, tiles, of)
    if whole:
        passes.keep_backward_of_copies(of)
    return found


def _forward_in_loop(
    choice: Choice, w: PackedWeights, x: Tensor, counts: Tensor, keep: bool, of: Hashable
) -> tuple[Tensor, Kept, Tiles]:
    (R, H), E, I = x.shape, counts.shape[0], w.down.shape[2]
    gated, interleaved = choice.activation.gated, choice.layout.interleaved
    pieces = configs.pieces(R, E)
    tiles, y = lists.empty(R, E, x.device, pieces.rows), x.new_empty((R, H))
    gu = x.new_empty((R, (2 if gated else 1) * I)) if keep else None
    h = x.new_empty((R, I))
    whole = of is not None and w.bare
    known = series.find((of, "forward", keep)) if whole else None
    if known is not None:
        gate, up = launches.halves(w.gate_up.values, gated, interleaved)
        some = gate, up, *tiles.parts, gu, h, y, *w.biases()
        stacks = w.gate_up.scales, w.down.values, w.down.scales
        if series.again(known, [x, counts, *stacks, *(tensor for tensor in some if tensor is not None)]):
            return y, Kept(gu, None, None, None), tiles
    lists.launch_begin(counts, tiles, y, pieces.rows, of)
    rows = Rows(R, tiles, token=of)
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
    launches.launch_down(PackedProduct(h, w.down, rows, pieces, low, w.down_bias), y)
    if whole:
        passes.keep_forward_in_loop(of, keep, gated, w.bias_names())
    if not keep:
        return y, Kept(None, None, None, None), tiles
    return y, Kept(gu, h if z_down is not None else None, z_up, z_down), tiles


def _backward_in_loop(choice: Choice, w: PackedWeights, held: Held, rows: Rows, dy: Tensor, wants: Wants) -> Gradients:
    assert held.gu is not None
    (R, H), of, tiles = dy.shape, rows.token, rows.tiles
    pieces = configs.pieces(R, tiles.experts)
    F, I, interleaved = held.gu.shape[1], w.down.shape[2], choice.layout.interleaved
    whole = of is not None and w.bare and wants.x
    t_down = t_up = low = None
    if w.down_a is not None and w.down_b is not None:
        rank = w.down_a.shape[1]
        t_down = dy.new_empty((R, rank))
        launch_shrink("shrink-dout", dy, w.down_b, rank, 1, choice.down_scaling, rows, False, t_down)
        low = LowRank(t_down, w.down_a, rank, 1, I)
    down_a, down_b = dense.down_adapter_gradients(w, held, rows, dy, t_down, None, wants)
    held.h = held.z_down = None
    dgu = dy.new_empty((R, F))
    stack = w.down.values, w.down.scales
    known = series.find((of, "dgu")) if whole else None
    if known is None or not series.again(known, (dy, *stack, held.gu, dgu, *tiles.lists(), tiles.count)):
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
    if not wants.x:
        return Gradients(None, None, up_a, up_b, down_a, down_b)
    dx, stack = dy.new_empty((R, H)), (w.gate_up.values, w.gate_up.scales)
    known = series.find((of, "dx")) if whole else None
    if known is None or not series.again(known, (dgu, *stack, dx, *lists.parts_of(tiles))):
        launches.launch_dx(PackedProduct(dgu, w.gate_up, rows, pieces, low), dx)
        launch_zero_tail("dx-tail", dx, tiles, of)
        if whole:
            passes.keep_backward_in_loop(of)
    return Gradients(dx, None, up_a, up_b, down_a, down_b)
