"""RMSNorm in plain torch: the meaning that the fused operator must have.

Legend: T rows, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as transformers defines it.

    Statistics in fp32 (fp64 for fp64 input); the normalised value is cast back to the input's dtype
    *before* it is multiplied by the weight, so the product has the promoted dtype of the two.

    Args:
        x: ``[..., H]``.
        weight: ``[H]``.
        eps: added to the mean square, inside the root.
    """
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    normalised = wide * torch.rsqrt(mean_square + eps)
    return weight * normalised.to(x.dtype)
