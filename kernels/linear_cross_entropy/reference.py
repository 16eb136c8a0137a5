"""Head and cross-entropy in plain torch: the meaning that the fused operator must have.

Legend: T tokens, H hidden, V vocabulary, r LoRA rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy_reference(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    *,
    tokens: Tensor | None = None,
    lora_scale: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of ``x · weightᵀ + lora_scale · (x · lora_aᵀ) · lora_bᵀ``, logits in x's dtype.

    Args:
        x: ``[..., H]``.
        weight: ``[V, H]``.
        targets: ``[...]`` integers below V, or ``ignore_index``.
        lora_a: ``[r, H]``.
        lora_b: ``[V, r]``.
        tokens: one value that a mean divides by in place of the count of this call's tokens.

    Returns:
        fp32 (fp64 for fp64 input): a scalar, or ``[...]`` for ``reduction="none"``. A mean over no token is NaN
        with gradient 0, as torch defines it.
    """
    rows = x.reshape(-1, x.shape[-1])
    logits = rows @ weight.t()
    if lora_a is not None and lora_b is not None:
        logits = logits + lora_scale * ((rows @ lora_a.to(x.dtype).t()) @ lora_b.to(x.dtype).t())
    wide = logits.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if tokens is not None:
        return F.cross_entropy(wide, targets.reshape(-1), ignore_index=ignore_index, reduction="sum") / tokens
    loss = F.cross_entropy(wide, targets.reshape(-1), ignore_index=ignore_index, reduction=reduction)
    return loss.reshape(targets.shape) if reduction == "none" else loss
