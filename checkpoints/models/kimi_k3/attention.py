"""The two attentions: delta-rule (KDA) and gated latent attention without positions (MLA).

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
        """``[B, T, hidden]`` → the same; causal, ``attention_mask [B, T]`` hides padding."""
        B, T, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(B, T, self.heads, -1).transpose(1, 2)
        latent, extra = self.kv_a_proj_with_mqa(x).split([self.rank, self.extra], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).view(B, T, self.heads, -1).transpose(1, 2)
        nope, v = both.split([self.nope, self.value], dim=-1)
        k = torch.cat([nope, extra.unsqueeze(1).expand(-1, self.heads, -1, -1)], dim=-1)
        mask = None if attention_mask is None else causal_with_padding(attention_mask, T)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        gate = torch.sigmoid(wide(self.g_proj(x))).to(x.dtype)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, -1) * gate)


def l2_normed(x: Tensor) -> Tensor:
    """Each head's vector over its length, fp32 (fp64 for fp64)."""
    value = wide(x)
    return value * torch.rsqrt(value.pow(2).sum(-1, keepdim=True) + L2_EPS)


def causal_with_padding(attention_mask: Tensor, tokens: int) -> Tensor:
    """``[B, 1, T, T]``, true where a token may look; a row that sees nothing sees itself."""
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=attention_mask.device).tril()
    seen = causal & attention_mask.bool().view(-1, 1, 1, tokens)
    return seen | torch.eye(tokens, dtype=torch.bool, device=seen.device)
