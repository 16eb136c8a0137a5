"""When the Hopper product is used, and how it is started.

Legend: R rows, E experts, H hidden, I expert width, F = 2I, r rank, N columns, K depth.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shardwright.kernels import device
from shardwright.kernels.bound import Tensors, start
from shardwright.kernels.grouped_lora_mlp import configs
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.hopper import (
    CONSUMER_REGISTERS,
    DEPTH,
    ROWS,
    RUN,
    STAGES,
    hopper_product_kernel,
)
from shardwright.kernels.grouped_lora_mlp.rows import Product

RANKS = (16, 32, 64)
"""Ranks whose B fits beside three steps in shared memory and is a whole matrix step."""


def serves(product: Product) -> bool:
    """Whether the Hopper product computes this call, and is the faster one for its rows.

    The stack must be one dense [E · rows, columns] matrix, and the depth whole steps: a two-dimensional tensor
    copy knows no bounds inside it.
    """
    x, w, _, rows, low, _, _ = product
    return (
        device.capability(x) == (9, 0)
        and x.element_size() == 2
        and x.shape[1] % DEPTH == 0
        and w.is_contiguous()
        and (low is None or (low.rank in RANKS and low.z.is_contiguous()))
        and configs.way(rows.count, rows.tiles.experts).hopper
    )


@cache
def _layout(block: tuple[int, int]) -> gl.NVMMASharedLayout:
    """How a block of 16-bit values lies in shared memory; kept, since it takes the host longer than a launch."""
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)


def _describe(tensor: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """A dense tensor as a matrix of its last dim, in blocks."""
    width = tensor.shape[-1]
    return TensorDescriptor(tensor, [tensor.numel() // width, width], [width, 1], list(block), _layout(block))


def launch_product(key: Hashable, tensors: Tensors, product: Product, y: Tensor) -> None:
    """Fill ``y [R, N]``; see ``launches.launch_product``."""
    fixed = {"FUSE": False, "HALVES": False, "SAVE": True, "KIND": "none", "P0": 0.0, "P1": 0.0, "P2": 0.0}
    _launch(key, tensors, product, y, y, (y.shape[1], y.shape[1]), fixed)


def launch_gate_up(
    key: Hashable,
    tensors: Tensors,
    product: Product,
    activation: Activation,
    layout: Layout,
    gu: Tensor | None,
    h: Tensor,
) -> None:
    """Fill ``h [R, I]`` and, where given, ``gu [R, F]``; see ``launches.launch_gate_up``. Gated kinds only."""
    P0, P1, P2 = activation.parameters
    fixed: dict[str, Any] = {
        "FUSE": True,
        "HALVES": not layout.interleaved,
        "SAVE": gu is not None,
        "KIND": activation.kind,
    }
    fixed |= {"P0": P0, "P1": P1, "P2": P2}
    _launch(key, tensors, product, h if gu is None else gu, h, (2 * h.shape[1], h.shape[1]), fixed)


def _launch(
    key: Hashable,
    tensors: Tensors,
    product: Product,
    y: Tensor,
    h: Tensor,
    widths: tuple[int, int],
    fixed: dict[str, Any],
) -> None:
    """``widths``: columns of y, and those of h."""
    x, w, n_first, rows, low, bias, _ = product
    x_desc = _describe(x, (ROWS, DEPTH))
    b_desc, b_n_first = x_desc, True
    if low is not None:
        b_n_first = low.stride_r == 1 and low.stride_n == low.rank
        b_desc = _describe(low.b, (RUN, low.rank) if b_n_first else (low.rank, RUN))
    programs = device.multiprocessors(x)
    with device.current(x):
        start(
            key,
            tensors,
            hopper_product_kernel,
            (programs,),
            x_desc,
            x,
            _describe(w, (RUN, DEPTH) if n_first else (DEPTH, RUN)),
            b_desc,
            y,
            h,
            y if low is None else low.z,
            y if bias is None else bias,
            rows.entry if product.gathered else rows.tiles.offsets,
            *rows.tiles.lists(),
            rows.tiles.count,
            *widths,
            x.shape[1],
            rows.slots,
            w.shape[1],
            1 if low is None else low.b.shape[1],
            STAGES=STAGES,
            GROUP=configs.group(rows.count, rows.tiles.experts),
            PROGRAMS=programs,
            REGISTERS=CONSUMER_REGISTERS,
            GATHER=product.gathered,
            N_FIRST=n_first,
            LORA=low is not None,
            BIAS=bias is not None,
            B_N_FIRST=b_n_first,
            RANK=16 if low is None else low.rank,
            num_warps=4,
            **fixed,
        )
