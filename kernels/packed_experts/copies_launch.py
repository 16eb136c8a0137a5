"""Starts of a packed stack's copy and of the zeros for rows of no expert.

Legend: R rows, E experts, H hidden, N out and K in of a stack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.packed_experts import configs
from shardwright.kernels.packed_experts.copies_triton import dequantise_kernel, zero_tail_kernel
from shardwright.kernels.packed_experts.storage import PackedStack
from shardwright.kernels.permute.tiles import Tiles


def dequantise(w: PackedStack) -> Tensor:
    """The bf16 weight [E, N, K] of a stack, in fresh memory."""
    E, N, K = w.shape
    out = torch.empty((E, N, K), dtype=torch.bfloat16, device=w.values.device)
    columns, rows = 64 * configs.DEQUANTISE_BLOCKS, configs.DEQUANTISE_ROWS_A_PROGRAM
    with device.current(out):
        dequantise_kernel[(-(-K // columns), -(-N // rows), E)](
            w.values,
            w.scales,
            out,
            N=N,
            K=K,
            BLOCKS=configs.DEQUANTISE_BLOCKS,
            BN=rows,
            MX=w.kind == "mxfp4",
            ASM=not device.interpreted(),
            num_warps=configs.DEQUANTISE_WARPS,
        )
    return out


def launch_zero_tail(role: str, y: Tensor, tiles: Tiles, token: object | None = None) -> None:
    """Zero the rows of ``y [R, H]`` that belong to no expert."""
    R, H = y.shape
    if R == 0:
        return
    tensors, key = (y, tiles.offsets), key_of(token, role)
    if again(key, tensors):
        return
    with device.current(y):
        start(
            key,
            tensors,
            zero_tail_kernel,
            (-(-R // configs.TAIL_ROWS),),
            y,
            tiles.offsets,
            R,
            tiles.experts,
            H=H,
            ROWS=configs.TAIL_ROWS,
            COLUMNS=configs.TAIL_COLUMNS,
            num_warps=configs.TAIL_WARPS,
        )
