"""Compute time of one layer for one micro-batch, forward and backward, by term.

Backward of a frozen linear is its input gradient only: as many flops as forward. An adapter's
backward is twice its forward.

Legend: T tokens, S tokens of a sequence, R routed rows, H hidden, I expert width, N parameters,
n·d query width, b bytes per value, r LoRA rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.schemas.ops import OpCost, PassCost
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.cost.compute import ATTENTION_BACKWARD, Rates
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.providers import ROW_PASSES, provider_cost

OTHER_LAUNCHES = (45, 70)
"""Kernels of one eager layer beside norms and experts, (forward, backward): projections, rotary,
attention, residuals; assumed."""

ROTARY_PASSES = (12, 16)
"""Reads and writes of q and k by rotary embedding and head layout, (forward, backward); assumed."""

ADAPTER_LAUNCHES = (5, 8)
"""Kernels of one LoRA target, (forward, backward): two products, casts, scale, add; assumed."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds by term, (forward, backward) each, and launches."""

    terms: dict[str, tuple[float, float]]
    launches: tuple[float, float]

    @property
    def forward(self) -> float:
        return sum(forward for forward, _ in self.terms.values())

    @property
    def backward(self) -> float:
        return sum(backward for _, backward in self.terms.values())


def layer_time(
    work: Workload,
    layer: LayerWork,
    strategy: ParallelStrategy,
    rates: Rates,
    fused: FusedProviders,
    tokens: int,
    rows: int,
) -> LayerTime:
    """All compute terms of one layer."""
    terms = {
        "dense_linears": _dense(work, layer, rates, tokens),
        "attention": _attention(work, layer, rates, tokens),
        "norms": _norms(work, rates, fused, tokens),
        "residual_and_rotary": _elementwise(work, layer, rates, fused, tokens),
        "adapters": _adapters(work, layer, rates, tokens, rows),
    }
    launches = [float(OTHER_LAUNCHES[i] + ADAPTER_LAUNCHES[i] * layer.adapters.targets) for i in (0, 1)]
    if layer.routed:
        terms["experts"] = _experts(work, layer, strategy, rates, rows)
        terms["expert_rows"] = _expert_rows(work, rates, fused, rows)
        shape = work.profile.shape
        whole = fused.cost(
            "experts",
            {"R": rows, "H": work.hidden, "I": shape.expert_intermediate_size, "E": shape.num_experts},
            work.dtype,
        )
        launches = [n + p.launches for n, p in zip(launches, _passes(whole), strict=True)]
    for share, norm in _norm_costs(work, fused, tokens):
        launches = [n + share * p.launches for n, p in zip(launches, _passes(norm), strict=True)]
    return LayerTime(terms, (launches[0], launches[1]))


def _passes(cost: OpCost) -> tuple[PassCost, PassCost]:
    return cost.forward, cost.backward or cost.forward


def _dense(work: Workload, layer: LayerWork, rates: Rates, tokens: int) -> tuple[float, float]:
    """2·T·N flops; weights once, activations in and out about 2·b·T·(H + N/H)."""
    flops = 2.0 * tokens * layer.dense_parameters
    moved = work.base_bytes * (
        layer.dense_parameters + 2 * tokens * (work.hidden + layer.dense_parameters / work.hidden)
    )
    once = rates.gemm_s(flops, moved, tokens)
    return once, once


def _attention(work: Workload, layer: LayerWork, rates: Rates, tokens: int) -> tuple[float, float]:
    """Causal softmax attention 2·S·n·d flops per token; linear attention 8·d·n·d per token."""
    if layer.kind.attention == "none":
        return 0.0, 0.0
    sequence = work.recipe.batch.sequence_tokens
    span = 4 * work.profile.shape.head_dim if layer.kind.attention == "linear" else sequence
    once = rates.attention_s(2.0 * tokens * span * work.query_width, sequence)
    return once, ATTENTION_BACKWARD * once


def _norms(work: Workload, rates: Rates, fused: FusedProviders, tokens: int) -> tuple[float, float]:
    """Two norms by the plan's providers."""
    forward = backward = 0.0
    for share, cost in _norm_costs(work, fused, tokens):
        one, two = _passes(cost)
        forward += share * rates.traffic_s(one.bytes_read + one.bytes_written)
        backward += share * rates.traffic_s(two.bytes_read + two.bytes_written)
    return forward, backward


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


def _elementwise(
    work: Workload, layer: LayerWork, rates: Rates, fused: FusedProviders, tokens: int
) -> tuple[float, float]:
    """Residual adds outside fused norms (3·b·H each), rotary passes over q and k, SwiGLU of a dense MLP."""
    b = work.base_bytes
    adds = 2 - fused.norms(work.profile.shape.num_layers)["add_rms_norm"]
    residual = adds * 3 * b * work.hidden
    rotary = b * (work.query_width + work.key_width)
    swiglu = [0, 0]
    if layer.mlp_width:
        passes = _passes(fused.cost("swiglu", {"T": tokens, "I": layer.mlp_width}, work.dtype))
        swiglu = [one.bytes_read + one.bytes_written for one in passes]
    return (
        rates.traffic_s(tokens * (residual + ROTARY_PASSES[0] * rotary) + swiglu[0]),
        rates.traffic_s(tokens * (residual + ROTARY_PASSES[1] * rotary) + swiglu[1]),
    )


def _adapters(work: Workload, layer: LayerWork, rates: Rates, tokens: int, rows: int) -> tuple[float, float]:
    """2·r·(in + out) flops per token or row; narrow products, so mostly traffic."""
    lora, b = layer.adapters, work.base_bytes
    flops = 2.0 * (tokens * lora.dense_features + rows * lora.expert_features)
    moved = b * (tokens * lora.dense_traffic + rows * lora.expert_traffic)
    forward = rates.gemm_s(flops, moved, tokens)
    return forward, 2 * forward


def _experts(
    work: Workload, layer: LayerWork, strategy: ParallelStrategy, rates: Rates, rows: int
) -> tuple[float, float]:
    """6·R·H·I flops over local experts; bytes: local weights once and rows b·(2·H + 3·I)."""
    shape, b = work.profile.shape, work.base_bytes
    local = max(shape.num_experts // strategy.mesh.ep, 1)
    flops = 2.0 * rows * layer.expert_parameters / shape.num_experts
    touched = min(1.0, rows / local) * layer.expert_parameters / strategy.mesh.ep
    moved = b * (touched + rows * (2 * work.hidden + 3 * shape.expert_intermediate_size))
    once = rates.grouped_s(flops, moved, rows / local)
    return once, once


def _expert_rows(work: Workload, rates: Rates, fused: FusedProviders, rows: int) -> tuple[float, float]:
    """Sort, gather, activation, weighting, combine: passes over R × H."""
    provider = fused.provider("experts")
    forward, backward = ROW_PASSES.get(provider, (0, 0))
    one = work.base_bytes * rows * work.hidden
    return rates.traffic_s(forward * one), rates.traffic_s(backward * one)
