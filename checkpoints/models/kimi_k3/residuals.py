"""Attention residuals: each sub-layer reads a softmax mix over earlier snapshots and the running sum.

Rows are tensors of their own: a snapshot is kept once for all layers that read it, and no row is copied when the
running sum changes.

Legend: B batch, T tokens, R rows (snapshots and, last, the running sum), H hidden. Source: arXiv 2603.15031.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.checkpoints.models.kimi_k3.norms import RMSNorm, wide


class ResidualMix(RMSNorm):
    """The mix before one sub-layer. Its weight is the norm's; the projection is its neighbour in the files."""

    def forward(self, rows: Sequence[Tensor], projection: Tensor) -> Tensor:  # type: ignore[override]
        """Rows ``[B, T, H]``, the running sum last, and ``[1, H]`` → ``[B, T, H]``."""
        return read(rows, self.weight, projection, self.eps)


def mix(state: Tensor, norm: Tensor, projection: Tensor, eps: float) -> Tensor:
    """``logit_r = u · row_r / rms(row_r)`` with u = norm × projection; the softmax's mix of un-normalised rows, fp32.

    Args:
        state: ``[B, T, R, H]``.
        norm: ``[H]``.
        projection: ``[1, H]``.
    """
    rows = wide(state)
    scale = torch.rsqrt(rows.pow(2).mean(-1) + eps)
    logits = torch.matmul(rows, wide(norm) * wide(projection).reshape(-1)) * scale
    weights = torch.softmax(logits, dim=-1)
    return (weights.unsqueeze(-1) * rows).sum(-2).to(state.dtype)


def read(rows: Sequence[Tensor], norm: Tensor, projection: Tensor, eps: float) -> Tensor:
    """``mix`` of rows ``[B, T, H]``, put side by side for it."""
    return mix(torch.stack(tuple(rows), dim=-2), norm, projection, eps)
