"""Launches of attention residuals' kernels, forward and backward.

Legend: T tokens, R rows, H hidden, P programs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.attention_residual import contract
from shardwright.kernels.attention_residual.triton import attention_residual_bwd_kernel, attention_residual_fwd_kernel
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.launch import Launch, columns

Rows = Sequence[Tensor]
Kept = tuple[Tensor, Tensor, Tensor]
"""Of a forward for its backward, all fp32: 1 / rms ``[R, T]``, logits ``[R, T]``, their log-sum-exp ``[T]``."""


def _filled(rows: Rows) -> list[Tensor]:
    """Rows for every address of a kernel: the first stands where there is none, and is not read there."""
    return [*rows, *([rows[0]] * (contract.MAX_ROWS - len(rows)))]


def launch_forward(
    rows: Rows,
    norm: Tensor,
    projection: Tensor,
    eps: float,
    y: Tensor,
    kept: Kept | None,
    launch: Launch,
    key: Hashable = None,
) -> None:
    """Fill ``y [T, H]`` and what a backward needs; nothing is launched for zero tokens."""
    H = norm.shape[0]
    T = y.numel() // H
    if T == 0:
        return
    tensors = (*rows, norm, projection, y, *(kept or ()))
    if again(key, tensors):
        return
    with device.current(y):
        start(
            key,
            tensors,
            attention_residual_fwd_kernel,
            (launch.grid(T, device.multiprocessors(y)),),
            *_filled(rows),
            norm,
            projection,
            y,
            *(kept or (y, y, y)),
            T,
            len(rows),
            H,
            eps,
            KEEP=kept is not None,
            ROWS=launch.rows,
            COLUMNS=columns(H),
            STAGES=launch.stages,
            num_warps=launch.warps,
        )


def launch_backward(
    dy: Tensor,
    rows: Rows,
    norm: Tensor,
    projection: Tensor,
    kept: Kept,
    drows: Rows,
    ddirection: Tensor | None,
    launch: Launch,
    token: object | None = None,
) -> None:
    """Fill ``drows``, each ``[T, H]``, and, where norm or projection learns, ``ddirection [H]`` in fp32."""
    H = norm.shape[0]
    T = dy.numel() // H
    if T == 0:
        if ddirection is not None:
            ddirection.zero_()
        return
    P = launch.grid(T, device.multiprocessors(dy))
    partial = None if ddirection is None else torch.empty((P, H), dtype=torch.float32, device=dy.device)
    tensors, key = (*rows, *drows, norm, projection, dy, *kept, partial), key_of(token, "bwd", ddirection is None)
    if not again(key, tensors):
        with device.current(dy):
            start(
                key,
                tensors,
                attention_residual_bwd_kernel,
                (P,),
                *_filled(rows),
                *_filled(drows),
                norm,
                projection,
                dy,
                *kept,
                kept[0] if partial is None else partial,
                T,
                len(rows),
                H,
                WEIGHT_GRADIENT=partial is not None,
                ROWS=launch.rows,
                COLUMNS=columns(H),
                STAGES=launch.stages,
                num_warps=launch.warps,
            )
    if partial is not None and ddirection is not None:
        torch.sum(partial, dim=0, out=ddirection)
