"""Starts of the grouped kernels: grids and configurations. Nothing here waits for the device.

``role`` names a launch inside its layer: with the rows' token it decides everything but addresses.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank, K slots a token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shardwright.kernels import device
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.grouped_lora_mlp import configs, hopper_launch
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.elementwise import (
    activation_bwd_kernel,
    activation_kernel,
    zero_tail_kernel,
)
from shardwright.kernels.grouped_lora_mlp.lora_triton import adapter_grad_kernel, shrink_kernel
from shardwright.kernels.grouped_lora_mlp.rows import LowRank, Rows
from shardwright.kernels.grouped_lora_mlp.triton import product_kernel
from shardwright.kernels.permute.configs import TILE_ROWS


def launch_product(
    role: str, x: Tensor, w: Tensor, n_first: bool, rows: Rows, low: LowRank | None, y: Tensor, gather: bool = False
) -> None:
    """Fill ``y [R, N]`` from ``x`` (rows, or with ``gather`` tokens) and ``w`` [E, N, K] (``n_first``) or [E, K, N]."""
    if rows.tiles.most == 0:
        return
    gathered = gather and rows.entry is not None
    tensors, key = product_tensors(x, w, rows, low, y, None), key_of(rows.token, role)
    if again(key, tensors):
        return
    if hopper_launch.serves(x, w, rows, low):
        hopper_launch.launch_product(key, tensors, x, w, n_first, rows, low, y, gathered)
        return
    N, K = y.shape[1], x.shape[1]
    at = configs.product(x.element_size(), rows.count, rows.tiles.experts)
    expert, first, last = rows.tiles.lists()
    pieces = (TensorDescriptor(x, list(x.shape), list(x.stride()), [n, at.BK]) for n in (128, 64, 32))
    block = [1, at.BN, at.BK] if n_first else [1, at.BK, at.BN]
    with device.current(x):
        start(
            key,
            tensors,
            product_kernel,
            (rows.tiles.most * -(-N // at.BN),),
            x,
            *pieces,
            TensorDescriptor(w, list(w.shape), list(w.stride()), block),
            y,
            rows.entry if gathered else rows.tiles.offsets,
            y if low is None else low.z,
            y if low is None else low.b,
            expert,
            first,
            last,
            rows.tiles.count,
            N,
            K,
            1 if low is None else low.rank,
            rows.slots,
            1 if low is None else low.stride_n,
            1 if low is None else low.stride_r,
            BN=at.BN,
            BK=at.BK,
            INNER=configs.inner_steps(x.element_size(), at.BK),
            GROUP=at.group,
            GATHER=gathered,
            EVEN=K % at.BK == 0,
            N_FIRST=n_first,
            LORA=low is not None,
            RP=16 if low is None else configs.rank_columns(low.rank),
            num_warps=at.warps,
            num_stages=at.stages,
        )


def product_tensors(
    x: Tensor, w: Tensor, rows: Rows, low: LowRank | None, y: Tensor, h: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Every tensor of one product's launch."""
    z, b = (None, None) if low is None else (low.z, low.b)
    return x, w, y, h, z, b, rows.entry, rows.tiles.offsets, *rows.tiles.lists(), rows.tiles.count


def launch_gate_up(
    x: Tensor,
    gate_up: Tensor,
    rows: Rows,
    low: LowRank | None,
    activation: Activation,
    layout: Layout,
    gu: Tensor | None,
    h: Tensor,
) -> None:
    """Fill ``h [R, I]`` and, where given, the pre-activations ``gu [R, F]``, from rows or gathered tokens."""
    if rows.tiles.most == 0:
        return
    gathered, n_first, saves = rows.entry is not None, layout.order == "out_in", gu is not None
    if activation.gated and hopper_launch.serves(x, gate_up, rows, low):
        tensors = product_tensors(x, gate_up, rows, low, h if gu is None else gu, None if gu is None else h)
        key = key_of(rows.token, "gate_up", saves)
        if not again(key, tensors):
            hopper_launch.launch_gate_up(
                key, tensors, x, gate_up, n_first, rows, low, activation, layout, gu, h, gathered
            )
        return
    F = (2 if activation.gated else 1) * h.shape[1]
    wide = x.new_empty((rows.count, F)) if gu is None else gu
    launch_product("wide", x, gate_up, n_first, rows, low, wide, gather=True)
    launch_activation(wide, rows, activation, layout, h)


def launch_activation(gu: Tensor, rows: Rows, activation: Activation, layout: Layout, h: Tensor) -> None:
    """Fill ``h [R, I] = act(gu [R, F])``."""
    _, first, last = rows.tiles.lists()
    tensors, key = (gu, h, first, last, rows.tiles.count), key_of(rows.token, "activation")
    if again(key, tensors):
        return
    P0, P1, P2 = activation.parameters
    at = configs.ACTIVATION
    with device.current(gu):
        start(
            key,
            tensors,
            activation_kernel,
            (rows.tiles.most, -(-TILE_ROWS // at.rows)),
            gu,
            h,
            first,
            last,
            rows.tiles.count,
            h.shape[1],
            gu.shape[1],
            STEP=2 if layout.interleaved else 1,
            KIND=activation.kind,
            P0=P0,
            P1=P1,
            P2=P2,
            GATED=activation.gated,
            BR=at.rows,
            BN=at.columns,
            num_warps=at.warps,
            num_stages=at.stages,
        )


def launch_activation_bwd(
    dh: Tensor,
    rows: Rows,
    activation: Activation,
    layout: Layout,
    gu: Tensor,
    weights: Tensor | None,
    dgu: Tensor,
    part: Tensor | None,
) -> None:
    """Fill ``dgu [R, F]`` from ``dh [R, I]`` and, where given, ``part [R]`` (fp32)."""
    if rows.tiles.most == 0:
        return
    _, first, last = rows.tiles.lists()
    tensors = (dh, gu, dgu, part, weights, rows.tiles.offsets, rows.entry, first, last, rows.tiles.count)
    key = key_of(rows.token, "activation-bwd", part is None, weights is None)
    if again(key, tensors):
        return
    P0, P1, P2 = activation.parameters
    at = configs.ACTIVATION
    with device.current(dh):
        start(
            key,
            tensors,
            activation_bwd_kernel,
            (rows.tiles.most, -(-TILE_ROWS // at.rows)),
            dh,
            gu,
            dgu,
            dgu if part is None else part,
            dgu if weights is None else weights,
            rows.tiles.offsets if rows.entry is None else rows.entry,
            first,
            last,
            rows.tiles.count,
            dh.shape[1],
            gu.shape[1],
            STEP=2 if layout.interleaved else 1,
            KIND=activation.kind,
            P0=P0,
            P1=P1,
            P2=P2,
            GATED=activation.gated,
            WEIGHTED=weights is not None,
            PARTS=part is not None,
            BR=at.rows,
            BN=at.columns,
            num_warps=at.warps,
            num_stages=at.stages,
        )


def launch_shrink(
    role: str, x: Tensor, a: Tensor, stride_n: int, stride_r: int, scaling: float, rows: Rows, gather: bool, z: Tensor
) -> None:
    """Fill ``z [R, r] = scaling · x A``; ``a`` is [E, N, r] in the given strides, x tokens (gather) or rows."""
    if rows.tiles.most == 0:
        return
    expert, first, last = rows.tiles.lists()
    tensors = (x, a, z, rows.entry, rows.tiles.offsets, expert, first, last, rows.tiles.count)
    key = key_of(rows.token, role)
    if again(key, tensors):
        return
    gathered = gather and rows.entry is not None
    at = configs.shrink(rows.count, rows.tiles.experts, gathered)
    with device.current(x):
        start(
            key,
            tensors,
            shrink_kernel,
            (rows.tiles.most, -(-TILE_ROWS // at.rows)),
            x,
            a,
            z,
            rows.entry if gathered else rows.tiles.offsets,
            expert,
            first,
            last,
            rows.tiles.count,
            scaling,
            x.shape[1],
            z.shape[1],
            rows.slots,
            stride_n,
            stride_r,
            GATHER=gathered,
            INNER=configs.inner_steps(x.element_size(), at.columns),
            BR=at.rows,
            BN=at.columns,
            RP=configs.rank_columns(z.shape[1]),
            num_warps=at.warps,
            num_stages=at.stages,
        )


def launch_adapter_grad(
    role: str,
    q: Tensor,
    p: Tensor,
    rows: Rows,
    gather: bool,
    weights: Tensor | None,
    out: Tensor,
    stride_n: int,
    stride_r: int,
) -> None:
    """Fill ``out`` ([E, N, r] in the given strides) with each expert's ``Σ q[row]ᵀ p[row]``."""
    tensors = (q, p, out, rows.tiles.offsets, rows.entry, weights)
    key = key_of(rows.token, role, weights is None)
    if again(key, tensors):
        return
    N, r = q.shape[1], p.shape[1]
    gathered = gather and rows.entry is not None
    at = configs.ADAPTER_GRAD
    with device.current(q):
        start(
            key,
            tensors,
            adapter_grad_kernel,
            (-(-N // at.columns), rows.tiles.experts),
            q,
            p,
            out,
            rows.tiles.offsets if rows.entry is None else rows.entry,
            p if weights is None else weights,
            rows.tiles.offsets,
            N,
            r,
            rows.slots,
            stride_n,
            stride_r,
            GATHER=gathered,
            WEIGHTED=weights is not None,
            INNER=configs.inner_steps(q.element_size(), at.rows),
            BR=at.rows,
            BN=at.columns,
            RP=configs.rank_columns(r),
            num_warps=at.warps,
            num_stages=at.stages,
        )


def launch_zero_tail(role: str, y: Tensor, rows: Rows) -> None:
    """Rows of ``y [R, H]`` that belong to no expert hold zeros, never what memory held before."""
    if y.shape[0] == 0:
        return
    words = y.view(torch.int32)
    tensors, key = (words, rows.tiles.offsets), key_of(rows.token, role)
    if again(key, tensors):
        return
    with device.current(y):
        start(
            key,
            tensors,
            zero_tail_kernel,
            (device.multiprocessors(y),),
            words,
            rows.tiles.offsets,
            y.shape[0],
            rows.tiles.experts,
            words.shape[1],
            BLOCK=configs.ZERO_WORDS,
            num_warps=configs.ZERO_WARPS,
        )
