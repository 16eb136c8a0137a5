"""SiTU feed-forwards, the sigmoid router, and latent experts.

Legend: N tokens, H hidden, L latent width of routed experts, I expert width, E experts, k experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation

from shardwright.checkpoints.models.kimi_k3.norms import RMSNorm, wide


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """``β tanh(g/β) σ(g) · λ tanh(u/λ)`` in fp32; β, λ → ∞ gives SwiGLU."""
    g, u = wide(gate), wide(up)
    soft_gate = torch.tanh(g / beta) * beta * torch.sigmoid(g)
    return (soft_gate * (torch.tanh(u / linear_beta) * linear_beta)).to(gate.dtype)


class FeedForward(nn.Module):
    """A dense or shared feed-forward."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.beta, self.linear_beta))


class Router(nn.Module):
    """Sigmoid scores in fp32; chosen with a bias that has no gradient, weighted without it."""

    e_score_correction_bias: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k, self.scale = config.num_experts_per_token, config.routed_scaling_factor
        self.renormalise = config.moe_renormalize
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[N, H]`` → scores ``[N, E]``, weights ``[N, k]``, ids ``[N, k]``."""
        scores = torch.sigmoid(F.linear(wide(x), wide(self.weight)))
        chosen = torch.topk(scores + self.e_score_correction_bias, self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return scores, weights * self.scale, chosen


@use_experts_implementation
class Experts(nn.Module):
    """Routed experts in the latent width, ``gate_up_proj [E, 2I, L]`` (gate first), ``down_proj [E, L, I]``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim = config.num_experts, config.routed_expert_hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return situ(gate, up, self.beta, self.linear_beta)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[N, L]``, ids and weights ``[N, k]`` → ``[N, L]``."""
        result = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            token, slot = torch.where(top_k_index == expert)
            inner = self._apply_gate(F.linear(hidden_states[token], self.gate_up_proj[expert]))
            out = F.linear(inner, self.down_proj[expert]) * top_k_weights[token, slot, None]
            result.index_add_(0, token, out.to(result.dtype))
        return result


class LatentMoE(nn.Module):
    """Down to the latent width, routed experts, a norm of their sum, up again; shared experts at full width beside."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config)
        self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
        self.experts = Experts(config)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps) if config.latent_moe_use_norm else nn.Identity()
        self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)
        self.shared_experts = FeedForward(config, config.num_shared_experts * config.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, H]`` → the same."""
        flat = x.reshape(-1, x.shape[-1])
        _, weights, chosen = self.gate(flat)
        latent = self.experts(self.routed_expert_down_proj(flat), chosen, weights)
        routed = self.routed_expert_up_proj(self.routed_expert_norm(latent))
        return routed.view_as(x) + self.shared_experts(x)
