"""What is alive only while one layer's forward or backward runs, beyond what the layer keeps.

Counted from the modules that run, as ``activations`` does, and held against the same traces.

Legend: T tokens, S tokens of a sequence, C tokens of a chunk of linear attention, n·d its width, n_I indexer heads, r
LoRA rank. All sizes in bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.search_spaces.cost.activations import attention_bytes, residual_bytes
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.linear_attention import LINEAR_ATTENTION_PEAK, chunks_of, unfused_chunks
from shardwright.search_spaces.cost.mixes import mixes_of
from shardwright.search_spaces.cost.workload import LayerWork, Workload

OVERWRITING = ("moe_layer", "grouped_lora_mlp")
"""Kernels of the experts block whose backward needs no memory of its own for what it turns into gradients."""


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


def after_attention_bytes(work: Workload, layer: LayerWork, fused: FusedProviders, tokens: Any, kept: Any) -> Any:
    """Of what a layer keeps, the part that its backward has freed when it comes to attention."""
    before = attention_bytes(work, layer, fused) + residual_bytes(work, fused) / 2 + mixes_of(work, layer, fused).first
    return kept - tokens * before


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
    own = np.maximum(tokens * b * (work.hidden + layer.mlp_width) + routed, attention - behind)
    return np.maximum(own, tokens * mixes_of(work, layer, fused).passing - behind)


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
    gradient of their product. In attention's part its own, when what stands behind it in the layer is free already; so
    for a mix of earlier rows (``mixes``).
    """
    b, hidden = work.base_bytes, tokens * work.base_bytes * work.hidden
    whole = layer.routed and fused.kernel("experts") == "moe_layer"
    routed = routed_backward_bytes(work, layer, rows, fused, expert_tp, recomputed) if layer.routed else 0
    let_go = np.where(recomputed, hidden, 0.0) if whole and not layer.adapters.mlp_in else 0.0
    inner = 3 if fused.provider("swiglu") == "eager" and not layer.routed else 2
    gradients = hidden * (1 if whole and not layer.mlp_width else 2) + tokens * b * inner * layer.mlp_width
    mlp = gradients + np.maximum(routed - let_go, 0.0)
    attention = tokens * (attention_workspace_bytes(work, layer, fused, True) + 2 * b * work.hidden)
    behind = after_attention_bytes(work, layer, fused, tokens, kept)
    mixes = mixes_of(work, layer, fused)
    second = tokens * (mixes.second_backward + mixes.second) - behind
    first = tokens * (mixes.first_backward + mixes.first) - kept
    return np.maximum(np.maximum(mlp, attention - behind), np.maximum(first, second))


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
