"""Compute time of one layer for one micro-batch, forward and backward, by term, for all plans at once.

Backward of a frozen linear is its input gradient only: as many flops as forward. An adapter's
backward is twice its forward.

Legend: T tokens, S tokens of a sequence, R routed rows, H hidden, I expert width, N parameters,
n·d query width, b bytes per value, r LoRA rank, t = TP degree, e = EP degree, t_x = expert TP degree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.cost.compute import ATTENTION_BACKWARD, Rates
from shardwright.search_spaces.cost.formats import dequantised_bytes
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.plans import Array, Plans
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.providers import ROW_PASSES, provider_cost

OTHER_LAUNCHES = (45, 70)
"""Kernels of one eager layer beside norms and experts, (forward, backward): projections, rotary,
attention, residuals; assumed."""

ROTARY_PASSES = (12, 16)
"""Reads and writes of q and k by rotary embedding and head layout, (forward, backward); assumed."""

ADAPTER_LAUNCHES = (5, 8)
"""Kernels of one LoRA target, (forward, backward): two products, casts, scale, add; assumed."""

COUNTED_ROWS = 4096
"""Rows at which the kernels of a MoE layer are counted: launches do not depend on them."""

Pair = tuple[Array, Array]


@dataclass(frozen=True)
class LayerTime:
    """Seconds by term, (forward, backward) each, and launches."""

    terms: dict[str, Pair]
    launches: tuple[float, float]

    @property
    def forward(self) -> Array:
        return sum((forward for forward, _ in self.terms.values()), start=np.zeros(()))

    @property
    def backward(self) -> Array:
        return sum((backward for _, backward in self.terms.values()), start=np.zeros(()))


def per_value(values: Array, function: Callable[[int], tuple[float, ...]]) -> Array:
    """``function`` of every distinct value, spread over the column: [results, plans]."""
    unique, inverse = np.unique(values, return_inverse=True)
    return np.array([function(int(value)) for value in unique], dtype=np.float64)[inverse.reshape(-1)].T


def layer_time(
    work: Workload, layer: LayerWork, plans: Plans, rates: Rates, fused: FusedProviders, tokens: Array, rows: Array
) -> LayerTime:
    """All compute terms of one layer."""
    terms = {
        "dense_linears": _dense(work, layer, plans, rates, tokens),
        "attention": _attention(work, layer, rates, tokens),
        "norms": _norms(work, rates, fused, tokens),
        "residual_and_rotary": _elementwise(work, layer, rates, fused, tokens),
        "adapters": _adapters(work, layer, rates, tokens, rows),
    }
    launches = [float(OTHER_LAUNCHES[i] + ADAPTER_LAUNCHES[i] * layer.adapters.targets) for i in (0, 1)]
    if layer.routed:
        terms["experts"] = _experts(work, layer, plans, rates, rows)
        terms["expert_rows"] = _expert_rows(work, rates, fused, rows)
        shape = work.profile.shape
        counted = {
            "R": COUNTED_ROWS,
            "H": work.row_width,
            "I": shape.expert_intermediate_size,
            "E": shape.num_experts,
        }
        launches = [
            n + p.launches for n, p in zip(launches, _passes(fused.cost("experts", counted, work.dtype)), strict=True)
        ]
    for share, norm in _norm_costs(work, fused, COUNTED_ROWS):
        launches = [n + share * p.launches for n, p in zip(launches, _passes(norm), strict=True)]
    if np.any(plans.format):
        packed = rates.traffic_s(dequantised_bytes(work, layer, plans))
        terms["dequantise"] = packed, packed
    return LayerTime(terms, (launches[0], launches[1]))


def _passes(cost: OpCost) -> tuple[PassCost, PassCost]:
    return cost.forward, cost.backward or cost.forward


def _dense(work: Workload, layer: LayerWork, plans: Plans, rates: Rates, tokens: Array) -> Pair:
    """2·T·N flops; weights once (N/t), activations in and out about 2·b·T·(H + N/H)."""
    flops = 2.0 * tokens * layer.dense_parameters
    moved = work.base_bytes * (
        layer.dense_parameters / plans.tp + 2 * tokens * (work.hidden + layer.dense_parameters / work.hidden)
    )
    once = rates.gemm_s(flops, moved, tokens * plans.tp)
    return once, once


def _attention(work: Workload, layer: LayerWork, rates: Rates, tokens: Array) -> Pair:
    """Flops per token, causal: softmax 2·S·n·d; latent S·n·(d_qk + d_v); linear 8·d·n·d.

    Sparse: 2·min(S, k)·n·(2·r_kv + d_r) in the absorbed form, and the indexer's S·n_I·d_I.
    """
    shape, sequence = work.profile.shape, work.recipe.batch.sequence_tokens
    if layer.kind.attention == "none":
        return np.zeros_like(tokens), np.zeros_like(tokens)
    if layer.kind.attention == "linear":
        per_token = 8.0 * (shape.linear_head_dim or shape.head_dim) * work.linear_width
    elif layer.kind.attention == "dsa" and work.latent(layer):
        width = 2 * shape.kv_lora_rank + shape.qk_rope_head_dim
        per_token = 2.0 * min(sequence, shape.index_topk or sequence) * shape.num_attention_heads * width
        per_token += 1.0 * sequence * shape.index_num_heads * shape.index_head_dim
    elif work.latent(layer):
        width = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
        per_token = 1.0 * sequence * shape.num_attention_heads * width
    else:
        per_token = 2.0 * sequence * work.query_width
    once = rates.attention_s(tokens * per_token, float(sequence))
    return once, ATTENTION_BACKWARD * once


def _norms(work: Workload, rates: Rates, fused: FusedProviders, tokens: Array) -> Pair:
    """Two norms by the plan's providers."""

    def moved(count: int) -> tuple[float, float]:
        forward = backward = 0.0
        for share, cost in _norm_costs(work, fused, count):
            one, two = _passes(cost)
            forward += share * (one.bytes_read + one.bytes_written)
            backward += share * (two.bytes_read + two.bytes_written)
        return forward, backward

    forward, backward = per_value(tokens, moved)
    return rates.traffic_s(forward), rates.traffic_s(backward)


def _norm_costs(work: Workload, fused: FusedProviders, tokens: int) -> list[tuple[float, OpCost]]:
    """(how many of a layer's two norms, cost of one) for each way they run."""
    shape = {"T": tokens, "H": work.hidden}
    found = []
    for op, share in fused.norms(work.profile.shape.num_layers).items():
        if share and op == "eager":
            found.append((share, provider_cost("rms_norm", "eager", shape, work.dtype)))
        elif share:
            found.append((share, fused.cost(op, shape, work.dtype)))
    return found


def _elementwise(work: Workload, layer: LayerWork, rates: Rates, fused: FusedProviders, tokens: Array) -> Pair:
    """Residual adds outside fused norms (3·b·H each), rotary passes over q and k, SwiGLU of a dense MLP."""
    b = work.base_bytes
    adds = 2 - fused.norms(work.profile.shape.num_layers)["add_rms_norm"]
    residual = adds * 3 * b * work.hidden
    rotary = b * (work.query_width + work.key_width)
    swiglu = np.zeros((2, *tokens.shape))
    if layer.mlp_width:

        def moved(count: int) -> tuple[float, ...]:
            cost = fused.cost("swiglu", {"T": count, "I": layer.mlp_width}, work.dtype)
            return tuple(float(one.bytes_read + one.bytes_written) for one in _passes(cost))

        swiglu = per_value(tokens, moved)
    return (
        rates.traffic_s(tokens * (residual + ROTARY_PASSES[0] * rotary) + swiglu[0]),
        rates.traffic_s(tokens * (residual + ROTARY_PASSES[1] * rotary) + swiglu[1]),
    )


def _adapters(work: Workload, layer: LayerWork, rates: Rates, tokens: Array, rows: Array) -> Pair:
    """2·r·(in + out) flops per token or row; narrow products, so mostly traffic."""
    lora, b = layer.adapters, work.base_bytes
    flops = 2.0 * (tokens * lora.dense_features + rows * lora.expert_features)
    moved = b * (tokens * lora.dense_traffic + rows * lora.expert_traffic)
    once = rates.gemm_s(flops, moved, tokens)
    return once, 2 * once


def _experts(work: Workload, layer: LayerWork, plans: Plans, rates: Rates, rows: Array) -> Pair:
    """6·R·H·I/t_x flops over local experts; bytes: local weights once a chunk and rows b·(2·H + 3·I/t_x)."""
    shape, b = work.profile.shape, work.base_bytes
    local = np.maximum(shape.num_experts // plans.ep, 1)
    flops = 2.0 * rows * layer.expert_parameters / shape.num_experts / plans.expert_tp
    touched = np.minimum(1.0, rows / plans.chunks / local) * layer.expert_parameters / (plans.ep * plans.expert_tp)
    width = 2 * work.row_width + 3 * shape.expert_intermediate_size / plans.expert_tp
    moved = b * (plans.chunks * touched + rows * width)
    once = rates.grouped_s(flops, moved, rows / plans.chunks / local)
    return once, once


def _expert_rows(work: Workload, rates: Rates, fused: FusedProviders, rows: Array) -> Pair:
    """Sort, gather, activation, weighting, combine: passes over R × H."""
    provider = fused.provider("experts")
    forward, backward = ROW_PASSES.get(provider, (0, 0))
    one = work.base_bytes * rows * work.row_width
    return rates.traffic_s(forward * one), rates.traffic_s(backward * one)
