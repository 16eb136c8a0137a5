"""Attention residuals: each sub-layer reads a softmax mix over earlier snapshots and the running sum.

Legend: B batch, T tokens, R rows (snapshots and, last, the running sum), H hidden. Source: arXiv 2603.15031.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.checkpoints.models.kimi_k3.norms import wide


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


def append(state: Tensor, value: Tensor) -> Tensor:
    """A further row: the running sum so far becomes a snapshot, ``value [B, T, H]`` the new sum."""
    return torch.cat([state, value.unsqueeze(-2)], dim=-2)


def add(state: Tensor, value: Tensor) -> Tensor:
    """Add to the running sum."""
    return torch.cat([state[..., :-1, :], (state[..., -1, :] + value).unsqueeze(-2)], dim=-2)
