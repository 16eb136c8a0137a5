"""A dense linear map with an adapter: ``y = x Wᵀ + b + s (x Aᵀ) Bᵀ``.

Legend: N rows, A [r, in], B [out, r], s scaling. The weight keeps its name; the adapters stand beside it as ``lora_a``
and ``lora_b``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoraProduct(torch.autograd.Function):
    """The map as one node: the adapter's products add onto the base's in place, in forward and in backward.

    Saved: x, the [N, r] inner product and the cast adapters. The base weight never gets a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        a, b = lora_a.to(x.dtype), lora_b.to(x.dtype)
        y = F.linear(flat, weight, bias)
        inner = flat @ a.mT
        y.addmm_(inner, b.mT, alpha=scaling)
        ctx.save_for_backward(flat, weight, a, b, inner)
        ctx.scaling, ctx.shape, ctx.dtype = scaling, x.shape, lora_a.dtype
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, a, b, inner = ctx.saved_tensors
        dy = gradients[0].reshape(-1, gradients[0].shape[-1])
        dinner = (dy @ b).mul_(ctx.scaling)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(dy, weight).addmm_(dinner, a).view(ctx.shape)
        da = (dinner.mT @ flat).to(ctx.dtype)
        db = (dy.mT @ inner).mul_(ctx.scaling).to(ctx.dtype)
        return dx, None, None, da, db, None


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
        if not self.dropout or not self.training:
            y: Tensor = LoraProduct.apply(x, self.weight, self.bias, self.lora_a, self.lora_b, self.scaling)
            return y
        y = F.linear(x, self.weight, self.bias)
        inner = F.linear(F.dropout(x, self.dropout), self.lora_a.to(x.dtype))
        flat = torch.addmm(
            y.view(-1, self.out_features),
            inner.view(-1, inner.shape[-1]),
            self.lora_b.to(x.dtype).mT,
            alpha=self.scaling,
        )
        return flat.view(y.shape)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, rank {self.lora_a.shape[0]}"
