"""Kimi Delta Attention with the recurrence as one operator; projections, short convolution and gated norm stay.

The operator takes raw gate and beta, normalises q and k itself, and knows documents by their bounds. The convolution
keeps documents apart by leaving out the taps that lie before a document's first token.
Legend: B batch, S tokens, H heads, D head width, C channels (3 · H · D), J taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.fused_delta_layer import flat_bounds, fused_delta_layer
from shardwright.runtime.fused_delta_rule import CACHES, fused_delta_rule
from shardwright.runtime.segments import Bounds, active
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision

CHILDREN = ("q_proj", "k_proj", "v_proj", "conv1d", "forget_gate", "b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj")


def fused_kda(module: nn.Module, name: str, decision: FusionDecision) -> Callable[..., Tensor]:
    """The forward of a KDA layer [B, S, hidden] → [B, S, hidden].

    A plan that names ``operators`` proves the whole layer (``fused_delta_layer``); one that names a ``rule`` alone
    proves the recurrence, and exchanges it alone (``fused_delta_rule``).

    Raises:
        LegalityError: ``fusion-kda`` where the module is not of that family; ``fusion-delta-rule``.
        StalePlanError: ``kernel-source``.
    """
    if "operators" in decision.constants:
        return fused_delta_layer(module, name, decision)
    if "rule" in decision.constants:
        return fused_delta_rule(module, name, decision)
    missing = [child for child in CHILDREN if not hasattr(module, child)]
    if missing or getattr(module, "activation", "silu") != "silu":
        raise LegalityError(
            "fusion-kda",
            f"{type(module).__name__} lacks {', '.join(missing) or 'the silu activation'}",
            where=name,
            next_action="reject the kda proposal for this family",
        )
    op: Callable[..., tuple[Tensor, Tensor | None]] = OPERATORS["kda"].load_op()
    family: Any = module
    original: Callable[..., Tensor] = module.forward

    def forward(hidden_states: Tensor, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if args or attention_mask is not None or any(kwargs.get(key) is not None for key in CACHES):
            return original(hidden_states, *args, attention_mask=attention_mask, **kwargs)
        bounds = active()
        lead = hidden_states.shape[:2]
        heads = (*lead, -1, family.head_dim)
        mixed = torch.cat([proj(hidden_states) for proj in (family.q_proj, family.k_proj, family.v_proj)], dim=-1)
        mixed = F.silu(short_convolution(mixed, family.conv1d.weight.squeeze(1), bounds))
        q, k, v = (part.reshape(heads) for part in mixed.chunk(3, dim=-1))
        gate = family.forget_gate
        raw = gate.f_b_proj(gate.f_a_proj(hidden_states)).view(heads)
        beta = family.b_proj(hidden_states)
        parts = [q, k, v, raw, beta]
        if bounds is not None:
            parts = [part.reshape(1, -1, *part.shape[2:]) for part in parts]
        out, _ = op(
            *(part.contiguous() for part in parts),
            gate.A_log.reshape(-1),
            gate.dt_bias.view(-1, family.head_dim),
            gate="softplus",
            cu_seqlens=None if bounds is None else flat_bounds(bounds),
        )
        opening = family.g_b_proj(family.g_a_proj(hidden_states)).view(heads)
        normed = family.o_norm(out.reshape(heads), opening).reshape(*lead, -1)
        result: Tensor = family.o_proj(normed)
        return result

    return forward


def short_convolution(x: Tensor, weight: Tensor, bounds: Bounds | None) -> Tensor:
    """Depthwise causal convolution: x [B, S, C], weight [C, J], the last tap on the token itself → [B, S, C]."""
    taps = weight.shape[-1]
    if bounds is None:
        padded = F.pad(x.mT.to(weight.dtype), (taps - 1, 0))
        return F.conv1d(padded, weight.unsqueeze(1), groups=weight.shape[0]).mT.to(x.dtype)
    starts = torch.zeros(x.shape[:2], dtype=torch.int64)
    for place, row in enumerate(bounds):
        for start, stop in pairwise(row):
            starts[place, start:stop] = torch.arange(stop - start)
    within = starts.to(x.device).unsqueeze(-1)
    wide = x.to(weight.dtype)
    out = wide * weight[:, -1]
    for back in range(1, taps):
        earlier = F.pad(wide, (0, 0, back, 0))[:, : x.shape[1]]
        out = out + torch.where(within >= back, earlier, 0) * weight[:, taps - 1 - back]
    return out.to(x.dtype)
