"""A linear-attention layer between its projections, spelled as the families spell it and once by independent formulas.

    q, k, v = silu(conv(·)),  β = σ(b),  g = bound · σ(e^A (raw + bias))  or  −e^A softplus(raw + bias)
    S ← diag(e^g) S;  S ← S + β k̂ (v − k̂ᵀS)ᵀ;  o = Sᵀ q̂ K^(−1/2);  y = w · o / sqrt(mean(o²) + ε) · act(gate)

Legend: B batch, T tokens, H key heads, HV value heads, K key width, V value width, C channels, J taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.agents.structure.patterns.base import Tensors

Constants = dict[str, Any]
STREAMS = ("q", "k", "v")
UNIT_EPS = 1e-6
"""Beside the sum of squares, in the families and in the operators."""
STEEP = 20.0
"""From here on a spelled softplus is its argument."""


@dataclass(frozen=True)
class Sizes:
    """Heads and widths of one layer's values."""

    heads: int
    value_heads: int
    key_width: int
    value_width: int

    @classmethod
    def of(cls, values: Tensors, c: Constants) -> Sizes:
        """As the values have them: a test may run fewer heads than were captured."""
        V, HV = values["norm_weight"].shape[-1], values["beta"].shape[-1]
        H = HV * c["heads"] // c["value_heads"]
        keys = values["q"].shape[-1] if "q" in values else (values["mixed"].shape[-1] - HV * V) // 2
        return cls(H, HV, keys // H, V)

    @property
    def channels(self) -> list[int]:
        """Channels of q, k and v."""
        keys = self.heads * self.key_width
        return [keys, keys, self.value_heads * self.value_width]

    def parted(self, flat: list[Tensor]) -> list[Tensor]:
        """q, k, v ``[B, T, C]`` → ``[B, T, heads, width]``."""
        each = (self.key_width, self.key_width, self.value_width)
        return [x.reshape(*x.shape[:2], -1, width) for x, width in zip(flat, each, strict=True)]


def spell(values: Tensors, c: Constants) -> Tensors:
    """The region as transformers, or the project's own K3, writes it."""
    sizes = Sizes.of(values, c)
    q, k, v = sizes.parted(_streams(values, c, sizes))
    if not c["unit"]:
        q, k = _unit(q) * c["query_scale"], _unit(k)
    raw = values["beta"]
    beta = torch.sigmoid(raw.float() if c["beta_wide"] else raw)
    g = _log_decay(values, c, sizes)
    if c["decay_narrow"]:
        g = g.to(values["decay"].dtype)
    o = torch.ops.shardwright_capture.delta_rule(q, k, v, g, beta, c["rule"], c["unit"])
    if c["rule_cast"]:
        o = o.to(v.dtype)
    if c["norm_rows"]:
        o = o.reshape(-1, sizes.value_width)
    gate = values["gate"].reshape(o.shape)
    return {"y": _gated_norm(o, gate, values["norm_weight"], c).reshape(*v.shape[:2], -1)}


def _streams(values: Tensors, c: Constants, sizes: Sizes) -> list[Tensor]:
    """q, k, v ``[B, T, C]`` after convolution and SiLU."""
    if c["conv"] == "apart":
        return [_convolved(values[role], values[f"{role}_conv_weight"], narrow=False) for role in STREAMS]
    given = [values[role] for role in STREAMS if role in values]
    mixed = torch.cat(given, dim=-1) if given else values["mixed"]
    return list(_convolved(mixed, values["conv_weight"], narrow=True).split(sizes.channels, dim=-1))


def _convolved(x: Tensor, weight: Tensor, *, narrow: bool) -> Tensor:
    """``[B, T, C]`` → the same. ``narrow``: the convolution runs in the weight's format, not in that of x."""
    T, padding = x.shape[1], weight.shape[-1] - 1
    turned = x.transpose(1, 2)
    turned, taps = (turned.to(weight.dtype), weight) if narrow else (turned, weight.to(x.dtype))
    out = F.conv1d(turned, taps, padding=padding, groups=weight.shape[0])[:, :, :T]
    if narrow:
        return F.silu(out).to(x.dtype).transpose(1, 2)
    return F.silu(out.transpose(1, 2))


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + UNIT_EPS)


def _log_decay(values: Tensors, c: Constants, sizes: Sizes) -> Tensor:
    bias = values["dt_bias"].float() if c["bias_wide"] else values["dt_bias"]
    bias = bias.view(c["bias_shape"]) if c["bias_shape"] else bias
    raw = values["decay"].float()
    heads = (*raw.shape[:2], sizes.value_heads, -1)
    biased = raw.view(heads) + bias if c["parted"] == "before" else raw + bias
    if c["parted"] == "after":
        biased = biased.view(heads)
    rate = values["a_log"]
    for step in c["rate"].split():
        if step == "exp":
            rate = rate.exp()
        elif step == "cast":
            rate = rate.float()
        elif step == "slice":
            rate = rate[: sizes.value_heads]
        else:
            rate = rate.view(c["rate_shape"])
    if c["gate"] == "bounded":
        return torch.sigmoid(rate * biased) * c["lower_bound"]
    if c["softplus"] == "library":
        return -rate * F.softplus(biased)
    return -rate * torch.where(biased > STEEP, biased, torch.log(1.0 + torch.exp(biased)))


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, c: Constants) -> Tensor:
    wide = x.to(torch.float32)
    body = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + c["eps"])
    scaled = weight * body.to(x.dtype) if c["norm"] == "rounded" else weight.to(torch.float32) * body
    act = F.silu if c["act"] == "silu" else torch.sigmoid
    return (scaled * act(gate.to(torch.float32))).to(x.dtype)


def formula(values: Tensors, c: Constants) -> Tensors:
    """The region by independent formulas: taps one by one, the state token by token, σ by the tangent."""
    from shardwright.agents.structure.patterns.delta_rule import recurrence

    sizes = Sizes.of(values, c)
    q, k, v = sizes.parted([_taps(x, weight) for x, weight in parts(values, c, sizes)])
    g = _formula_decay(values, c, sizes)
    o = recurrence(q, k, v, g, _sigma(values["beta"]))
    gate = values["gate"].reshape(o.shape)
    length = torch.sqrt((o * o).sum(-1, keepdim=True) + o.shape[-1] * c["eps"])
    opened = _sigma(gate) * (gate if c["act"] == "silu" else 1)
    return {"y": (o * o.shape[-1] ** 0.5 / length * values["norm_weight"] * opened).flatten(-2)}


def parts(values: Tensors, c: Constants, sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
    """Input ``[B, T, C]`` and weight ``[C, 1, J]`` of the convolutions of q, k and v, each by its own channels."""
    flat = [values[role] for role in STREAMS] if "q" in values else list(values["mixed"].split(sizes.channels, -1))
    if c["conv"] == "apart":
        return list(zip(flat, [values[f"{role}_conv_weight"] for role in STREAMS], strict=True))
    return list(zip(flat, values["conv_weight"].split(sizes.channels), strict=True))


def _taps(x: Tensor, weight: Tensor) -> Tensor:
    """``Σ_j w_j x[t − j]``, times its σ."""
    T, J = x.shape[1], weight.shape[-1]
    total = torch.zeros_like(x)
    for back in range(min(J, T)):
        shifted = torch.cat([torch.zeros_like(x[:, :back]), x[:, : T - back]], dim=1)
        total = total + shifted * weight[:, 0, J - 1 - back]
    return total * _sigma(total)


def _formula_decay(values: Tensors, c: Constants, sizes: Sizes) -> Tensor:
    """Log-decay ``[B, T, HV, K]``, or ``[B, T, HV]`` where a head has one."""
    raw, bias = values["decay"], values["dt_bias"]
    rate = values["a_log"].flatten()[: sizes.value_heads].exp()
    if c["form"] == "channels":
        raw = raw.reshape(*raw.shape[:2], sizes.value_heads, -1)
        bias, rate = bias.reshape(raw.shape[2:]), rate.unsqueeze(-1)
    biased = raw + bias
    if c["gate"] == "bounded":
        return c["lower_bound"] * _sigma(rate * biased)
    return -rate * (biased.clamp_min(0) + torch.log1p(torch.exp(-biased.abs())))


def _sigma(x: Tensor) -> Tensor:
    return (1 + torch.tanh(x / 2)) / 2
