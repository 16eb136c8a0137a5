"""Starts of the grouped products: which kernel, grids and configurations. Nothing here waits for the device.

``role`` names a launch inside its layer: with the rows' token it decides everything but addresses.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank, N columns, K depth.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shardwright.kernels import device
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.grouped_lora_mlp import configs, hopper_launch
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.elementwise import zero_tail_kernel
from shardwright.kernels.grouped_lora_mlp.elementwise_launch import launch_activation
from shardwright.kernels.grouped_lora_mlp.rows import Product, Rows
from shardwright.kernels.grouped_lora_mlp.triton import product_kernel


def launch_product(role: str, product: Product, y: Tensor) -> None:
    """Fill ``y [R, N]``."""
    x, w, n_first, rows, low, bias, _ = product
    if rows.tiles.most == 0:
        return
    tensors, key = product.tensors(y, None), key_of(rows.token, role)
    if again(key, tensors):
        return
    if hopper_launch.serves(product):
        hopper_launch.launch_product(key, tensors, product, y)
        return
    N, K = y.shape[1], x.shape[1]
    at = configs.product(x.element_size(), rows.count, rows.tiles.experts)
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
            rows.entry if product.gathered else rows.tiles.offsets,
            y if low is None else low.z,
            y if low is None else low.b,
            y if bias is None else bias,
            *rows.tiles.lists(),
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
            GATHER=product.gathered,
            EVEN=K % at.BK == 0,
            N_FIRST=n_first,
            LORA=low is not None,
            BIAS=bias is not None,
            RP=16 if low is None else configs.rank_columns(low.rank),
            num_warps=at.warps,
            num_stages=at.stages,
        )


def launch_gate_up(product: Product, activation: Activation, layout: Layout, gu: Tensor | None, h: Tensor) -> None:
    """Fill ``h [R, I]`` and, where given, the pre-activations ``gu [R, F]``, from rows or gathered tokens."""
    x, rows = product.x, product.rows
    if rows.tiles.most == 0:
        return
    if activation.gated and hopper_launch.serves(product):
        tensors = product.tensors(h if gu is None else gu, None if gu is None else h)
        key = key_of(rows.token, "gate_up", gu is not None)
        if not again(key, tensors):
            hopper_launch.launch_gate_up(key, tensors, product, activation, layout, gu, h)
        return
    F = (2 if activation.gated else 1) * h.shape[1]
    wide = x.new_empty((rows.count, F)) if gu is None else gu
    launch_product("wide", product, wide)
    launch_activation(wide, rows, activation, layout, h)


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
