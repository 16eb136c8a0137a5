"""Starts of the low-rank side: shrinks of rows to the rank, and the adapters' gradients.

Legend: R rows, E experts, K depth and N columns of a stack, r rank.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.grouped_lora_mlp import configs
from shardwright.kernels.grouped_lora_mlp.lora_triton import adapter_grad_kernel, adapter_pair_kernel, shrink_kernel
from shardwright.kernels.grouped_lora_mlp.rows import Rows
from shardwright.kernels.permute.configs import TILE_ROWS


def launch_shrink(
    role: str, x: Tensor, a: Tensor, stride_n: int, stride_r: int, scaling: float, rows: Rows, gather: bool, z: Tensor
) -> None:
    """Fill ``z [R, r] = scaling · x A``; ``a`` is [E, N, r] in the given strides, x tokens (gather) or rows."""
    if rows.tiles.most == 0:
        return
    lists = rows.tiles.lists()
    tensors = (x, a, z, rows.entry, rows.tiles.offsets, *lists, rows.tiles.count)
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
            *lists,
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


class Side(NamedTuple):
    """One factor's gradient: ``Σ wide[row]ᵀ low[row]`` over an expert's rows; ``gather`` where wide holds tokens."""

    wide: Tensor
    low: Tensor
    gather: bool
    out: Tensor


def launch_adapter_grads(role: str, a: Side, b: Side, rows: Rows, weights: Tensor | None) -> None:
    """Fill both factors' gradients of one adapter: ``a.out [E, r, K]`` and ``b.out [E, N, r]``.

    In one launch, or in two: ``configs.adapter_grads`` chooses; the bits are the same.

    Args:
        weights: routing weights that every row is multiplied by, flat; ``None`` for none.
    """
    if not configs.adapter_grads(rows.count, rows.tiles.experts).paired:
        launch_adapter_grad(f"{role}_a", a, rows, weights, 1, a.wide.shape[1])
        launch_adapter_grad(f"{role}_b", b, rows, weights, b.low.shape[1], 1)
        return
    tensors = (*a[:2], a.out, *b[:2], b.out, rows.tiles.offsets, rows.entry, weights)
    key = key_of(rows.token, f"{role}-pair", weights is None)
    if again(key, tensors):
        return
    K, N, r, at = a.wide.shape[1], b.wide.shape[1], a.low.shape[1], configs.ADAPTER_GRAD
    blocks = -(-K // at.columns) + -(-N // at.columns)
    with device.current(a.out):
        start(
            key,
            tensors,
            adapter_pair_kernel,
            (blocks, rows.tiles.experts),
            *tensors[:6],
            rows.tiles.offsets if rows.entry is None else rows.entry,
            a.low if weights is None else weights,
            rows.tiles.offsets,
            K,
            N,
            r,
            rows.slots,
            GATHER_X=a.gather and rows.entry is not None,
            GATHER_D=b.gather and rows.entry is not None,
            WEIGHTED=weights is not None,
            INNER=configs.inner_steps(a.wide.element_size(), at.rows),
            BR=at.rows,
            BN=at.columns,
            RP=configs.rank_columns(r),
            num_warps=at.warps,
            num_stages=at.stages,
        )


def launch_adapter_grad(
    role: str, side: Side, rows: Rows, weights: Tensor | None, stride_n: int, stride_r: int
) -> None:
    """Fill ``side.out``, [E, N, r] in the given strides."""
    tensors = (side.wide, side.low, side.out, rows.tiles.offsets, rows.entry, weights)
    key = key_of(rows.token, role, weights is None)
    if again(key, tensors):
        return
    N, r, at = side.wide.shape[1], side.low.shape[1], configs.ADAPTER_GRAD
    with device.current(side.out):
        start(
            key,
            tensors,
            adapter_grad_kernel,
            (-(-N // at.columns), rows.tiles.experts),
            *tensors[:3],
            rows.tiles.offsets if rows.entry is None else rows.entry,
            side.low if weights is None else weights,
            rows.tiles.offsets,
            N,
            r,
            rows.slots,
            stride_n,
            stride_r,
            GATHER=side.gather and rows.entry is not None,
            WEIGHTED=weights is not None,
            INNER=configs.inner_steps(side.wide.element_size(), at.rows),
            BR=at.rows,
            BN=at.columns,
            RP=configs.rank_columns(r),
            num_warps=at.warps,
            num_stages=at.stages,
        )
