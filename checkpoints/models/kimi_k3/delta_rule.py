"""The gated delta rule in chunks, in plain torch: what runs where no fused kernel is installed.

Legend: B batch, T tokens, H heads, K key and V value width, C chunk, N chunks; Γ cumulative log-decay inside a chunk.
Decays between two tokens of a chunk are taken as exp(Γ_i − Γ_j), never above one, so any gate is safe.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 16


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S ← diag(e^g) S; S ← S + β k (v − kᵀS)ᵀ; o = Sᵀ q, token after token.

    Args:
        q: ``[B, T, H, K]``, normalised and scaled.
        k: ``[B, T, H, K]``, normalised.
        v: ``[B, T, H, V]``.
        g: ``[B, T, H, K]`` log-decay, at most zero.
        beta: ``[B, T, H]``.
        state: ``[B, H, K, V]`` before the first token; zero where left out.

    Returns:
        ``o [B, T, H, V]`` and the last state, in fp32 (fp64 for fp64).
    """
    kind = torch.promote_types(q.dtype, torch.float32)
    q, k, v, g, beta = (value.to(kind) for value in (q, k, v, g, beta))
    B, T, H, K = q.shape
    pad = -T % CHUNK

    def chunked(value: Tensor) -> Tensor:
        full = torch.nn.functional.pad(value, (0, 0, 0, 0, 0, pad))
        return full.view(B, -1, CHUNK, H, value.shape[-1]).permute(0, 3, 1, 2, 4)

    q, k, v, g, beta = chunked(q), chunked(k), chunked(v), chunked(g), chunked(beta.unsqueeze(-1))
    cumulative = g.cumsum(-2)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    apart = cumulative.unsqueeze(-2) - cumulative.unsqueeze(-3)
    decay = apart.masked_fill(~lower.unsqueeze(-1), float("-inf")).exp()
    inner = torch.einsum("...ik,...jk,...ijk->...ij", k, k, decay).tril(-1) * beta
    eye = torch.eye(CHUNK, dtype=kind, device=q.device)
    mixed = torch.linalg.solve_triangular(eye + inner, eye * beta, upper=False, unitriangular=True)
    w, u = mixed @ (cumulative.exp() * k), mixed @ v
    scores = torch.einsum("...ik,...jk,...ijk->...ij", q, k, decay)
    reads, last = cumulative.exp() * q, cumulative[..., -1:, :]
    writes = (last - cumulative).exp() * k
    if state is None:
        state = torch.zeros(B, H, K, v.shape[-1], dtype=kind, device=q.device)
    # One unbind for all chunks: the gradient of a slice for each would fill the whole with zeros again every time.
    chunks = zip(*(value.unbind(2) for value in (reads, scores, u, w, writes, last)), strict=True)
    outputs = []
    for read, score, gain, loss, write, end in chunks:
        fresh = gain - loss @ state
        outputs.append(read @ state + score @ fresh)
        state = end.transpose(-1, -2).exp() * state + write.transpose(-1, -2) @ fresh
    o = torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).reshape(B, T + pad, H, -1)
    return o[:, :T], state
