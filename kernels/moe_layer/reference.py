"""The whole MoE layer in plain torch: the meaning that the fused operator must have.

Legend: T tokens, K experts a token, E experts, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.reference import Adapter, grouped_lora_mlp_reference
from shardwright.kernels.permute.reference import combine_reference, route_reference


def moe_layer_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_adapter: Adapter | None,
    down_adapter: Adapter | None,
    activation: Activation,
    layout: Layout,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """``out[t] = Σ_k weights[t, k] · MLP_{ids[t, k]}(x[t])``; ids outside 0 .. E-1 add nothing."""
    counts, entry, place = route_reference(ids, gate_up.shape[0])
    routed = int(counts.sum())
    rows = x[torch.div(entry[:routed], ids.shape[1], rounding_mode="floor")]
    adapters, biases = (up_adapter, down_adapter), (up_bias, down_bias)
    y = grouped_lora_mlp_reference(rows, counts, gate_up, down, *adapters, activation, layout, *biases)
    return combine_reference(y, place, weights)
