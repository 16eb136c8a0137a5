"""Attention residuals in plain torch.

Legend: T tokens, R rows (snapshots of the residual stream and, last, the running sum), H hidden.
Source: arXiv 2603.15031.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attention_residual_reference(rows: Sequence[Tensor], norm: Tensor, projection: Tensor, eps: float) -> Tensor:
    """``Σ_r softmax_r(logit)_r · row_r`` with ``logit_r = (norm × projection) · row_r / rms(row_r)``, in fp32 inside.

    Args:
        rows: R tensors ``[..., H]`` of one dtype.
        norm: ``[H]``.
        projection: ``[H]`` or ``[1, H]``.

    Returns:
        ``[..., H]`` in the rows' dtype.
    """
    stacked = torch.stack(tuple(rows), dim=-2)
    accumulate = torch.promote_types(stacked.dtype, torch.float32)
    wide = stacked.to(accumulate)
    scale = torch.rsqrt(wide.pow(2).mean(-1) + eps)
    direction = norm.to(accumulate) * projection.to(accumulate).reshape(-1)
    weights = torch.softmax(torch.matmul(wide, direction) * scale, dim=-1)
    return (weights.unsqueeze(-1) * wide).sum(-2).to(stacked.dtype)
