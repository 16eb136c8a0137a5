"""What the indexer, and a layer with sparse attention behind it, are timed beside.

Legend: T queries and keys, N indexer heads, D head width, H attention heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.kernels.cases import Run, normal_on_device

EAGER_ROWS = 512
SOFTMAX_WIDTH = 192
"""Head width before absorption, 128 + 64, of which the softmax scale is made; dense attention's own."""

DENSE_VALUE = 128


def eager(q: Tensor, k: Tensor, weights: Tensor, top_k: int) -> Tensor:
    """What model code does, some queries at a time: two einsums in the inputs' dtype, a mask, torch.topk."""
    T, keys = q.shape[0], torch.arange(k.shape[0], device=q.device)
    found = []
    for first in range(0, T, EAGER_ROWS):
        piece = slice(first, min(first + EAGER_ROWS, T))
        dots = torch.einsum("tnd,sd->tns", q[piece], k).relu_()
        scores = torch.einsum("tns,tn->ts", dots, weights[piece]).float()
        own = torch.arange(piece.start, piece.stop, device=q.device)
        scores.masked_fill_(keys[None] > own[:, None], float("-inf"))
        found.append(scores.topk(min(top_k, k.shape[0]), -1).indices)
    return torch.cat(found)


def dense_attention(T: int, H: int, dtype: torch.dtype, *, backward: bool) -> Run:
    """Dense causal attention of random values by cuDNN, ``SOFTMAX_WIDTH`` wide with values of ``DENSE_VALUE``."""
    sizes = ((1, H, T, SOFTMAX_WIDTH), (1, H, T, SOFTMAX_WIDTH), (1, H, T, DENSE_VALUE))
    q, k, v = (normal_on_device(size, dtype, "cuda", at).requires_grad_() for at, size in enumerate(sizes))
    dy = normal_on_device(sizes[2], dtype, "cuda", 9)

    def run() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(y, (q, k, v), dy) if backward else y

    return run
