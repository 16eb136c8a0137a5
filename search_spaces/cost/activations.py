"""What one layer keeps from forward to backward, by token and by routed row.

Only what autograd needs for adapters: a frozen linear keeps nothing, an adapted one keeps its input.

Legend: T tokens, R routed rows, K experts per token, E experts, H hidden, H_x width of a routed row,
I expert width, n query heads, g key heads, d head dim, b bytes per value, r LoRA rank; latent attention:
r_q, r_kv compressed widths, d_n + d_r query and key head, d_v value head. All sizes in bytes.
"""

from __future__ import annotations

from typing import Any

from shardwright.search_spaces.cost.workload import LayerWork, Workload

ROUTER_BYTES = (8, 12)
"""Per token: 8 per expert (fp32 logits and probabilities), 12 per chosen expert (weight and index)."""

LINEAR_ATTENTION_PEAK = 60
"""Bytes per token and value of n·d that chunked linear attention holds at its peak, forward and backward
together: measured on one H200, 1.884 GiB at T 8192 and 7.535 GiB at T 32768 (n 32, d 128)."""


def residual_bytes(work: Workload, eager_norms: float) -> float:
    """Inputs and statistics of both norms, 2·(b·H + 4), and an fp32 copy, 4·H, for each eager norm."""
    H, b = work.hidden, work.base_bytes
    copies = 0 if b == 4 else eager_norms * 4 * H
    return 2 * b * H + copies + 8


def attention_bytes(work: Workload, layer: LayerWork) -> float:
    """Kept by one attention block, per token.

    Softmax attention by flash or sdpa: q, k, v, out and the log-sum-exp, ``b·2·(n·d + g·d) + 4·n``.
    Latent (MLA): compressed q and kv, ``b·(r_q + r_kv + d_r)``, full q and k, v and out,
    ``b·n·(2·(d_n + d_r) + 2·d_v) + 4·n``. Sparse (DSA): latent, and the chosen indices, 4 per key.
    Linear (KDA, chunked): q, k, v, gate and out, beta, ``b·(5·n·d + n) + 4·n``.
    Adapted projections add their inputs (b·H once for q, k and v; the block's inner width for o) and r values.
    """
    b, shape, heads = work.base_bytes, work.profile.shape, work.profile.shape.num_attention_heads
    if layer.kind.attention == "none":
        kept = 0.0
    elif layer.kind.attention == "linear":
        heads = shape.linear_num_heads or heads
        kept = b * (5 * work.linear_width + heads) + 4 * heads
    elif work.latent(layer):
        compressed = shape.q_lora_rank + shape.kv_lora_rank + shape.qk_rope_head_dim
        key = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        kept = b * (compressed + heads * (2 * key + 2 * shape.v_head_dim)) + 4 * heads
        if layer.kind.attention == "dsa":
            kept += 4 * min(shape.index_topk, work.recipe.batch.sequence_tokens)
    else:
        kept = b * 2 * (work.query_width + work.key_width) + 4 * heads
    lora = layer.adapters
    inputs = (b * work.hidden if lora.attention_in else 0) + (b * work.inner_width(layer) if lora.attention_out else 0)
    return kept + inputs + b * lora.dense_ranks


def attention_workspace_bytes(work: Workload, layer: LayerWork, backward: bool) -> float:
    """Alive only while one attention block runs, per token.

    Linear: what its chunked backward holds beyond what it keeps. Sparse: unfused fp32 scores over the
    sequence, ``4·S``, and the indexer's queries and key.
    """
    shape, b = work.profile.shape, work.base_bytes
    if layer.kind.attention == "linear":
        return max(0.0, LINEAR_ATTENTION_PEAK - 5 * b) * work.linear_width if backward else 0.0
    if layer.kind.attention == "dsa" and shape.index_num_heads:
        scores = 4.0 * work.recipe.batch.sequence_tokens
        return scores + b * (shape.index_num_heads + 1) * shape.index_head_dim
    return 0.0


def mlp_bytes(work: Workload, layer: LayerWork) -> float:
    """Kept by a dense MLP or the shared experts, per token: gate, up and silu(gate), ``3·b·I``."""
    b, width, lora = work.base_bytes, layer.mlp_width, layer.adapters
    if not width:
        return 0.0
    inputs = (b * work.hidden if lora.mlp_in else 0) + (b * width if lora.mlp_out else 0)
    return 3 * b * width + inputs


def routed_row_bytes(work: Workload, layer: LayerWork, expert_tp: Any = 1) -> Any:
    """Kept by the routed experts, per row: ``b·3·I/t_x`` for the activation and ``b·H_x`` for the weighting.

    Adapted gate/up keeps the row (b·H_x), adapted down keeps its input (b·I/t_x), each r values.
    """
    if not layer.routed:
        return 0.0
    H, b = work.row_width, work.base_bytes
    I = work.profile.shape.expert_intermediate_size / expert_tp
    lora = layer.adapters
    inputs = (b * H if lora.experts_in else 0) + (b * I if lora.experts_out else 0)
    return b * (3 * I + H) + inputs + b * lora.expert_ranks


def router_bytes(work: Workload, layer: LayerWork) -> float:
    """Kept by the router, per token: ``8·E + 12·K``; with latent experts also their input, ``b·H_x``."""
    shape = work.profile.shape
    if not layer.routed:
        return 0.0
    latent = work.base_bytes * work.row_width if work.row_width != work.hidden else 0
    return ROUTER_BYTES[0] * shape.num_experts + ROUTER_BYTES[1] * shape.experts_per_token + latent


def layer_bytes(
    work: Workload, layer: LayerWork, tokens: Any, rows: Any, eager_norms: float, expert_tp: Any = 1
) -> Any:
    """Everything one layer keeps without checkpointing."""
    per_token = (
        residual_bytes(work, eager_norms)
        + attention_bytes(work, layer)
        + mlp_bytes(work, layer)
        + router_bytes(work, layer)
    )
    return tokens * per_token + (rows * routed_row_bytes(work, layer, expert_tp) if layer.routed else 0.0)


def checkpoint_bytes(work: Workload, tokens: Any) -> Any:
    """What a checkpointed layer keeps: its input, b·H per token."""
    return tokens * work.base_bytes * work.hidden


def backward_workspace_bytes(work: Workload, layer: LayerWork, tokens: Any, rows: Any, expert_tp: Any = 1) -> Any:
    """Gradients alive at once inside the backward of one layer.

    Two hidden gradients; for experts also d(gate, up) and two row gradients; for a dense MLP d(gate, up).
    """
    b = work.base_bytes
    I = work.profile.shape.expert_intermediate_size / expert_tp
    routed = rows * b * (2 * I + 2 * work.row_width) if layer.routed else 0
    attention = attention_workspace_bytes(work, layer, True)
    return tokens * (b * (2 * work.hidden + 2 * layer.mlp_width) + attention) + routed


def forward_workspace_bytes(work: Workload, layer: LayerWork, tokens: Any, rows: Any) -> Any:
    """Temporaries of one layer's forward: gathered rows and their result, or the MLP's product."""
    b = work.base_bytes
    routed = 2 * rows * b * work.row_width if layer.routed else 0
    attention = attention_workspace_bytes(work, layer, False)
    return tokens * (b * (work.hidden + layer.mlp_width) + attention) + routed
