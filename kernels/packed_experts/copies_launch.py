"""Starts of a packed stack's copy and of the zeros for rows of no expert.

Legend: R rows, E experts, H hidden, N out and K in of a stack.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.packed_experts import configs, contract, series
from shardwright.kernels.packed_experts.copies_triton import dequantise_kernel, zero_tail_kernel
from shardwright.kernels.packed_experts.storage import PackedStack
from shardwright.kernels.permute.tiles import Tiles

LAYOUTS = Admitted()
"""Layouts of stacks that have been copied: a stack's copy depends on nothing else of its layer."""


def dequantise_both(stacks: tuple[PackedStack, PackedStack], token: object | None = None) -> tuple[Tensor, Tensor]:
    """The bf16 weights of a layer's two stacks, in fresh memory. ``token``: the layout's."""
    known = None if token is None else series.find((token, "copies"))
    if known is not None:
        (one, two), copies = stacks, (_empty(stacks[0]), _empty(stacks[1]))
        if series.again(known, (one.values, one.scales, copies[0], two.values, two.scales, copies[1])):
            return copies
        del copies
    found = dequantise(stacks[0]), dequantise(stacks[1])
    if token is not None:
        names = ("values", "scales", "copy"), ("values of down", "scales of down", "copy of down")
        launches = [(_key(stack), of) for stack, of in zip(stacks, names, strict=True)]
        series.keep((token, "copies"), [*names[0], *names[1]], launches)
    return found


def _empty(w: PackedStack) -> Tensor:
    return torch.empty(w.shape, dtype=torch.bfloat16, device=w.values.device)


def _key(w: PackedStack) -> Hashable:
    """What a stack's copy is bound under."""
    check = partial(contract.check_stack, contract.NAME, "stack", w, *w.shape)
    return key_of(LAYOUTS.check((w.values, w.scales), w.kind, check), "dequantise")


def dequantise(w: PackedStack) -> Tensor:
    """The bf16 weight [E, N, K] of a stack, in fresh memory."""
    E, N, K = w.shape
    out = _empty(w)
    tensors, key = (w.values, w.scales, out), _key(w)
    if again(key, tensors):
        return out
    columns, rows = 64 * configs.DEQUANTISE_BLOCKS, configs.DEQUANTISE_ROWS_A_PROGRAM
    with device.current(out):
        start(
            key,
            tensors,
            dequantise_kernel,
            (-(-K // columns), -(-N // rows), E),
            *tensors,
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
