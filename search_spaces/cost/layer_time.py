"""Compute time of one layer for one micro-batch, forward and backward, by term, for all plans at once.

Backward of a frozen linear is its input gradient only: as many flops as forward. An adapter's
backward is twice its forward.

Legend: T tokens, S tokens of a sequence, R routed rows, H hidden, I expert width, N parameters,
n·d query width, b bytes per value, r LoRA rank, t = TP degree, e = EP degree, t_x = expert TP degree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.cost.activations import adapter_copies_bytes
from shardwright.search_spaces.cost.attention_time import attention_time
from shardwright.search_spaces.cost.compute import (
    ADAPTER_GRADIENT_SHARE,
    HEAD_CHAIN_SHARE,
    TORCH_ADAPTER_SHARE,
    Rates,
)
from shardwright.search_spaces.cost.family import eager_gate, gate_cost
from shardwright.search_spaces.cost.formats import dequantised_bytes, expert_bytes
from shardwright.search_spaces.cost.fusion import FusedProviders, kernel_cost
from shardwright.search_spaces.cost.launches import launches_of
from shardwright.search_spaces.cost.plans import Array, Plans, per_value
from shardwright.search_spaces.cost.residuals import has_rows, residual_moves
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.providers import PROVIDERS, ROW_PASSES, provider_cost

ROTARY_PASSES = (12, 16)
"""Reads and writes of q and k by rotary embedding and head layout, (forward, backward), where heads have no norm of
their own; assumed."""

LAYOUT_PASSES = (0, 2)
"""The same of head layout alone: gradients of q and k are copied."""

QK_KERNEL_PASSES = (2, 3)
"""The same where one kernel normalises and turns them: its own cost, beside which tables and weights are nothing."""

COUNTED_ROWS = 4096
"""Rows at which the kernels of a MoE layer are counted: launches do not depend on them."""

EAGER_ROW_PASSES = (7, 12)
"""Reads and writes of [R, H] around the grouped products by torch, counted in the code that runs (``experts/rows.py``,
forward and backward): gather, back, weighting, sum; in backward also the weights' gradient."""

EAGER_TOKEN_PASSES = (1, 2)
"""The same of [T, H]: sums over a token's experts, and the gradients they come from."""

HALVES_PASSES = (0, 4)
"""The same of [R, I] beside the gate's own (``family.eager_gate``): its halves' gradients are put side by side."""

BEHIND_ATTENTION = ("adapters", "experts", "expert_rows", "dequantise")
"""Terms of a layer that an adapter on its experts needs in backward."""

Pair = tuple[Array, Array]


@dataclass(frozen=True)
class LayerTime:
    """Seconds by term, (forward, backward) each, and launches."""

    terms: dict[str, Pair]
    launches: tuple[float, float]
    attention_launches: tuple[float, float] = (0.0, 0.0)
    """Of them those of an unfused linear attention."""
    received_launches: tuple[float, float] = (0.0, 0.0)
    """Besides, where the rows of experts have travelled."""
    ends_early: float = 0.0
    """Share of the experts' forward that a recomputation leaves out, with the sums behind it."""
    saved_launches: float = 0.0
    """Besides, in each forward of a recomputed layer: what an unfused linear attention saves."""

    @property
    def behind_attention(self) -> LayerTime:
        """What flows back where the model's first adapter is the experts': nothing reaches what stands before."""
        kept = {name: pair for name, pair in self.terms.items() if name in BEHIND_ATTENTION}
        forward, backward = (n - a for n, a in zip(self.launches, self.attention_launches, strict=True))
        return LayerTime(kept, (forward, backward), received_launches=self.received_launches)

    @property
    def forward(self) -> Array:
        return sum((forward for forward, _ in self.terms.values()), start=np.zeros(()))

    @property
    def recomputed(self) -> Array:
        """Of a forward, what is run again: a checkpoint's recomputation ends with the last tensor that is read."""
        if not self.ends_early:
            return self.forward
        return self.forward - self.ends_early * self.terms["experts"][0] - self.terms["expert_rows"][0]

    @property
    def backward(self) -> Array:
        return sum((backward for _, backward in self.terms.values()), start=np.zeros(()))


def layer_time(
    work: Workload, layer: LayerWork, plans: Plans, rates: Rates, fused: FusedProviders, tokens: Array, rows: Array
) -> LayerTime:
    """All compute terms of one layer."""
    terms = {
        "dense_linears": _dense(work, layer, plans, rates, tokens),
        "attention": attention_time(work, layer, plans, rates, fused, tokens),
        "norms": _norms(work, rates, fused, tokens),
        "residual_and_rotary": _elementwise(work, layer, rates, fused, tokens),
        "adapters": _with_casts(work, layer, plans, rates, _adapters(work, layer, rates, fused, tokens, rows)),
    }
    if has_rows(work):
        terms["residual_mixes"] = _residual_mixes(work, layer, rates, fused, tokens)
    if layer.routed:
        terms["experts"] = _experts(work, layer, plans, rates, fused, rows)
        terms["expert_rows"] = _expert_rows(work, rates, fused, rows, tokens)
    if np.any(plans.format):
        packed = rates.traffic_s(dequantised_bytes(work, layer, plans, rows))
        terms["dequantise"] = packed, packed
    counted = launches_of(work, layer, fused, _norm_costs(work, fused, COUNTED_ROWS))
    early = _left_out(work, layer, fused)
    return LayerTime(terms, counted.layer, counted.attention, counted.received, early, counted.saved)


def _left_out(work: Workload, layer: LayerWork, fused: FusedProviders) -> float:
    """The down product's share of the experts where one operator is the whole layer, whose backward reads nothing of
    what that product gives; shared experts run before it (``runtime/experts/shared.py``)."""
    if not layer.routed or fused.kernel("experts") != "moe_layer":
        return 0.0
    return 1 / 3 if work.profile.shape.gated_mlp else 1 / 2


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


def _norms(work: Workload, rates: Rates, fused: FusedProviders, tokens: Array) -> Pair:
    """Two norms of hidden width, and those of queries and keys, by the plan's providers; eager ones also turn them."""

    def moved(count: int) -> tuple[float, ...]:
        """Bytes (forward, backward) by kernels of one pass, by eager chains, and by those over heads."""
        found = np.zeros((3, 2))
        for op, share, cost in _norm_costs(work, fused, count):
            way = 0 if cost.provider != "eager" else 2 if op == "qk_norm_rope" else 1
            found[way] += [share * (one.bytes_read + one.bytes_written) for one in _passes(cost)]
        return tuple(found.reshape(-1))

    whole, chains, heads = per_value(tokens, moved).reshape(3, 2, -1)
    seconds = rates.traffic_s(whole) + rates.chain_s(chains) + rates.chain_s(heads, HEAD_CHAIN_SHARE)
    return seconds[0], seconds[1]


def _turned_by_norms(work: Workload, fused: FusedProviders) -> bool:
    """Whether the eager norms over heads, with the rotation behind them, are priced as one chain."""
    return work.head_norms and not fused.kernel("qk_norm_rope") and not fused.norms_heads


def _norm_costs(work: Workload, fused: FusedProviders, tokens: int) -> list[tuple[str, float, OpCost]]:
    """(operator, how many in a layer, cost of one) for each way that a layer's norms run."""
    shape, sizes = {"T": tokens, "H": work.hidden}, work.profile.shape
    found = []
    for op, share in fused.norms(sizes.num_layers).items():
        if share and op == "eager":
            found.append(("rms_norm", share, provider_cost("rms_norm", "eager", shape, work.dtype)))
        elif share:
            found.append((op, share, fused.cost(op, shape, work.dtype)))
    if _turned_by_norms(work, fused):
        heads = {"Q": sizes.num_attention_heads, "K": sizes.num_key_value_heads, "D": sizes.head_dim}
        cost = provider_cost("qk_norm_rope", "eager", {"T": tokens, **heads, "W": sizes.head_dim}, work.dtype)
        found.append(("qk_norm_rope", 1.0, cost))
    elif work.head_norms and not fused.kernel("qk_norm_rope"):
        both = {"T": tokens, "H": work.query_width + work.key_width}
        found.append(("rms_norm", 1.0, fused.cost("rms_norm", both, work.dtype)))
    return found


def _elementwise(work: Workload, layer: LayerWork, rates: Rates, fused: FusedProviders, tokens: Array) -> Pair:
    """Residual adds outside fused norms (3·b·H each), where these are one row; rotary passes over q and k; the gate of
    a dense MLP."""
    b = work.base_bytes
    adds = 2 - fused.norms(work.profile.shape.num_layers)["add_rms_norm"]
    residual = adds * 3 * b * work.hidden
    rotary = b * (work.query_width + work.key_width)
    turns = QK_KERNEL_PASSES if fused.kernel("qk_norm_rope") else ROTARY_PASSES
    if _turned_by_norms(work, fused):
        turns = LAYOUT_PASSES
    gate = np.zeros((2, *tokens.shape))
    if layer.mlp_width:

        def moved(count: int) -> tuple[float, ...]:
            cost = gate_cost(work, fused, count, layer.mlp_width)
            return tuple(float(one.bytes_read + one.bytes_written) for one in _passes(cost))

        gate = per_value(tokens, moved)
    residual = 0.0 if has_rows(work) else residual

    def one(at: int) -> Array:
        return np.asarray(rates.traffic_s(tokens * (residual + turns[at] * rotary) + gate[at]))

    return one(0), one(1)


def _residual_mixes(work: Workload, layer: LayerWork, rates: Rates, fused: FusedProviders, tokens: Array) -> Pair:
    """Attention residuals or hyper-connections, with their sums: chains of torch's operators, or one kernel a mix."""
    moved = residual_moves(work, layer, fused)

    def one(at: int) -> Array:
        return np.asarray(rates.chain_s(tokens * moved.chains[at]) + rates.traffic_s(tokens * moved.operator[at]))

    return one(0), one(1)


def _adapters(
    work: Workload, layer: LayerWork, rates: Rates, fused: FusedProviders, tokens: Array, rows: Array
) -> Pair:
    """2·r·(in + out) flops per token or row, backward twice; narrow products, so mostly traffic.

    On experts that a kernel runs, only what it declares to move beyond the same rows without adapters.
    """
    lora, b = layer.adapters, work.base_bytes
    own = rates.gemm_s(2.0 * tokens * lora.dense_features, b * tokens * lora.dense_traffic, tokens)
    if fused.provider("experts") in PROVIDERS or not lora.expert_ranks:
        each = rates.chain_s(b * rows * lora.expert_traffic, TORCH_ADAPTER_SHARE)
        each = rates.gemm_s(2.0 * rows * lora.expert_features, each * rates.bandwidth, tokens)
        return own + each, 2 * (own + each)
    shape, rank = work.profile.shape, max(1, round(lora.expert_ranks / 2))
    sizes = {
        "R": COUNTED_ROWS, "H": work.row_width, "I": shape.expert_intermediate_size, "E": shape.num_experts
    }  # fmt: skip
    with_, without = (_passes(kernel_cost("experts", {**sizes, "r": r}, work.dtype)) for r in (rank, 0))
    moved = [
        (one.bytes_read + one.bytes_written - two.bytes_read - two.bytes_written) / COUNTED_ROWS
        for one, two in zip(with_, without, strict=True)
    ]
    stacks = b * lora.expert_parameters
    flops = 2.0 * rows * lora.expert_features
    fixed = [stacks / COUNTED_ROWS * factor for factor in (1, 2)]
    return (
        own + rates.gemm_s(flops, rows * (moved[0] - fixed[0]) + stacks, tokens),
        2 * own + rates.gemm_s(2 * flops, (rows * (moved[1] - fixed[1]) + 2 * stacks) / ADAPTER_GRADIENT_SHARE, tokens),
    )


def _with_casts(work: Workload, layer: LayerWork, plans: Plans, rates: Rates, own: Pair) -> Pair:
    """Where no gather brings an adapter to the computed dtype, each pass does, its gradients the other way."""
    copied = adapter_copies_bytes(work, layer, plans) / work.base_bytes
    moved = rates.traffic_s(copied * (work.base_bytes + work.adapter_bytes))
    return own[0] + moved, own[1] + moved


def _experts(work: Workload, layer: LayerWork, plans: Plans, rates: Rates, fused: FusedProviders, rows: Array) -> Pair:
    """6·R·H·I/t_x flops over local experts; bytes: local weights once a chunk, packed ones as they are stored where no
    copy is decoded, and rows b·(2·H + 3·I/t_x)."""
    shape, b = work.profile.shape, work.base_bytes
    local = np.maximum(shape.num_experts // plans.ep, 1)
    flops = 2.0 * rows * layer.expert_parameters / shape.num_experts / plans.expert_tp
    touched = np.minimum(1.0, rows / plans.chunks / local) * layer.expert_parameters / (plans.ep * plans.expert_tp)
    width = 2 * work.row_width + 3 * shape.expert_intermediate_size / plans.expert_tp
    moved, each = b * (plans.chunks * touched + rows * width), rows / plans.chunks / local
    if fused.provider("experts") in PROVIDERS:
        once = rates.grouped_s(flops, moved, each, library=True)
        return once, once
    once = rates.tiled_s(flops, moved, each)
    decoded = (plans.format > 0) & (dequantised_bytes(work, layer, plans, rows) == 0)
    if np.any(decoded):
        packed = plans.chunks * touched * expert_bytes(work, plans) + b * rows * width
        once = np.where(decoded, rates.decoded_s(flops, packed, each), once)
    return once, once


def _expert_rows(work: Workload, rates: Rates, fused: FusedProviders, rows: Array, tokens: Array) -> Pair:
    """Sort, gather, activation, weighting, combine: by torch passes over [R, H], [T, H] and [R, I]; by a kernel
    b·H·(R + T), and its activation's gradient over 6·R·I."""
    provider, b, inner = fused.provider("experts"), work.base_bytes, work.profile.shape.expert_intermediate_size
    if provider not in ROW_PASSES:
        summed = b * work.row_width * (rows + tokens)
        return rates.traffic_s(summed), rates.traffic_s(summed + 6.0 * b * rows * inner)
    if provider == "compile":
        forward, backward = (count * b * rows * work.row_width for count in ROW_PASSES[provider])
        return rates.traffic_s(forward), rates.traffic_s(backward)

    def chain(at: int) -> Array:
        wide = EAGER_ROW_PASSES[at] * rows + EAGER_TOKEN_PASSES[at] * tokens
        gate = eager_gate(work.profile.model_type, work.dtype)[0][at] + b * HALVES_PASSES[at]
        return np.asarray(rates.chain_s(b * work.row_width * wide + gate * inner * rows))

    return chain(0), chain(1)
