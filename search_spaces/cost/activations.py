"""What one layer keeps from forward to backward, by token and by routed row.

Only what autograd needs for adapters: a frozen linear keeps nothing, an adapted one keeps its input.

Legend: T tokens, R routed rows, K experts per token, E experts, H hidden, I expert width, n query
heads, g key heads, d head dim, b bytes per value, r LoRA rank. All sizes in bytes.
"""

from __future__ import annotations

from shardwright.search_spaces.cost.workload import LayerWork, Workload

ROUTER_BYTES = (8, 12)
"""Per token: 8 per expert (fp32 logits and probabilities), 12 per chosen expert (weight and index)."""


def residual_bytes(work: Workload, eager_norms: float) -> float:
    """Inputs and statistics of both norms, 2·(b·H + 4), and an fp32 copy, 4·H, for each eager norm."""
    H, b = work.hidden, work.base_bytes
    copies = 0 if b == 4 else eager_norms * 4 * H
    return 2 * b * H + copies + 8


def attention_bytes(work: Workload, layer: LayerWork) -> float:
    """Kept by one attention block, per token.

    Softmax attention by flash or sdpa: q, k, v, out and the log-sum-exp, ``b·2·(n·d + g·d) + 4·n``.
    Linear attention (chunked): q, k, v, gate, beta and out, ``b·5·n·d + 4·n``.
    Adapted projections add their inputs (b·H once for q, k and v; b·n·d for o) and r values each.
    """
    b, q, k = work.base_bytes, work.query_width, work.key_width
    heads = work.profile.shape.num_attention_heads
    if layer.kind.attention == "none":
        kept = 0.0
    elif layer.kind.attention == "linear":
        kept = b * 5 * q + 4 * heads
    else:
        kept = b * 2 * (q + k) + 4 * heads
    lora = layer.adapters
    inputs = (b * work.hidden if lora.attention_in else 0) + (b * q if lora.attention_out else 0)
    return kept + inputs + b * lora.dense_ranks


def mlp_bytes(work: Workload, layer: LayerWork) -> float:
    """Kept by a dense MLP or the shared experts, per token: gate, up and silu(gate), ``3·b·I``."""
    b, width, lora = work.base_bytes, layer.mlp_width, layer.adapters
    if not width:
        return 0.0
    inputs = (b * work.hidden if lora.mlp_in else 0) + (b * width if lora.mlp_out else 0)
    return 3 * b * width + inputs


def routed_row_bytes(work: Workload, layer: LayerWork) -> float:
    """Kept by the routed experts, per row: ``b·3·I`` for the activation and ``b·H`` for the weighting.

    Adapted gate/up keeps the row (b·H), adapted down keeps its input (b·I), each r values.
    """
    if not layer.routed:
        return 0.0
    H, I, b = work.hidden, work.profile.shape.expert_intermediate_size, work.base_bytes
    lora = layer.adapters
    inputs = (b * H if lora.experts_in else 0) + (b * I if lora.experts_out else 0)
    return b * (3 * I + H) + inputs + b * lora.expert_ranks


def router_bytes(work: Workload, layer: LayerWork) -> float:
    """Kept by the router, per token: ``8·E + 12·K``."""
    shape = work.profile.shape
    if not layer.routed:
        return 0.0
    return ROUTER_BYTES[0] * shape.num_experts + ROUTER_BYTES[1] * shape.experts_per_token


def layer_bytes(work: Workload, layer: LayerWork, tokens: int, rows: int, eager_norms: float) -> float:
    """Everything one layer keeps without checkpointing."""
    per_token = (
        residual_bytes(work, eager_norms)
        + attention_bytes(work, layer)
        + mlp_bytes(work, layer)
        + router_bytes(work, layer)
    )
    return tokens * per_token + (rows * routed_row_bytes(work, layer) if layer.routed else 0.0)


def checkpoint_bytes(work: Workload, tokens: int) -> float:
    """What a checkpointed layer keeps: its input, b·H per token."""
    return tokens * work.base_bytes * work.hidden


def backward_workspace_bytes(work: Workload, layer: LayerWork, tokens: int, rows: int) -> float:
    """Gradients alive at once inside the backward of one layer.

    Two hidden gradients; for experts also d(gate, up) and two row gradients; for a dense MLP d(gate, up).
    """
    H, I, b = work.hidden, work.profile.shape.expert_intermediate_size, work.base_bytes
    routed = rows * b * (2 * I + 2 * H) if layer.routed else 0
    return tokens * b * (2 * H + 2 * layer.mlp_width) + routed


def forward_workspace_bytes(work: Workload, layer: LayerWork, tokens: int, rows: int) -> float:
    """Temporaries of one layer's forward: gathered rows and their result, or the MLP's product."""
    b = work.base_bytes
    routed = 2 * rows * b * work.hidden if layer.routed else 0
    return tokens * b * (work.hidden + layer.mlp_width) + routed
