"""The up-projection of latent attention, applied to queries and outputs in place of keys and values.

``k_h = W_k,h c`` and ``v_h = W_v,h c`` for each head h; so ``q_h · k_h = (W_k,hᵀ q_h) · c`` and
``Σ p v_h = W_v,h Σ p c``: attention may read the latent c itself. An adapter ``s B A`` on the projection is applied in
the same places, apart from the base, so that nothing is rounded into the frozen weights.

Legend: T queries, S keys, H heads, N width of a key without its rotated part, V width of a value, C width of the
latent, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Adapter:
    """``s B A`` beside the base."""

    a: Tensor
    """``[r, C]``."""
    b: Tensor
    """``[H · (N + V), r]``."""
    scaling: float


@dataclass(frozen=True)
class UpProjection:
    """``weight [H · (N + V), C]``: for each head N rows of keys, then V rows of values."""

    weight: Tensor
    heads: int
    nope: int
    value: int
    adapter: Adapter | None = None

    def _of(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of keys ``[H, N, ·]`` and of values ``[H, V, ·]``."""
        keys, values = matrix.reshape(self.heads, self.nope + self.value, -1).split([self.nope, self.value], dim=1)
        return keys, values

    def absorb(self, q: Tensor) -> Tensor:
        """Queries ``[T, H, N]`` → ``[T, H, C]``, dense, to be multiplied by the latent."""
        y = torch.einsum("thn,hnc->thc", q, self._of(self.weight)[0])
        if self.adapter is not None:
            inner = torch.einsum("thn,hnr->thr", q, self._of(self.adapter.b.to(q.dtype))[0])
            y = torch.add(y, inner @ self.adapter.a.to(q.dtype), alpha=self.adapter.scaling)
        return y.contiguous()

    def values(self, o: Tensor) -> Tensor:
        """Mixed latents ``[T, H, C]`` → mixed values ``[T, H, V]``."""
        y = torch.einsum("thc,hvc->thv", o, self._of(self.weight)[1])
        if self.adapter is not None:
            inner = o @ self.adapter.a.to(o.dtype).mT
            more = torch.einsum("thr,hvr->thv", inner, self._of(self.adapter.b.to(o.dtype))[1])
            y = torch.add(y, more, alpha=self.adapter.scaling)
        return y

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Latents ``[S, C]`` → keys ``[S, H, N]`` and values ``[S, H, V]``: what dense attention reads."""
        y = latent @ self.weight.mT
        if self.adapter is not None:
            inner = latent @ self.adapter.a.to(latent.dtype).mT
            y = torch.add(y, inner @ self.adapter.b.to(latent.dtype).mT, alpha=self.adapter.scaling)
        keys, values = y.reshape(-1, self.heads, self.nope + self.value).split([self.nope, self.value], dim=2)
        return keys, values
