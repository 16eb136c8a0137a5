"""Latent attention in plain torch: the meaning that the front door must have, selected keys or all.

Legend: T queries, S keys, H heads, N width of a key without its rotated part, R rotated width, V width of a value,
C width of the latent, K selected keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels.dsa.attention.reference import dsa_attention_reference
from shardwright.kernels.dsa.up_projection import UpProjection


def latent_attention_reference(
    q_nope: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    up: UpProjection,
    indices: Tensor | None,
    gate: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    bounds: Tensor,
) -> Tensor:
    """``[T, H, V]``; without ``indices`` every key within ``bounds`` is selected.

    Args:
        bounds: ``[T, 2]``: first key that a query may see and the one past its last.
        q_nope, q_rope, latent, k_rope, up, indices, gate, sinks, scale: as of ``op.latent_attention``.
    """
    if indices is None:
        indices = torch.arange(latent.shape[0], device=latent.device).expand(q_nope.shape[0], -1)
    mixed, _ = dsa_attention_reference(
        up.absorb(q_nope), q_rope, latent, k_rope, indices, None, sinks, scale=scale, bounds=bounds
    )
    o = up.values(mixed)
    return o if gate is None else o * torch.sigmoid(gate)
