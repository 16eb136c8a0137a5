"""What sparse attention is timed beside: gather and einsum in plain torch, in runs of queries. Forward only.

Eager's backward of the gather adds rows one after another and says nothing about attention: it is no rival.

Legend: T queries, H heads, K entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

RUN = 512
"""Queries whose gathered keys are alive at once."""


def eager(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, indices: Tensor, scale: float) -> Tensor:
    """``[T, H, V]``; the scores of -1 entries are masked, nothing else is taken care of."""
    q, kv = torch.cat((q_nope, q_rope), -1), torch.cat((latent, k_rope), -1)
    pieces = []
    for start in range(0, q.shape[0], RUN):
        at = indices[start : start + RUN].long()
        keys = kv[at.clamp_min(0)]
        scores = torch.einsum("thd,tkd->thk", q[start : start + RUN], keys).float() * scale
        shares = scores.masked_fill((at < 0)[:, None], float("-inf")).softmax(-1)
        pieces.append(torch.einsum("thk,tkd->thd", shares.to(q.dtype), keys[..., : latent.shape[1]]))
    return torch.cat(pieces)
