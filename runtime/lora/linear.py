"""A dense linear map with an adapter: ``y = x Wᵀ + b + s (x Aᵀ) Bᵀ``.

Legend: A [r, in], B [out, r], s scaling. The weight keeps its name; the adapters stand beside it as ``lora_a`` and
``lora_b``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoraLinear(nn.Module):
    """Takes the place of an ``nn.Linear`` under the same name."""

    def __init__(self, original: nn.Linear, rank: int, scaling: float, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = original.in_features, original.out_features
        self.weight = original.weight
        self.bias: nn.Parameter | None = original.bias
        device = original.weight.device
        self.lora_a = nn.Parameter(torch.empty((rank, self.in_features), dtype=dtype, device=device))
        self.lora_b = nn.Parameter(torch.empty((self.out_features, rank), dtype=dtype, device=device))
        self.scaling, self.dropout = scaling, dropout

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        y = F.linear(x, self.weight, self.bias)
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        inner = F.linear(dropped, self.lora_a.to(x.dtype))
        flat = torch.addmm(
            y.view(-1, self.out_features),
            inner.view(-1, inner.shape[-1]),
            self.lora_b.to(x.dtype).mT,
            alpha=self.scaling,
        )
        return flat.view(y.shape)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, rank {self.lora_a.shape[0]}"
