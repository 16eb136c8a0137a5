"""What one layer keeps from forward to backward, by token and by routed row.

Only what autograd needs for adapters: a frozen linear keeps nothing, an adapted one keeps its input. Counted from the
modules that run (the family's own, or the operator that the plan puts in its place), and held against traces of the
runtime's executor over fake tensors (``benchmarks/trace_points.py``).

Legend: T tokens, S tokens of a sequence, R routed rows, K experts per token, E experts, H hidden, H_x width of a routed
row, I expert width, n query heads, g key heads, d head dim, b bytes per value, r LoRA rank, C tokens of a chunk of
linear attention, W = n·d of linear attention; latent attention: r_q, r_kv compressed widths, d_n + d_r query and key
head, d_v value head. All sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.plans import Plans
from shardwright.search_spaces.cost.workload import LayerWork, Workload

LINEAR_ATTENTION_PEAK = 60
"""Bytes per token and value of n·d that a library's chunked linear attention holds at its peak, forward and backward
together: measured on one H200, 1.884 GiB at T 8192 and 7.535 GiB at T 32768 (n 32, d 128)."""

DELTA_RULES = ("kda", "gated_delta")
"""Kernels of linear attention: with a decay for each channel, or for each head."""

OVERWRITING = ("moe_layer", "grouped_lora_mlp")
"""Kernels of the experts block whose backward needs no memory of its own for what it turns into gradients."""

CHUNK = 64
"""Tokens of a chunk of unfused linear attention."""

CHUNK_SQUARES = 3
"""fp32 tensors [T, C, n·d] that unfused chunked linear attention keeps: k·k before the decay, the decay, q·k."""

CHUNK_ROWS = 23.5
"""fp32 tensors [T, n·d] that it keeps besides: casts of q and k (2), scaled q, k, v (3), three exponentials of the gate
(3), β·k·e^g and its solution, v_new, q·e^g, k·e^g (5), states of the chunks (2), the scores of a chunk (½), the forget
gate (2), input and output of the convolution in bf16 (3), the gated norm (3)."""

CHUNK_GRADIENTS = 2
"""fp32 tensors [T, C, n·d] alive beside the kept ones in its backward: a sum of slices' gradients, and the next one in
zeros of the whole. Autograd adds in place; only under a dispatch mode, as traces run, the new sum is a third."""


@dataclass(frozen=True)
class UnfusedChunks:
    """One unfused linear attention: tokens of a chunk; fp32 tensors [T, n·d] kept, and alive besides in each pass."""

    tokens: int
    kept: float
    forward: float
    backward: float
    slice_passes: float
    """Reads and writes of fp32 [T, C, n·d] in backward for each chunk: its slice's gradient in zeros of the whole."""


LIBRARY_CHUNKS = UnfusedChunks(CHUNK, CHUNK_SQUARES * CHUNK + CHUNK_ROWS, 2 * CHUNK, CHUNK_GRADIENTS * CHUNK + 6, 4)
"""As transformers' classes write it; a slice's gradient is written whole and added: four passes."""

FAMILY_CHUNKS = {"kimi_k3": UnfusedChunks(16, 76.9, 22.3, 37.1, 0)}
"""Where a family's class has a chain of its own. Kimi K3 (``checkpoints/models/kimi_k3``, chunks of 16): traced over
512 and 1024 tokens, the same at both; its chunks are unbound once, so none fills the whole again."""


def chunks_of(work: Workload) -> UnfusedChunks:
    """The chain that the model's own class runs."""
    return FAMILY_CHUNKS.get(work.profile.model_type, LIBRARY_CHUNKS)


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


def unfused_chunks(work: Workload, fused: FusedProviders) -> bool:
    """Whether linear attention runs as the family's own chain of torch operators.

    Families without a class in transformers are planned, not run: they are priced with a chunked kernel.
    """
    eager = all(fused.provider(op) == "eager" for op in DELTA_RULES)
    return eager and work.profile.transformers_class


def linear_attention_bytes(work: Workload, fused: FusedProviders) -> float:
    """Kept by chunked linear attention with its convolution, gates and gated norm, per token.

    Unfused: ``4·W·(3·C + 23.5)``, and for the rows that solve each chunk's triangle ``4·n·(Σ i² + i)/C`` for i < C;
    or as traced, ``FAMILY_CHUNKS``.
    Fused: q, k, v, gate and out, ``b·5·W``, beta, ``b·n``, and the convolution's input and output, ``6·b·W``.
    """
    shape, b, W = work.profile.shape, work.base_bytes, work.linear_width
    heads = shape.linear_num_heads or shape.num_attention_heads
    if unfused_chunks(work, fused):
        if work.profile.model_type in FAMILY_CHUNKS:
            return 4.0 * W * chunks_of(work).kept
        solve = sum(i * i + i for i in range(1, CHUNK)) / CHUNK
        return 4.0 * W * LIBRARY_CHUNKS.kept + 4.0 * heads * solve
    return b * (11 * W + heads) + 4.0 * heads


def attention_workspace_bytes(work: Workload, layer: LayerWork, fused: FusedProviders, backward: bool) -> float:
    """Alive only while one attention block runs, per token.

    Linear: unfused, two gradients of [T, C, n·d] and six of [T, n·d] in backward and two squares in forward; by a
    library, its peak less what it keeps. Sparse, unfused: fp32 scores of every indexer head over the sequence, twice
    (the product and its scaled copy), ``8·n_I·S``, in each forward.
    """
    shape, b, W = work.profile.shape, work.base_bytes, work.linear_width
    if layer.kind.attention == "linear":
        if unfused_chunks(work, fused):
            own = chunks_of(work)
            return 4.0 * W * (own.backward if backward else own.forward)
        return max(0.0, LINEAR_ATTENTION_PEAK - 5 * b) * W if backward else 0.0
    if layer.kind.attention == "dsa" and shape.index_num_heads and not backward:
        queries = b * (shape.index_num_heads + 1) * shape.index_head_dim
        if fused.provider("dsa") == "eager":
            return 8.0 * shape.index_num_heads * work.recipe.batch.sequence_tokens + 3 * queries
        return queries
    return 0.0


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
    """What a checkpointed layer keeps: its input, b·H per token, and the choices that its recomputation repeats.

    Choices: 8 bytes for each expert of a token; for each key that an unfused indexer chose 8, and 4 handed on.
    """
    shape = work.profile.shape
    choices = 8 * shape.experts_per_token if layer.routed else 0
    if layer.kind.attention == "dsa":
        chosen = min(shape.index_topk, work.recipe.batch.sequence_tokens)
        choices += (12 if fused.provider("dsa") == "eager" else 4) * chosen
    return tokens * (work.base_bytes * work.hidden + choices)


def after_attention_bytes(work: Workload, layer: LayerWork, fused: FusedProviders, tokens: Any, kept: Any) -> Any:
    """Of what a layer keeps, the part that its backward has freed when it comes to attention."""
    return kept - tokens * (attention_bytes(work, layer, fused) + residual_bytes(work, fused) / 2)


def backward_workspace_bytes(
    work: Workload,
    layer: LayerWork,
    tokens: Any,
    rows: Any,
    fused: FusedProviders,
    kept: Any,
    expert_tp: Any = 1,
    recomputed: Any = False,
) -> Any:
    """Gradients alive at once inside the backward of one layer, beyond everything that the layer keeps.

    In the MLP's part two hidden gradients, or one where one operator is the whole layer and no shared experts have
    given theirs (it is handed the residual stream's own); for experts see :func:`routed_backward_bytes`, and where the
    layer is recomputed that operator also lets its tokens go; for a dense MLP d(gate, up) and, where eager, the
    gradient of their product. In attention's part its own, when what stands behind it in the layer is free already.
    """
    b, hidden = work.base_bytes, tokens * work.base_bytes * work.hidden
    whole = layer.routed and fused.kernel("experts") == "moe_layer"
    routed = routed_backward_bytes(work, layer, rows, fused, expert_tp, recomputed) if layer.routed else 0
    let_go = np.where(recomputed, hidden, 0.0) if whole and not layer.adapters.mlp_in else 0.0
    inner = 3 if fused.provider("swiglu") == "eager" and not layer.routed else 2
    gradients = hidden * (1 if whole and not layer.mlp_width else 2) + tokens * b * inner * layer.mlp_width
    mlp = gradients + np.maximum(routed - let_go, 0.0)
    attention = tokens * (attention_workspace_bytes(work, layer, fused, True) + 2 * b * work.hidden)
    return np.maximum(mlp, attention - after_attention_bytes(work, layer, fused, tokens, kept))


def routed_backward_bytes(
    work: Workload, layer: LayerWork, rows: Any, fused: FusedProviders, expert_tp: Any = 1, recomputed: Any = False
) -> Any:
    """Of these the experts', beyond what they keep.

    Eager or packed: d(gate, up) and two row gradients. Our kernels write d(gate, up) over gate and up and, with
    adapters, the gradient of their product over it (``Held`` of ``kernels/grouped_lora_mlp/layer.py``). So there are
    one row gradient where one operator is the whole layer, two otherwise, and r values for each stack; and where the
    layer is recomputed, nobody else holds what the experts kept: the product, and the rows if they are the experts'
    own, are free before the rows' gradient is made.
    """
    width, ranks = work.profile.shape.expert_intermediate_size / expert_tp, layer.adapters.expert_ranks
    row, whole = work.row_width, fused.kernel("experts") == "moe_layer"
    if fused.kernel("experts") not in OVERWRITING:
        return rows * work.base_bytes * (2 * width + 2 * row)
    if not (layer.adapters.experts_in or layer.adapters.experts_out):
        return rows * work.base_bytes * (np.maximum(row, width) + (0 if whole else row))
    freed = np.where(recomputed, width + (0 if whole else row), 0.0)
    return rows * work.base_bytes * ((1 if whole else 2) * row + ranks - freed)


def routed_forward_bytes(work: Workload, layer: LayerWork, rows: Any, fused: FusedProviders, expert_tp: Any = 1) -> Any:
    """Gathered rows and their result; where one operator is the whole layer the result, and the activation's that
    nobody keeps without adapters."""
    b, inner = work.base_bytes, work.profile.shape.expert_intermediate_size / expert_tp
    if fused.kernel("experts") != "moe_layer":
        return 2 * rows * b * work.row_width
    adapted = layer.adapters.experts_in or layer.adapters.experts_out
    return rows * b * (work.row_width + (0 if adapted else inner))


def recomputing_workspace_bytes(work: Workload, layer: LayerWork, fused: FusedProviders, tokens: Any, kept: Any) -> Any:
    """Temporaries of a recomputed attention beyond everything that the layer keeps; at least nothing."""
    again = tokens * attention_workspace_bytes(work, layer, fused, False)
    return np.maximum(0.0, again - after_attention_bytes(work, layer, fused, tokens, kept))


def forward_workspace_bytes(
    work: Workload, layer: LayerWork, tokens: Any, rows: Any, fused: FusedProviders, expert_tp: Any = 1, kept: Any = 0.0
) -> Any:
    """Temporaries of one layer's forward: of attention, or gathered rows and their result, or the MLP's product.

    Args:
        kept: what the layer keeps of its own. While attention's temporaries are there, what stands behind it in the
            layer is not kept yet, nor under an unfused indexer attention's mask and its result.
    """
    b = work.base_bytes
    routed = routed_forward_bytes(work, layer, rows, fused, expert_tp) if layer.routed else 0
    attention = tokens * attention_workspace_bytes(work, layer, fused, False)
    behind = np.maximum(0.0, after_attention_bytes(work, layer, fused, tokens, kept))
    if layer.kind.attention == "dsa" and work.latent(layer) and fused.provider("dsa") == "eager":
        shape = work.profile.shape
        result = shape.num_attention_heads * shape.v_head_dim * (2 if layer.adapters.attention_out else 1)
        behind = behind + tokens * b * (work.recipe.batch.sequence_tokens + result)
    behind = np.minimum(behind, kept)
    return np.maximum(tokens * b * (work.hidden + layer.mlp_width) + routed, attention - behind)
