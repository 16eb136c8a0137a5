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
from shardwright.search_spaces.cost import context
from shardwright.search_spaces.cost.activations import chunks_of, unfused_chunks
from shardwright.search_spaces.cost.compute import ADAPTER_GRADIENT_SHARE, KERNEL_PRODUCT_SHARE, Rates
from shardwright.search_spaces.cost.formats import dequantised_bytes
from shardwright.search_spaces.cost.fusion import FusedProviders, kernel_cost
from shardwright.search_spaces.cost.plans import Array, Plans, per_value
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.providers import PROVIDERS, ROW_PASSES, provider_cost

OTHER_LAUNCHES = (45, 70)
"""Kernels of one eager layer beside norms and experts, (forward, backward): projections, rotary,
attention, residuals; assumed."""

ROTARY_PASSES = (12, 16)
"""Reads and writes of q and k by rotary embedding and head layout, (forward, backward); assumed."""

QK_KERNEL_PASSES = (2, 3)
"""The same where one kernel normalises and turns them: its own cost, beside which tables and weights are nothing."""

ADAPTER_LAUNCHES = (5, 8)
"""Kernels of one LoRA target, (forward, backward): two products, casts, scale, add; assumed."""

CHUNK_LAUNCHES = ((9.2, 19.2), (18.3, 53.6))
"""Kernels of one unfused linear attention, forward and backward: (a row of a chunk's triangle but the first, solved one
by one; a chunk of the sequence). Counted in traces of two lengths."""

SQUARE_PASSES = (16, 26)
"""Reads and writes of fp32 [T, C, n·d] there, (forward, backward), beside ``UnfusedChunks.slice_passes``."""

COUNTED_ROWS = 4096
"""Rows at which the kernels of a MoE layer are counted: launches do not depend on them."""

BEHIND_ATTENTION = ("adapters", "experts", "expert_rows", "dequantise")
"""Terms of a layer that an adapter on its experts needs in backward."""

SCORE_PASSES = 6
"""Reads and writes of fp32 [T, n_I, S] by an eager indexer: the product, its scale, ReLU and sum over heads."""

CHOICE_BYTES = 31
"""Bytes a pair that its choice of keys moves: causal mask, sort, scatter into a mask, and that made a bias."""

Pair = tuple[Array, Array]


@dataclass(frozen=True)
class LayerTime:
    """Seconds by term, (forward, backward) each, and launches."""

    terms: dict[str, Pair]
    launches: tuple[float, float]
    attention_launches: tuple[float, float] = (0.0, 0.0)
    """Of them those of an unfused linear attention."""

    @property
    def behind_attention(self) -> LayerTime:
        """What flows back where the model's first adapter is the experts': nothing reaches what stands before."""
        kept = {name: pair for name, pair in self.terms.items() if name in BEHIND_ATTENTION}
        forward, backward = (n - a for n, a in zip(self.launches, self.attention_launches, strict=True))
        return LayerTime(kept, (forward, backward))

    @property
    def forward(self) -> Array:
        return sum((forward for forward, _ in self.terms.values()), start=np.zeros(()))

    @property
    def backward(self) -> Array:
        return sum((backward for _, backward in self.terms.values()), start=np.zeros(()))


def layer_time(
    work: Workload, layer: LayerWork, plans: Plans, rates: Rates, fused: FusedProviders, tokens: Array, rows: Array
) -> LayerTime:
    """All compute terms of one layer."""
    terms = {
        "dense_linears": _dense(work, layer, plans, rates, tokens),
        "attention": _attention(work, layer, plans, rates, fused, tokens),
        "norms": _norms(work, rates, fused, tokens),
        "residual_and_rotary": _elementwise(work, layer, rates, fused, tokens),
        "adapters": _adapters(work, layer, rates, fused, tokens, rows),
    }
    launches = [float(OTHER_LAUNCHES[i] + ADAPTER_LAUNCHES[i] * layer.adapters.targets) for i in (0, 1)]
    chunked = [0.0, 0.0]
    if layer.kind.attention == "linear" and unfused_chunks(work, fused):
        size = chunks_of(work).tokens
        chunks = work.recipe.batch.sequence_tokens / size
        chunked = [row * (size - 1) + each * chunks for row, each in CHUNK_LAUNCHES]
        launches = [n + more for n, more in zip(launches, chunked, strict=True)]
    if layer.routed:
        terms["experts"] = _experts(work, layer, plans, rates, fused, rows)
        terms["expert_rows"] = _expert_rows(work, rates, fused, rows, tokens)
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
        packed = rates.traffic_s(dequantised_bytes(work, layer, plans, rows))
        terms["dequantise"] = packed, packed
    return LayerTime(terms, (launches[0], launches[1]), (chunked[0], chunked[1]))


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


def _chunks_s(work: Workload, rates: Rates, tokens: Array) -> Pair:
    """Unfused linear attention: passes over fp32 [T, C, n·d], and in backward what each chunk fills of the whole."""
    size, each = chunks_of(work).tokens, chunks_of(work).slice_passes
    square = 4.0 * size * work.linear_width * tokens
    chunks = work.recipe.batch.sequence_tokens / size
    forward, backward = SQUARE_PASSES
    return rates.traffic_s(square * forward), rates.traffic_s(square * (backward + each * chunks))


def _attention(
    work: Workload, layer: LayerWork, plans: Plans, rates: Rates, fused: FusedProviders, tokens: Array
) -> Pair:
    """Flops per token, causal: softmax 2·S·n·d; latent S·n·(d_qk + d_v); linear 8·d·n·d, unfused by its traffic.

    Sparse, by its kernel: 2·min(S, k)·n·(2·r_kv + d_r) in the absorbed form, and the indexer's S·n_I·d_I; by torch as
    ``_masked``. Where a sequence is cut over ranks also ``context.further_flops``, and softmax once more in backward.
    """
    shape, sequence = work.profile.shape, work.recipe.batch.sequence_tokens
    if layer.kind.attention == "none":
        return np.zeros_like(tokens), np.zeros_like(tokens)
    if layer.kind.attention == "linear" and unfused_chunks(work, fused):
        return _chunks_s(work, rates, tokens)
    if layer.kind.attention == "linear":
        per_token = 8.0 * (shape.linear_head_dim or shape.head_dim) * work.linear_width
    elif layer.kind.attention == "dsa" and work.latent(layer) and not fused.kernel("dsa"):
        return _masked(work, rates, tokens)
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
    back = rates.attention_backward_s(once, tokens * work.query_width)
    if not np.any(plans.cp > 1):
        return once, back
    further, again = (rates.gemm_s(flops, 0.0, tokens) for flops in context.further_flops(work, layer, plans, tokens))
    core = np.where(plans.cp > 1, once, 0.0) if context.attends_again(layer) else 0.0
    return once + further, back + again + core


def _masked(work: Workload, rates: Rates, tokens: Array) -> Pair:
    """Sparse attention by torch: fp32 scores of every indexer head over all pairs, then dense attention under a mask.

    2·S·n_I·d_I flops a token in fp32 and passes over [T, n_I, S]; 2·S·n·(d_qk + d_v) under the mask, no pair skipped.
    Nothing flows back through the indexer.
    """
    shape, sequence = work.profile.shape, work.recipe.batch.sequence_tokens
    pairs = 1.0 * tokens * sequence
    index = rates.wide_gemm_s(2.0 * pairs * shape.index_num_heads * shape.index_head_dim, 0.0)
    index = index + rates.traffic_s(pairs * (4 * SCORE_PASSES * shape.index_num_heads + CHOICE_BYTES))
    width = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
    core = rates.masked_attention_s(2.0 * pairs * shape.num_attention_heads * width, float(sequence))
    return index + core, rates.attention_backward_s(core, tokens * shape.num_attention_heads * width / 2)


def _norms(work: Workload, rates: Rates, fused: FusedProviders, tokens: Array) -> Pair:
    """Two norms of hidden width, and those of queries and keys, by the plan's providers."""

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
    if work.head_norms and not fused.kernel("qk_norm_rope"):
        heads = {"T": tokens, "H": work.query_width + work.key_width}
        by = fused.provider("rms_norm") if fused.norms_heads else "eager"
        cost = fused.cost("rms_norm", heads, work.dtype) if by not in PROVIDERS else None
        found.append((1.0, cost or provider_cost("rms_norm", by, heads, work.dtype)))
    return found


def _elementwise(work: Workload, layer: LayerWork, rates: Rates, fused: FusedProviders, tokens: Array) -> Pair:
    """Residual adds outside fused norms (3·b·H each), rotary passes over q and k, SwiGLU of a dense MLP."""
    b = work.base_bytes
    adds = 2 - fused.norms(work.profile.shape.num_layers)["add_rms_norm"]
    residual = adds * 3 * b * work.hidden
    rotary = b * (work.query_width + work.key_width)
    turns = QK_KERNEL_PASSES if fused.kernel("qk_norm_rope") else ROTARY_PASSES
    swiglu = np.zeros((2, *tokens.shape))
    if layer.mlp_width:

        def moved(count: int) -> tuple[float, ...]:
            cost = fused.cost("swiglu", {"T": count, "I": layer.mlp_width}, work.dtype)
            return tuple(float(one.bytes_read + one.bytes_written) for one in _passes(cost))

        swiglu = per_value(tokens, moved)
    return (
        rates.traffic_s(tokens * (residual + turns[0] * rotary) + swiglu[0]),
        rates.traffic_s(tokens * (residual + turns[1] * rotary) + swiglu[1]),
    )


def _adapters(
    work: Workload, layer: LayerWork, rates: Rates, fused: FusedProviders, tokens: Array, rows: Array
) -> Pair:
    """2·r·(in + out) flops per token or row, backward twice; narrow products, so mostly traffic.

    On experts that a kernel runs, only what it declares to move beyond the same rows without adapters.
    """
    lora, b = layer.adapters, work.base_bytes
    own = rates.gemm_s(2.0 * tokens * lora.dense_features, b * tokens * lora.dense_traffic, tokens)
    if fused.provider("experts") in PROVIDERS or not lora.expert_ranks:
        each = rates.gemm_s(2.0 * rows * lora.expert_features, b * rows * lora.expert_traffic, tokens)
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


def _experts(work: Workload, layer: LayerWork, plans: Plans, rates: Rates, fused: FusedProviders, rows: Array) -> Pair:
    """6·R·H·I/t_x flops over local experts; bytes: local weights once a chunk and rows b·(2·H + 3·I/t_x)."""
    shape, b = work.profile.shape, work.base_bytes
    local = np.maximum(shape.num_experts // plans.ep, 1)
    flops = 2.0 * rows * layer.expert_parameters / shape.num_experts / plans.expert_tp
    touched = np.minimum(1.0, rows / plans.chunks / local) * layer.expert_parameters / (plans.ep * plans.expert_tp)
    width = 2 * work.row_width + 3 * shape.expert_intermediate_size / plans.expert_tp
    moved = b * (plans.chunks * touched + rows * width)
    share = 1.0 if fused.provider("experts") in PROVIDERS else KERNEL_PRODUCT_SHARE
    once = rates.grouped_s(flops / share, moved, rows / plans.chunks / local)
    return once, once


def _expert_rows(work: Workload, rates: Rates, fused: FusedProviders, rows: Array, tokens: Array) -> Pair:
    """Sort, gather, activation, weighting, combine: passes over R × H; by a kernel b·H·(R + T), and its activation's
    gradient over 6·R·I."""
    provider = fused.provider("experts")
    if provider not in ROW_PASSES:
        summed = work.base_bytes * work.row_width * (rows + tokens)
        gate = 6.0 * work.base_bytes * rows * work.profile.shape.expert_intermediate_size
        return rates.traffic_s(summed), rates.traffic_s(summed + gate)
    forward, backward = ROW_PASSES[provider]
    one = work.base_bytes * rows * work.row_width
    return rates.traffic_s(forward * one), rates.traffic_s(backward * one)
