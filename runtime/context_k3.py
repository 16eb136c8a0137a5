"""Kimi K3's own attentions on cut rows: latents of all tokens are gathered, states of the delta rule pass.

Legend: B rows, T tokens of a rank, S of a sequence, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.checkpoints.models.kimi_k3.attention import DeltaAttention, GatedLatentAttention
from shardwright.checkpoints.models.kimi_k3.delta_rule import delta_rule as whole_rule
from shardwright.checkpoints.models.kimi_k3.norms import wide
from shardwright.runtime.context import active
from shardwright.runtime.context_delta import convolution, delta_rule
from shardwright.runtime.context_latent import attended_latents
from shardwright.runtime.context_layers import current, on_cut_rows, part_by_part


def cut_latent(module: GatedLatentAttention) -> None:
    """The latent attention without positions, with its gate: expanded from the latents of all tokens."""
    original: Callable[..., Tensor] = module.forward

    def forward(x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        cut = active()
        if cut is None:
            return original(x, attention_mask)
        B, T, _ = x.shape
        query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))).view(B, T, module.heads, -1).transpose(1, 2)
        latent, extra = module.kv_a_proj_with_mqa(x).split([module.rank, module.extra], dim=-1)
        own = torch.cat((module.kv_a_layernorm(latent), extra), dim=-1).unsqueeze(1)
        out = attended_latents(cut, query, own, module.kv_b_proj, (module.rank, module.nope, module.value))
        out = out.transpose(1, 2).reshape(B, T, -1)
        result: Tensor = module.o_proj(out * torch.sigmoid(wide(module.g_proj(x))).to(x.dtype))
        return result

    module.forward = forward  # type: ignore[method-assign]


def cut_delta(module: DeltaAttention) -> None:
    """The delta-rule layer: its own forward with the recurrence and the convolutions over cut rows."""
    short: Callable[..., Tensor] = module._short

    def mixed(conv: nn.Conv1d, x: Tensor) -> Tensor:
        cut = active()
        return short(conv, x) if cut is None else F.silu(convolution(x, conv.weight.squeeze(1).to(x.dtype), None, cut))

    module._short = mixed  # type: ignore[method-assign]
    on_cut_rows(module, {"delta_rule": _rule})


def _rule(*streams: Tensor) -> tuple[Tensor, None]:
    """The recurrence in the model's own spelling, over cut rows."""

    def run(parts: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = parts
        return whole_rule(q, k, v, g, beta, state)

    found: Any = delta_rule(part_by_part(run), streams, current())
    return found, None
