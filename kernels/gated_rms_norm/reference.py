"""Gated RMSNorm in plain torch: the meaning that the fused operator must have.

Legend: D row width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
}


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """RMSNorm first, gate second, everything in fp32 (fp64 for fp64 input), one rounding at the end.

    This is the strict form of Kimi-Linear. Qwen3-Next rounds the normalised row and its product with
    the weight to the input's dtype on the way: the same function, with two roundings more.

    Args:
        x: ``[..., D]``.
        gate: as ``x``, before its activation.
        weight: ``[D]``, in x's dtype or fp32.
        eps: added to the mean square, inside the root.
        activation: ``sigmoid`` (KDA's output gate) or ``silu`` (GatedDeltaNet's).

    Returns:
        ``[..., D]`` in x's dtype.
    """
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = x.to(kind)
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normalised * weight.to(kind) * ACTIVATIONS[activation](gate.to(kind))).to(x.dtype)
