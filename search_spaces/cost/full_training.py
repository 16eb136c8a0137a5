"""Memory of training every parameter with an optimizer sharded over data ranks (ZeRO-1), by component.

The runtime trains adapters only; this stands beside the LoRA model so that its activation, routing and loss
terms can be held against published full-training measurements.

Legend: T tokens, R routed rows, H hidden, I expert width, V vocabulary, e = EP degree, p stages, r_q and r_kv
compressed widths of latent attention. All sizes in bytes; bf16 weights and activations, fp32 gradients,
master weights and moments.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.search_spaces.cost.workload import LayerWork, Workload

WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12
"""Bytes per parameter: bf16 weight, fp32 gradient, fp32 master weight with both moments."""

LOGIT_BYTES = 8
"""Per logit at the peak: bf16 logits (2), fp32 softmax (4), bf16 gradient (2), with a fused cross entropy."""


@dataclass(frozen=True)
class Layout:
    """Degrees: every stage has ``data`` ranks, over which the dense optimizer is sharded; experts over ``ep``."""

    data: int
    ep: int
    stages: int = 1
    micro_batches: int = 1


def stage_bytes(work: Workload, layout: Layout, tokens: int, stage: int) -> dict[str, float]:
    """Components of one pipeline stage under balanced routing; layers in order, equally many on each.

    ``workspace`` is what a layer's backward holds beyond the loss: they are not alive together.
    """
    each = -(-work.profile.shape.num_layers // layout.stages)
    own = range(stage * each, min((stage + 1) * each, work.profile.shape.num_layers))
    first, last = stage == 0, stage == layout.stages - 1
    layers = [layer for layer in work.layers for index in layer.kind.layer_indices if index in own]
    dense = sum(layer.dense_parameters for layer in layers) + work.root_parameters / 2 * (first + last)
    experts = sum(layer.expert_parameters for layer in layers) / layout.ep
    b, shape = work.base_bytes, work.profile.shape
    in_flight = min(layout.micro_batches, layout.stages - stage)
    loss = tokens * (LOGIT_BYTES * shape.vocab_size + b * shape.hidden_size) if last else 0.0
    busiest = max((workspace_bytes(work, layer, tokens) for layer in layers), default=0.0)
    spread = max(layout.data // layout.ep, 1)
    return {
        "weights": WEIGHT * (dense + experts),
        "gradients": GRADIENT * (dense + experts),
        "optimizer": OPTIMIZER * (dense / layout.data + experts / spread),
        "activations": in_flight * sum(layer_bytes(work, layer, tokens) for layer in layers),
        "loss": loss,
        "workspace": max(busiest - loss, 0.0),
    }


def workspace_bytes(work: Workload, layer: LayerWork, tokens: int) -> float:
    """Alive while one layer's backward runs, when the logits are free: two hidden gradients and those of a dense MLP;
    for experts d(gate, up), a row and its gradient, and the rows sent and received between EP ranks."""
    b, shape = work.base_bytes, work.profile.shape
    own = tokens * b * (2 * work.hidden + 2 * layer.mlp_width)
    if not layer.routed:
        return own
    rows = tokens * shape.experts_per_token
    return own + rows * b * (2 * shape.expert_intermediate_size + 4 * work.row_width)


def layer_bytes(work: Workload, layer: LayerWork, tokens: int) -> float:
    """What one layer keeps: inputs of both norms, and of every linear.

    Attention as under LoRA with its input; latent norms keep ``b·(r_q + r_kv)`` more. Experts: rows ``b·H``,
    gate and up ``2·b·I``, their product ``b·I`` (routing weights are applied to it, so no output is kept).
    """
    b, shape = work.base_bytes, work.profile.shape
    latent = b * (shape.q_lora_rank + shape.kv_lora_rank) if work.latent(layer) else 0
    norms = 2 * (b * work.hidden + 4)
    inputs = 2 * b * work.hidden
    per_token = norms + inputs + attention_bytes(work, layer) + latent + 3 * b * layer.mlp_width
    if not layer.routed:
        return tokens * per_token
    rows = tokens * shape.experts_per_token
    kept = b * (work.row_width + 3 * shape.expert_intermediate_size)
    return tokens * (per_token + router_bytes(work)) + rows * kept


def attention_bytes(work: Workload, layer: LayerWork) -> float:
    """Kept by one attention block of a fused executor, per token, beside the inputs of its projections.

    Softmax: q, k, v, out and the log-sum-exp. Latent: compressed q and kv, full q and k, v and out.
    """
    b, shape, heads = work.base_bytes, work.profile.shape, work.profile.shape.num_attention_heads
    if not work.latent(layer):
        return b * 2 * (work.query_width + work.key_width) + 4.0 * heads
    compressed = shape.q_lora_rank + shape.kv_lora_rank + shape.qk_rope_head_dim
    key = shape.qk_nope_head_dim + shape.qk_rope_head_dim
    return b * (compressed + heads * (2 * key + 2 * shape.v_head_dim)) + 4.0 * heads


def router_bytes(work: Workload) -> float:
    """Kept by the router, per token: fp32 logits and probabilities, weight and index of each choice."""
    return 8.0 * work.profile.shape.num_experts + 12.0 * work.profile.shape.experts_per_token
