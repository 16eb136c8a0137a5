"""The attentions: delta-rule (KDA), gated latent attention without positions (MLA), and its sparse form (DSA).

Legend: B batch, T tokens, H heads, K key and V value width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.checkpoints.models.kimi_k3.delta_rule import delta_rule
from shardwright.checkpoints.models.kimi_k3.norms import GatedRMSNorm, RMSNorm, wide

L2_EPS = 1e-6


class DeltaAttention(nn.Module):
    """KDA with the lower-bounded gate and a full-rank output gate."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, self.heads, self.width = config.hidden_size, config.linear_num_heads, config.linear_head_dim
        inner, kernel = self.heads * self.width, config.linear_conv_kernel_dim
        self.lower_bound = config.gate_lower_bound
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1, bias=False) for _ in range(3)
        )
        self.f_a_proj = nn.Linear(hidden, self.width, bias=False)
        self.f_b_proj = nn.Linear(self.width, inner, bias=False)
        self.b_proj = nn.Linear(hidden, self.heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(config.a_log_size))
        """One a head; files pad it with zeros."""
        self.dt_bias = nn.Parameter(torch.zeros(inner))
        self.g_proj = nn.Linear(hidden, inner, bias=False)
        self.o_norm = GatedRMSNorm(self.width, config.rms_norm_eps)
        self.o_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, hidden]`` → the same."""
        B, T, _ = x.shape
        q, k, v = (
            self._short(conv, projection(x)).view(B, T, self.heads, self.width)
            for conv, projection in (
                (self.q_conv1d, self.q_proj),
                (self.k_conv1d, self.k_proj),
                (self.v_conv1d, self.v_proj),
            )
        )
        q, k = l2_normed(q) * self.width**-0.5, l2_normed(k)
        o, _ = delta_rule(q, k, v, self.log_decay(x), torch.sigmoid(wide(self.b_proj(x))))
        gate = self.g_proj(x).view(B, T, self.heads, self.width)
        return self.o_proj(self.o_norm(o.to(x.dtype), gate).reshape(B, T, -1))

    def log_decay(self, x: Tensor) -> Tensor:
        """``g [B, T, H, K]`` between the lower bound and zero, fp32."""
        raw = wide(self.f_b_proj(self.f_a_proj(x))) + wide(self.dt_bias)
        rate = wide(self.A_log[: self.heads]).exp().view(self.heads, 1)
        return self.lower_bound * torch.sigmoid(rate * raw.view(*x.shape[:2], self.heads, self.width))

    def _short(self, conv: nn.Conv1d, x: Tensor) -> Tensor:
        """Causal depthwise convolution, then SiLU."""
        mixed = F.conv1d(x.transpose(1, 2), conv.weight.to(x.dtype), padding=conv.padding[0], groups=conv.groups)
        return F.silu(mixed[..., : x.shape[1]].transpose(1, 2))


class GatedLatentAttention(nn.Module):
    """MLA whose "rope" part is never rotated, with a sigmoid gate on the output."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, self.heads = config.hidden_size, config.num_attention_heads
        self.nope, self.extra, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank, query = config.kv_lora_rank, self.nope + self.extra
        self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.extra, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, config.latent_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        self.g_proj = nn.Linear(hidden, self.heads * self.value, bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """``[B, T, hidden]`` → the same; causal.

        Args:
            attention_mask: ``[B, T]`` hides padding, ``[B, 1, T, T]`` says where each token may look.
        """
        B, T, _ = x.shape
        query = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(query).view(B, T, self.heads, -1).transpose(1, 2)
        latent, extra = self.kv_a_proj_with_mqa(x).split([self.rank, self.extra], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).view(B, T, self.heads, -1).transpose(1, 2)
        nope, v = both.split([self.nope, self.value], dim=-1)
        k = torch.cat([nope, extra.unsqueeze(1).expand(-1, self.heads, -1, -1)], dim=-1)
        padded = attention_mask is not None and attention_mask.dim() == 2
        mask = causal_with_padding(attention_mask, T) if padded else attention_mask  # type: ignore[arg-type]
        mask = self.chosen(x, query, mask)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        gate = torch.sigmoid(wide(self.g_proj(x))).to(x.dtype)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, -1) * gate)

    def chosen(self, x: Tensor, query: Tensor, mask: Tensor | None) -> Tensor | None:
        """Where each token looks, of where it may; ``None``: everywhere before it."""
        return mask


class Indexer(nn.Module):
    """Scores that say which tokens are worth a look: a few small heads on the query's latent, one shared key.

    Nothing in this slot has a position, so neither have these queries and keys.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.n_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.index_topk = config.index_topk
        self.wq_b = nn.Linear(config.q_lora_rank, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, self.n_heads, bias=False)

    def forward(self, x: Tensor, query: Tensor) -> Tensor:
        """``Σ_j w_j n^{−1/2} ReLU(q_j · k d^{−1/2})`` for every pair of tokens, ``[B, T, T]`` fp32."""
        B, T, _ = x.shape
        q = wide(self.wq_b(query)).view(B, T, self.n_heads, self.head_dim) * self.head_dim**-0.5
        k = wide(self.k_norm(self.wk(x)))
        weights = wide(self.weights_proj(x)) * self.n_heads**-0.5
        scores = torch.zeros(B, T, T, dtype=k.dtype, device=x.device)
        for head in range(self.n_heads):
            scores = scores + weights[..., head, None] * F.relu(q[:, :, head] @ k.transpose(1, 2))
        return scores


class GatedSparseAttention(GatedLatentAttention):
    """The latent attention over the ``index_topk`` tokens that the indexer scores highest.

    The choice has no gradient, and so has the indexer: it is trained by a loss of its own, which adapters do not have.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.indexer = Indexer(config)

    def chosen(self, x: Tensor, query: Tensor, mask: Tensor | None) -> Tensor | None:
        """``[B, 1, T, T]``, true at the chosen tokens; everything while it is no more than is chosen."""
        T = x.shape[1]
        if self.indexer.index_topk >= T:
            return mask
        with torch.no_grad():
            causal = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
            seen = causal.expand(len(x), T, T) if mask is None else mask[:, 0]
            scores = self.indexer(x, query).masked_fill(~seen, float("-inf"))
            best = torch.topk(scores, self.indexer.index_topk, dim=-1).indices
            kept = torch.zeros_like(seen).scatter(-1, best, True)
            return (kept & seen).unsqueeze(1)


def l2_normed(x: Tensor) -> Tensor:
    """Each head's vector over its length, fp32 (fp64 for fp64)."""
    value = wide(x)
    return value * torch.rsqrt(value.pow(2).sum(-1, keepdim=True) + L2_EPS)


def apart(positions: Tensor, attention_mask: Tensor | None = None) -> Tensor | None:
    """``[B, 1, T, T]`` that keeps documents apart, which begin where ``positions [B, T]`` are 0; ``None`` for one."""
    starts = positions == 0
    if not bool(starts[:, 1:].any()):
        return None
    number, tokens = starts.cumsum(-1), positions.shape[1]
    same = (number.unsqueeze(2) == number.unsqueeze(1)).unsqueeze(1)
    given = torch.ones_like(positions) if attention_mask is None else attention_mask
    return same & causal_with_padding(given, tokens)


def causal_with_padding(attention_mask: Tensor, tokens: int) -> Tensor:
    """``[B, 1, T, T]``, true where a token may look; a row that sees nothing sees itself."""
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=attention_mask.device).tril()
    seen = causal & attention_mask.bool().view(-1, 1, 1, tokens)
    return seen | torch.eye(tokens, dtype=torch.bool, device=seen.device)
