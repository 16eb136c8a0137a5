"""What may be done to q and k before they are scored: rotation, and rounding to fp8.

Legend: T queries, S keys, N indexer heads, D head width, R rotated dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.dsa.indexer import configs
from shardwright.kernels.dsa.indexer.prepare_triton import indexer_quantise_kernel, indexer_rope_kernel


@dataclass(frozen=True)
class Quantised:
    """q and k in e4m3 beside their scales; q's are already in the head weights."""

    q: Tensor
    k: Tensor
    weights: Tensor
    k_scale: Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str, query_start: int, *, back: bool = False) -> Tensor:
    """Rotate ``x [rows, D]`` or ``[rows, N, D]``; ``back`` turns the other way."""
    y = torch.empty_like(x)
    N, D = (1 if x.dim() == 2 else x.shape[1]), x.shape[-1]
    rows = x.shape[0] * N
    if rows == 0:
        return y
    with device.current(x):
        indexer_rope_kernel[(-(-rows // configs.ROPE_ROWS),)](
            x,
            cos,
            sin,
            y,
            rows,
            query_start,
            -1.0 if back else 1.0,
            N=N,
            D=D,
            HALF=cos.shape[-1],
            INTERLEAVED=layout == "interleaved",
            ROWS=configs.ROPE_ROWS,
            num_warps=configs.ROPE_WARPS,
        )
    return y


def quantise(q: Tensor, k: Tensor, weights: Tensor) -> Quantised:
    """q and k in e4m3 with one scale for each head of a query and for each key."""
    made = []
    for x, factor in ((q, weights), (k, None)):
        D = x.shape[-1]
        rows = x.numel() // D
        y = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        if rows:
            with device.current(x):
                indexer_quantise_kernel[(-(-rows // configs.QUANTISE_ROWS),)](
                    x,
                    scale if factor is None else factor,
                    y,
                    scale,
                    rows,
                    FACTOR=factor is not None,
                    D=D,
                    ROWS=configs.QUANTISE_ROWS,
                    num_warps=configs.QUANTISE_WARPS,
                )
        made.append((y, scale))
    (q8, q_weights), (k8, k_scale) = made
    return Quantised(q8, k8, q_weights, k_scale)
