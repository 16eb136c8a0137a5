"""Residual add and RMSNorm in plain torch.

Legend: T rows, H hidden.
"""

from __future__ import annotations

from torch import Tensor

from shardwright.kernels.rms_norm.reference import rms_norm_reference


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``r = x + residual`` in the inputs' dtype (rounded there), then RMSNorm of ``r``.

    Returns:
        ``y`` and the new residual ``r``, both ``[..., H]``.
    """
    total = x + residual
    return rms_norm_reference(total, weight, eps), total
