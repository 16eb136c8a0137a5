"""A linear-attention layer between its projections by our operators: plain references, contracts, sizes.

Legend: B batch, T tokens, H key heads, HV value heads, K key width, V value width, C channels, J taps.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.agents.structure.patterns.base import Tensors
from shardwright.agents.structure.patterns.delta_rule import rule_sizes
from shardwright.agents.structure.patterns.delta_rule_spelling import Constants, Sizes, parts

OPERATORS = {
    "channels": ("kda", "short_conv", "gated_rms_norm"),
    "heads": ("gated_delta", "short_conv", "gated_rms_norm"),
}
"""Form → the operators that compute the region, the recurrence's own first."""


def by_kernels(values: Tensors, c: Constants) -> Tensors:
    """The region by the plain references of our kernels."""
    from shardwright.kernels.gated_delta.reference import gated_delta_recurrent_reference
    from shardwright.kernels.gated_rms_norm.reference import gated_rms_norm_reference
    from shardwright.kernels.kda.reference import kda_recurrent_reference
    from shardwright.kernels.short_conv.reference import short_conv_reference

    sizes = Sizes.of(values, c)
    flat = [short_conv_reference(x, weight.squeeze(1))[0] for x, weight in parts(values, c, sizes)]
    q, k, v = sizes.parted(flat)
    raw, bias = values["decay"], values["dt_bias"]
    rate = values["a_log"].reshape(-1)[: sizes.value_heads]
    settings: dict[str, Any] = {"gate": c["gate"]}
    rule: Any = gated_delta_recurrent_reference
    if c["form"] == "channels":
        rule = kda_recurrent_reference
        raw = raw.reshape(*raw.shape[:2], sizes.value_heads, -1)
        bias = bias.reshape(raw.shape[2:])
        settings["lower_bound"] = c.get("lower_bound", -1.0)
    o, _ = rule(q, k, v, raw, values["beta"], rate, bias, **settings)
    y = gated_rms_norm_reference(o, values["gate"].reshape(o.shape), values["norm_weight"], c["eps"], c["act"])
    return {"y": y.flatten(-2)}


def check(values: Tensors, c: Constants, op: str) -> None:
    """The contracts of all operators on tensors like those that a worker passes.

    Args:
        values: meta tensors by role, in the formats that run.

    Raises:
        KernelError: what a contract refuses.
    """
    from shardwright.kernels.gated_delta import contract as of_heads
    from shardwright.kernels.gated_rms_norm import contract as norm
    from shardwright.kernels.kda import contract as of_channels
    from shardwright.kernels.short_conv import contract as conv

    sizes = Sizes.of(values, c)
    flat = []
    for x, weight in parts(values, c, sizes):
        conv.check_static(x, weight.squeeze(1), None, count=x.shape[0])
        flat.append(x)
    q, k, v = sizes.parted(flat)
    B, T, HV, _ = v.shape
    rate = values["a_log"].reshape(-1)[:HV]
    if op == "gated_delta":
        bias = values["dt_bias"]
        of_heads.check_static(q, k, v, values["decay"], values["beta"], rate, bias, None, gate=c["gate"], count=B)
    else:
        raw, bias = values["decay"].reshape(B, T, HV, -1), values["dt_bias"].reshape(HV, -1)
        bound = c.get("lower_bound", of_channels.LOWEST)
        of_channels.check_static(
            q, k, v, raw, values["beta"], rate, bias, None, gate=c["gate"], lower_bound=bound, count=B
        )
    o = torch.empty_like(v)
    norm.check_static(o, values["gate"].reshape(o.shape), values["norm_weight"], c["eps"], c["act"])


def counted(c: Constants, taps: int, tokens: int) -> tuple[tuple[str, dict[str, int]], ...]:
    """Every call of an operator in the region with the named sizes of its cost, of one occurrence.

    q, k and v are convolved apart: joined, they would be copied before the convolution and again behind it.
    """
    sizes = Sizes(c["heads"], c["value_heads"], c["key_width"], c["value_width"])
    rule, conv, norm = OPERATORS[c["form"]]
    return (
        *((conv, {"T": tokens, "C": width, "J": taps}) for width in sizes.channels),
        (rule, rule_sizes(layer_sizes(c, taps, tokens))),
        (norm, {"T": tokens, "H": sizes.value_heads, "D": sizes.value_width}),
    )


def layer_sizes(c: Constants, taps: int, tokens: int) -> dict[str, int]:
    """Named sizes of a whole layer; ``channels`` is 1 where each key channel decays by itself."""
    heads = {"H": c["heads"], "HV": c["value_heads"], "K": c["key_width"], "V": c["value_width"]}
    return {"T": tokens, **heads, "J": taps, "channels": int(c["form"] == "channels")}
