"""RMS norms, in fp32 inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    """In fp32; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """``weight × x / sqrt(mean x² + eps)`` over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x).to(x.dtype)

    def normed(self, x: Tensor) -> Tensor:
        """Before the weight, in fp32."""
        value = wide(x)
        return value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.eps)


class GatedRMSNorm(RMSNorm):
    """The norm of each head, times the sigmoid of a gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """``x`` and ``gate [..., size]`` → the dtype of x."""
        return (wide(self.weight) * self.normed(x) * torch.sigmoid(wide(gate))).to(x.dtype)
