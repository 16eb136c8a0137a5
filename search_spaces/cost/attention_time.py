"""Compute time of one layer's attention, forward and backward, for all plans at once.

Legend: T tokens, S tokens of a sequence, n heads, d head dim, C tokens of a chunk of linear attention, W = n·d.
"""

from __future__ import annotations

import numpy as np

from shardwright.search_spaces.cost import context
from shardwright.search_spaces.cost.compute import Rates
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.linear_attention import chunks_of, unfused_chunks
from shardwright.search_spaces.cost.plans import Array, Plans
from shardwright.search_spaces.cost.workload import LayerWork, Workload

Pair = tuple[Array, Array]

SQUARE_PASSES = (18.7, 42.3)
"""Reads and writes of fp32 [T, C, n·d] by unfused linear attention, (forward, backward), beside what each chunk adds
(``UnfusedChunks.slice_passes``): bytes of all operators in traces of 2,048 and 4,096 tokens, products and smaller
tensors among them."""

SLICED_VALUES = 0.356
"""Further such passes in backward for each chunk: gradients of five slices of [T, n·d] in zeros of the whole."""

CONVOLUTION_PASSES = (58, 66)
"""Reads and writes of [T, 3·W] that take as long as torch's depthwise convolution with SiLU, (forward, backward): 2.84
and 3.21 ms over 8,192 tokens of 12,288 channels on one H200 (case ``short-conv/8kx12288``)."""

SCORE_PASSES = 6
"""Reads and writes of fp32 [T, n_I, S] by an eager indexer: the product, its scale, ReLU and sum over heads."""

CHOICE_BYTES = 31
"""Bytes a pair that its choice of keys moves: causal mask, sort, scatter into a mask, and that made a bias."""

MASK_BYTES = 10
"""Of them, a pair, what makes the mask of a cut row again (``runtime/context_pieces.py``): what is seen, what is chosen
(written each), both together (three), a bias of that (three), read once."""


def attention_time(
    work: Workload, layer: LayerWork, plans: Plans, rates: Rates, fused: FusedProviders, tokens: Array
) -> Pair:
    """Flops per token, causal: softmax 2·S·n·d; latent S·n·(d_qk + d_v); linear 8·d·n·d, unfused by its traffic.

    Sparse, by its kernel: 2·min(S, k)·n·(2·r_kv + d_r) in the absorbed form, and the indexer's S·n_I·d_I, through which
    nothing flows back; by torch as ``_masked``. Where a sequence is cut over ranks also ``context.further_flops``, and
    attention once more in backward, not an indexer.
    """
    shape, sequence = work.profile.shape, work.recipe.batch.sequence_tokens
    index = 0.0
    if layer.kind.attention == "none":
        return np.zeros_like(tokens), np.zeros_like(tokens)
    if layer.kind.attention == "linear" and unfused_chunks(work, fused):
        return _chunks(work, rates, tokens)
    if layer.kind.attention == "linear":
        per_token = 8.0 * (shape.linear_head_dim or shape.head_dim) * work.linear_width
    elif layer.kind.attention == "dsa" and work.latent(layer) and not fused.kernel("dsa"):
        return _masked(work, layer, plans, rates, fused, tokens)
    elif layer.kind.attention == "dsa" and work.latent(layer):
        width = 2 * shape.kv_lora_rank + shape.qk_rope_head_dim
        per_token = 2.0 * min(sequence, shape.index_topk or sequence) * shape.num_attention_heads * width
        index = 1.0 * sequence * shape.index_num_heads * shape.index_head_dim
        per_token += index
    elif work.latent(layer):
        width = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
        per_token = 1.0 * sequence * shape.num_attention_heads * width
    else:
        per_token = 2.0 * sequence * work.query_width
    once = rates.attention_s(tokens * per_token, float(sequence))
    attended = once if not index else rates.attention_s(tokens * (per_token - index), float(sequence))
    back = rates.attention_backward_s(attended, tokens * work.query_width)
    return _cut(work, layer, plans, rates, fused, tokens, (once, back), attended)


def _cut(
    work: Workload,
    layer: LayerWork,
    plans: Plans,
    rates: Rates,
    fused: FusedProviders,
    tokens: Array,
    whole: Pair,
    attended: Array,
) -> Pair:
    """With what is computed only where rows are cut over ranks.

    Args:
        whole: without it.
        attended: of the forward, what runs again in backward there.
    """
    if not np.any(plans.cp > 1):
        return whole
    flops = context.further_flops(work, layer, plans, fused, tokens)
    further, again = (rates.gemm_s(one, 0.0, tokens) for one in flops)
    repeated = np.where(plans.cp > 1, attended, 0.0) if context.attends_again(layer) else 0.0
    return whole[0] + further, whole[1] + again + repeated


def _chunks(work: Workload, rates: Rates, tokens: Array) -> Pair:
    """Unfused linear attention: passes over fp32 [T, C, n·d], in backward also what each chunk fills of the whole; and
    its convolution."""
    own = chunks_of(work)
    square = 4.0 * own.tokens * work.linear_width * tokens
    chunks = work.recipe.batch.sequence_tokens / own.tokens
    each = own.slice_passes + (SLICED_VALUES if own.slice_passes else 0.0)
    streams = 3.0 * work.base_bytes * work.linear_width * tokens
    forward, backward = SQUARE_PASSES
    return (
        rates.traffic_s(square * forward + streams * CONVOLUTION_PASSES[0]),
        rates.traffic_s(square * (backward + each * chunks) + streams * CONVOLUTION_PASSES[1]),
    )


def _masked(work: Workload, layer: LayerWork, plans: Plans, rates: Rates, fused: FusedProviders, tokens: Array) -> Pair:
    """Sparse attention by torch: fp32 scores of every indexer head over all pairs, then dense attention under a mask.

    2·S·n_I·d_I flops a token in fp32 and passes over [T, n_I, S]; 2·S·n·(d_qk + d_v) under the mask, no pair skipped;
    of cut rows the pairs of ``context.keys_seen``, in backward again with their mask. Nothing flows back through the
    indexer.
    """
    shape, sequence = work.profile.shape, work.recipe.batch.sequence_tokens
    pairs = 1.0 * tokens * sequence
    index = rates.wide_gemm_s(2.0 * pairs * shape.index_num_heads * shape.index_head_dim, 0.0)
    index = index + rates.traffic_s(pairs * (4 * SCORE_PASSES * shape.index_num_heads + CHOICE_BYTES))
    width = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
    met = pairs * context.keys_seen(plans)
    core = rates.masked_attention_s(2.0 * met * shape.num_attention_heads * width, float(sequence))
    back = rates.attention_backward_s(core, tokens * shape.num_attention_heads * width / 2)
    attended = core + rates.traffic_s(MASK_BYTES * met)
    return _cut(work, layer, plans, rates, fused, tokens, (index + core, back), attended)
