"""One adapter for all experts of a block: ``y = x W[e]ᵀ + s (x Aᵀ) Bᵀ``, with the same A and B for every e.

The pairs stand beside the experts module, under its name with ``_lora`` added, so that FSDP keeps them with the layer's
dense weights: cut over shard × ep, whole on every EP rank while the layer runs, gradients summed over all ranks. Rows
that came from other ranks need no further factor, for a loss is divided by the tokens of the whole step.
Legend: A [r, in], B [out, r].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SUFFIX = "_lora"
"""Added to an experts module's name: where its shared pairs are."""


class SharedPairs(nn.Module):
    """The pairs of one experts module: ``P_lora_a`` and ``P_lora_b`` for each adapted stack P."""

    def add(self, stack: str, a: nn.Parameter, b: nn.Parameter) -> None:
        """Attach the pair of a stack."""
        self.register_parameter(f"{stack}_lora_a", a)
        self.register_parameter(f"{stack}_lora_b", b)

    def pair(self, stack: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and B in the format of computation."""
        return getattr(self, f"{stack}_lora_a").to(dtype), getattr(self, f"{stack}_lora_b").to(dtype)


def for_each_expert(pair: tuple[Tensor, Tensor], experts: int) -> tuple[Tensor, Tensor]:
    """A pair as one for each expert, [E, r, in] and [E, out, r]; pairs of experts as they are."""
    a, b = pair
    if a.dim() == 3:
        return a, b
    return a.expand(experts, *a.shape).contiguous(), b.expand(experts, *b.shape).contiguous()
