"""Query/key norm and RoPE in plain torch: the meaning that the fused operator must have.

Legend: B batch, T tokens, Q and K heads, D head width, W rotary width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels.rms_norm.reference import rms_norm_reference


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, width: int, pairing: str, last: bool) -> Tensor:
    """Rotate ``width`` dimensions of each head, as transformers does.

    Args:
        x: ``[..., T, heads, D]``.
        cos: ``[T, W]``, ``[T, W/2]``, or with a batch dimension in front; its own attention scaling included.
        sin: as ``cos``.
        width: W; the other ``D - W`` dimensions pass unchanged.
        pairing: which dimensions turn together. ``half``: i with i + W/2 (Llama, Qwen, GLM-4.5, MiniMax).
            ``interleaved``: 2i with 2i + 1, in place (GLM-4). ``interleaved-to-half``: 2i with 2i + 1, written
            to i and i + W/2 (DeepSeek-V3). Pairs take the first half of a full table.
        last: whether the last ``width`` dimensions rotate (MLA) instead of the first.
    """
    start = x.shape[-1] - width if last else 0
    before, turning, after = x[..., :start], x[..., start : start + width], x[..., start + width :]
    half = width // 2
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    c1, s1 = cos[..., :half], sin[..., :half]
    whole = cos.shape[-1] == width and pairing == "half"
    c2, s2 = (cos[..., half:], sin[..., half:]) if whole else (c1, s1)
    if pairing == "half":
        a, b = turning[..., :half], turning[..., half:]
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
    turned = (a * c1 - b * s1, b * c2 + a * s2)
    joined = torch.stack(turned, -1).flatten(-2) if pairing == "interleaved" else torch.cat(turned, -1)
    return torch.cat([before, joined.to(x.dtype), after], -1)


def head_norm_reference(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    """RMSNorm over the last dimension; with ``unit_offset`` the weight is stored as its distance from 1.

    Qwen3-Next, which stores it so, multiplies in fp32 before its one rounding; the plain form rounds the
    normalised row first.
    """
    if not unit_offset:
        return rms_norm_reference(x, weight, eps).to(x.dtype)
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    ones = torch.ones_like(weight, dtype=kind)
    return (rms_norm_reference(x.to(kind), ones, eps) * (1.0 + weight.to(kind))).to(x.dtype)


def qk_norm_rope_reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    width: int,
    pairing: str = "half",
    last: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float | None = None,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """Norm (where weights are given), then rotation, of ``q [..., T, Q, D]`` and ``k [..., T, K, D']``.

    Returns:
        The rotated queries and keys, in the inputs' dtypes.
    """
    found = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        normed = x if weight is None or eps is None else head_norm_reference(x, weight, eps, unit_offset)
        found.append(rotate_reference(normed, cos, sin, width, pairing, last))
    return found[0], found[1]
