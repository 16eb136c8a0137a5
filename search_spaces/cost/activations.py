"""What one layer keeps from forward to backward, by token and by routed row.

Only what autograd needs for adapters: a frozen linear keeps nothing, an adapted one keeps its input. Counted from the
modules that run (the family's own, or the operator that the plan puts in its place), and held against traces of the
runtime's executor over fake tensors (``benchmarks/trace_points.py``).

Legend: T tokens, S tokens of a sequence, R routed rows, K experts per token, E experts, H hidden, H_x width of a routed
row, I expert width, t_x its shards, n query heads, g key heads, d head dim, b bytes per value, r LoRA rank, A values of
adapters; latent attention: r_q, r_kv compressed widths, d_n + d_r query and key head, d_v value head. All sizes in
bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.linear_attention import linear_attention_bytes
from shardwright.search_spaces.cost.plans import Plans
from shardwright.search_spaces.cost.workload import LayerWork, Workload


def residual_bytes(work: Workload, fused: FusedProviders) -> float:
    """Both norms of hidden width: an fp32 copy of the input, 4·H, where eager, else the input, b·H; 4 of statistics."""
    eager = fused.norms(work.profile.shape.num_layers)["eager"]
    return eager * 4 * work.hidden + (2 - eager) * work.base_bytes * work.hidden + 8


def attention_bytes(work: Workload, layer: LayerWork, fused: FusedProviders) -> float:
    """Kept by one attention block, per token.

    Softmax attention by flash or sdpa: q, k, v, out and the log-sum-exp, ``b·2·(n·d + g·d) + 4·n``; norms on heads
    add an fp32 copy of q and k where eager, ``4·(n + g)·(d + 1)``, and q and k before the operator where fused.
    Latent (MLA): ``4·(r_q + r_kv)`` copies of the compressed norms, full q and k, keys and values as they leave their
    projection, and out: ``b·n·(2·(d_n + d_r) + d_n + d_v + d_v) + 4·n``. Sparse (DSA), unfused: latent, and the mask
    as a bias, ``b·S``. Linear (KDA): see :func:`linear_attention_bytes`.
    Adapted projections add their inputs (each width once; what the output projection reads is the attention's own
    output) and r values each.
    """
    b, shape, heads = work.base_bytes, work.profile.shape, work.profile.shape.num_attention_heads
    lora = layer.adapters
    kept = b * lora.attention_widths + b * lora.dense_ranks
    if layer.kind.attention == "none":
        return kept
    if layer.kind.attention == "linear":
        return kept + linear_attention_bytes(work, fused) + (b * work.linear_width if lora.attention_out else 0)
    if work.latent(layer):
        key = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        kept += 4 * (shape.q_lora_rank + shape.kv_lora_rank)
        kept += b * heads * (2 * key + shape.qk_nope_head_dim + 2 * shape.v_head_dim) + 4 * heads
        if layer.kind.attention == "dsa" and fused.provider("dsa") == "eager":
            kept += b * work.recipe.batch.sequence_tokens
            kept += b * heads * shape.v_head_dim if lora.attention_out else 0
        elif layer.kind.attention == "dsa":
            kept += 4 * min(shape.index_topk, work.recipe.batch.sequence_tokens)
        return kept
    kept += b * 2 * (work.query_width + work.key_width) + 4 * heads
    if work.head_norms:
        fp32 = fused.provider("qk_norm_rope") == "eager"
        both = work.query_width + work.key_width
        kept += 4 * (both + heads + shape.num_key_value_heads) if fp32 else b * both
    return kept


def mlp_bytes(work: Workload, layer: LayerWork, fused: FusedProviders) -> float:
    """Kept by a dense MLP or the shared experts, per token: gate, up and, where eager, silu(gate): ``3·b·I``."""
    b, width, lora = work.base_bytes, layer.mlp_width, layer.adapters
    if not width:
        return 0.0
    inputs = (b * work.hidden if lora.mlp_in else 0) + (b * width if lora.mlp_out else 0)
    return (3 if fused.provider("swiglu") == "eager" else 2) * b * width + inputs


def routed_bytes(
    work: Workload, layer: LayerWork, fused: FusedProviders, tokens: Any, rows: Any, expert_tp: Any
) -> Any:
    """Kept by the routed experts.

    Eager, per row: ``b·3·I/t_x`` for the activation and ``b·H_x`` for the weighting; adapted gate/up keeps the row
    (b·H_x), adapted down its input (b·I/t_x), each r values. Fused: gate and up, with adapters their product and r
    values each, ``b·(2·I + I + r)``; the whole layer keeps the tokens in place of the rows and needs no weighting.
    """
    if not layer.routed:
        return 0.0
    H, b = work.row_width, work.base_bytes
    I = work.profile.shape.expert_intermediate_size / expert_tp
    lora = layer.adapters
    if fused.provider("experts") == "eager":
        inputs = (b * H if lora.experts_in else 0) + (b * I if lora.experts_out else 0)
        return rows * (b * (3 * I + H) + inputs + b * lora.expert_ranks)
    adapted = lora.experts_in or lora.experts_out
    inner = rows * b * (2 * I + (I if adapted else 0) + lora.expert_ranks)
    if fused.kernel("experts") == "moe_layer":
        return inner + tokens * b * H + 8 * rows
    return inner + rows * b * (H + (H if adapted else 0))


def router_bytes(work: Workload, layer: LayerWork, fused: FusedProviders) -> float:
    """Kept by the router, per token: scores in fp32, ``4·E``, or fused the logits, ``b·E``; ``24·K`` of choices.

    With latent experts also their input, ``b·H_x``.
    """
    shape = work.profile.shape
    if not layer.routed:
        return 0.0
    latent = work.base_bytes * work.row_width if work.row_width != work.hidden else 0
    scores = 4 if fused.provider("router") == "eager" else work.base_bytes
    return scores * shape.num_experts + 24 * shape.experts_per_token + latent


def adapter_copies_bytes(work: Workload, layer: LayerWork, plans: Plans) -> Any:
    """One layer's adapters in the compute dtype, kept where no gather made that copy: ``b·A``."""
    if work.base_bytes == work.adapter_bytes:
        return np.zeros(len(plans))
    dense = np.where(plans.dense_shards > 1, 0.0, layer.adapters.dense_parameters / plans.tp)
    local = layer.adapters.expert_parameters / (plans.ep * plans.expert_tp)
    return work.base_bytes * (dense + np.where(plans.expert_shards > 1, 0.0, local))


def layer_bytes(
    work: Workload, layer: LayerWork, tokens: Any, rows: Any, fused: FusedProviders, expert_tp: Any = 1
) -> Any:
    """Everything one layer keeps without checkpointing, but its adapters' copies."""
    per_token = (
        residual_bytes(work, fused)
        + attention_bytes(work, layer, fused)
        + mlp_bytes(work, layer, fused)
        + router_bytes(work, layer, fused)
    )
    return tokens * per_token + routed_bytes(work, layer, fused, tokens, rows, expert_tp)


def checkpoint_bytes(work: Workload, layer: LayerWork, fused: FusedProviders, tokens: Any) -> Any:
    """What a checkpointed layer keeps: its input, b·H per token and residual stream, and the choices that its
    recomputation repeats.

    Choices: 8 bytes for each expert of a token; for each key that an unfused indexer chose 8, and 4 handed on.
    """
    shape = work.profile.shape
    choices = 8 * shape.experts_per_token if layer.routed else 0
    if layer.kind.attention == "dsa":
        chosen = min(shape.index_topk, work.recipe.batch.sequence_tokens)
        choices += (12 if fused.provider("dsa") == "eager" else 4) * chosen
    return tokens * (work.base_bytes * work.hidden * shape.residual_streams + choices)
