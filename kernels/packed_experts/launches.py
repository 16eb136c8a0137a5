"""Starts of the packed products: descriptors, grids, configurations. Nothing here waits for the device.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank, N out and K in of a stack.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shardwright.kernels import device
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.grouped_lora_mlp.contract import Activation
from shardwright.kernels.grouped_lora_mlp.rows import LowRank, Rows
from shardwright.kernels.packed_experts import configs
from shardwright.kernels.packed_experts.backward_triton import packed_activation_bwd_kernel, packed_dx_kernel
from shardwright.kernels.packed_experts.configs import Pieces, Tile
from shardwright.kernels.packed_experts.storage import PackedStack
from shardwright.kernels.packed_experts.triton import packed_gate_up_kernel, packed_rows_kernel


class PackedProduct(NamedTuple):
    """One product of rows with a packed stack ``(+ z B) (+ bias)``: all that a launch reads."""

    x: Tensor
    w: PackedStack
    rows: Rows
    pieces: Pieces
    low: LowRank | None = None
    bias: Tensor | None = None
    """[E, N]; products along the packed dim add it."""

    def tensors(self, *more: Tensor | None) -> tuple[Tensor | None, ...]:
        """Every tensor of a launch but for the stack's values, which may go by views; ``more``: what it fills."""
        z, b = (None, None) if self.low is None else (self.low.z, self.low.b)
        tiles = self.rows.tiles
        return (self.x, self.w.scales, *more, z, b, *tiles.lists(), tiles.count, self.bias)

    def row_tiles(self, BK: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """The rows in both pieces of a tile."""
        x, sizes = self.x, (self.pieces.BA, self.pieces.BB or self.pieces.BA)
        a, b = (TensorDescriptor(x, list(x.shape), list(x.stride()), [n, BK]) for n in sizes)
        return a, b

    def after(self, any_tensor: Tensor) -> tuple[Tensor, ...]:
        """The kernels' arguments after what they fill: low rank (``any_tensor`` where there is none) and tiles."""
        low = (any_tensor, any_tensor) if self.low is None else (self.low.z, self.low.b)
        return (*low, *self.rows.tiles.lists(), self.rows.tiles.count)

    def fixed(self, at: Tile) -> dict[str, Any]:
        """The compile-time choices that all four kernels share."""
        rank = None if self.low is None else self.low.rank
        return {
            "RANK": rank or 1,
            "RP": 16 if rank is None else configs.rank_columns(rank),
            "LORA": rank is not None,
            "BA": self.pieces.BA,
            "BB": self.pieces.BB,
            "BN": at.BN,
            "GROUP": at.group,
            "MX": self.w.kind == "mxfp4",
            "ASM": not device.interpreted(),
            "num_warps": at.warps,
            "num_stages": at.stages,
        }


def _stack(values: Tensor, BN: int, depth: int) -> TensorDescriptor:
    return TensorDescriptor(values, list(values.shape), list(values.stride()), [1, BN, depth])


def _bytes(stack: PackedStack, columns: int) -> int:
    """Stored elements of ``columns`` weights along the packed dim."""
    return columns // 2 if stack.kind == "mxfp4" else columns


def halves(values: Tensor, gated: bool, interleaved: bool) -> tuple[Tensor, Tensor | None]:
    """Gate and up rows of a stack's values, as views; without a gate all rows and none."""
    if not gated:
        return values, None
    gate, up = values.unflatten(1, (-1, 2)).unbind(2) if interleaved else values.chunk(2, 1)
    return gate, up


def _activated(activation: Activation, interleaved: bool) -> dict[str, Any]:
    """The compile-time choices of kernels that hold the activation."""
    P0, P1, P2 = activation.parameters
    named = {"KIND": activation.kind, "P0": P0, "P1": P1, "P2": P2, "GATED": activation.gated}
    return {"STEP": 2 if interleaved else 1, **named}


def launch_gate_up(
    product: PackedProduct, interleaved: bool, activation: Activation, gu: Tensor | None, h: Tensor
) -> None:
    """Fill ``h [R, I]`` and, where given, the pre-activations ``gu [R, F]``."""
    x, w, rows = product.x, product.w, product.rows
    if rows.tiles.most == 0:
        return
    H, I, at = x.shape[1], h.shape[1], configs.GATE_UP
    gate, up = halves(w.values, activation.gated, interleaved)
    tensors, key = product.tensors(gate, up, gu, h), key_of(rows.token, "gate_up", gu is None)
    if again(key, tensors):
        return
    gate_desc = _stack(gate, at.BN, _bytes(w, 64))
    with device.current(x):
        start(
            key,
            tensors,
            packed_gate_up_kernel,
            (rows.tiles.most * -(-I // at.BN),),
            *product.row_tiles(64),
            gate_desc,
            gate_desc if up is None else _stack(up, at.BN, _bytes(w, 64)),
            w.scales,
            h if gu is None else gu,
            h,
            *product.after(h),
            h if product.bias is None else product.bias,
            H=H,
            I=I,
            F=(2 if activation.gated else 1) * I,
            SAVE=gu is not None,
            BIAS=product.bias is not None,
            **_activated(activation, interleaved),
            **product.fixed(at),
        )


def launch_down(product: PackedProduct, y: Tensor) -> None:
    """Fill ``y [R, N] = x [R, K] Wᵀ (+ z Bᵀ) (+ bias)``; ``low.b`` is [E, N, r]."""
    x, w, rows = product.x, product.w, product.rows
    if rows.tiles.most == 0:
        return
    tensors, key = product.tensors(w.values, y), key_of(rows.token, "down")
    if again(key, tensors):
        return
    N, K, at = y.shape[1], x.shape[1], configs.ALONG
    with device.current(x):
        start(
            key,
            tensors,
            packed_rows_kernel,
            (rows.tiles.most * -(-N // at.BN),),
            *product.row_tiles(64),
            _stack(w.values, at.BN, _bytes(w, 64)),
            w.scales,
            y,
            *product.after(y),
            y if product.bias is None else product.bias,
            N=N,
            K=K,
            BIAS=product.bias is not None,
            **product.fixed(at),
        )


def launch_activation_bwd(
    product: PackedProduct, interleaved: bool, activation: Activation, gu: Tensor, dgu: Tensor
) -> None:
    """Fill ``dgu [R, F]`` from x = ``dy [R, H]``; ``low.b`` is the down adapter's a, [E, r, I]."""
    x, w, rows = product.x, product.w, product.rows
    if rows.tiles.most == 0:
        return
    tensors, key = product.tensors(w.values, gu, dgu), key_of(rows.token, "activation-bwd")
    if again(key, tensors):
        return
    H, F, at = x.shape[1], gu.shape[1], configs.ACTIVATION_BWD
    I = F // (2 if activation.gated else 1)
    with device.current(x):
        start(
            key,
            tensors,
            packed_activation_bwd_kernel,
            (rows.tiles.most * -(-I // at.BN),),
            *product.row_tiles(at.BK),
            _stack(w.values, at.BK, at.BN // 2),
            w.scales,
            gu,
            dgu,
            *product.after(dgu),
            H=H,
            I=I,
            F=F,
            BK=at.BK,
            STRIP=configs.STRIP_ROWS,
            **_activated(activation, interleaved),
            **product.fixed(at),
        )


def launch_dx(product: PackedProduct, dx: Tensor) -> None:
    """Fill ``dx [R, H] = dgu [R, F] W (+ t A)`` from x = dgu; ``low.b`` is the up adapter's a, [E, r, H]."""
    x, w, rows = product.x, product.w, product.rows
    if rows.tiles.most == 0:
        return
    tensors, key = product.tensors(w.values, dx), key_of(rows.token, "dx")
    if again(key, tensors):
        return
    N, K, at = dx.shape[1], x.shape[1], configs.ACROSS
    with device.current(x):
        start(
            key,
            tensors,
            packed_dx_kernel,
            (rows.tiles.most * -(-N // at.BN),),
            *product.row_tiles(at.BK),
            _stack(w.values, at.BK, at.BN // 2),
            w.scales,
            dx,
            *product.after(dx),
            N=N,
            K=K,
            BK=at.BK,
            **product.fixed(at),
        )
