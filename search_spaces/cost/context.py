"""Context parallelism: what the ranks of one sequence exchange in a layer, compute besides, and hold for it.

A sequence is cut into 2·cp pieces; a rank has the i-th from the front and the i-th from the end, so that causal work is
even. What passes between ranks depends on the attention (``runtime/context*.py``):

* softmax: keys and values of all tokens, gathered before attention. Backward gathers again, runs attention again, and
  reduces their gradient, which is fp32;
* latent (MLA): the same with compressed keys and values; each rank expands them for 1/cp of the heads at a time;
* sparse (DSA): the same with the indexer's keys, whose gradient nothing needs. By our operators there is nothing to
  expand: they attend in the latent; the family's own code expands as MLA does;
* linear: states. A piece moves the state by ``S⁺ = M S + N``; a second run of the recurrence over values and keys gives
  ``[N | M]``, which pieces gather in fp32, and reduce the gradient of. The convolution's three inputs before a piece
  are left out.

Legend: S tokens of a sequence, T tokens of a rank, m sequences of a micro-batch, n heads, d head dim of linear
attention, W = n·d, r_kv latent width, d_n, d_r, d_v parts of a head, d_I indexer width, b bytes per value, t TP degree.
"""

from __future__ import annotations

import numpy as np

from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.plans import Array, Plans
from shardwright.search_spaces.cost.workload import LayerWork, Workload

PIECES = 2
"""Pieces of a sequence on a rank."""

STATE_BYTES = 4

GRADIENT_BYTES = 4


def attends_again(layer: LayerWork) -> bool:
    """Whether backward runs the attention itself again, for what it gathered was not kept."""
    return layer.kind.attention not in ("none", "linear")


def expands(work: Workload, layer: LayerWork, fused: FusedProviders) -> bool:
    """Whether keys and values of all tokens are expanded: by latent attention, and by a family's own sparse one."""
    kinds = ("mla",) if fused.kernel("dsa") else ("mla", "dsa")
    return layer.kind.attention in kinds and work.latent(layer)


def keys_seen(plans: Plans) -> Array:
    """Share of all keys that a rank's queries meet where masked keys are not skipped: ``(2·cp + 1)/(4·cp)``.

    A piece stands before the keys that end with it, so a rank's two, the i-th from the front and from the end, meet
    ``2·cp + 1`` pieces of keys out of twice ``2·cp``. Whole rows meet all.
    """
    return np.where(plans.cp > 1, (PIECES * plans.cp + 1) / (2 * PIECES * plans.cp), 1.0)


def exchanged_bytes(work: Workload, layer: LayerWork, plans: Plans, tokens: Array) -> tuple[Array, Array]:
    """Bytes of the whole tensors that a CP group exchanges: (in each forward, in backward); 0 where cp is 1.

    Softmax: ``2·b·m·S·g·d/t``, in backward again and their gradient in fp32. Latent: ``b·m·S·(r_kv + d_r)``, with
    ``b·m·S·d_I`` of an indexer, in backward the first part again and its gradient. Linear: ``4·m·2·cp·n·d·2·d/t``, in
    backward as much.
    """
    shape = work.profile.shape
    whole, b, none = tokens * plans.tp * plans.cp, work.base_bytes, np.zeros(len(plans))
    if layer.kind.attention == "none":
        return none, none
    if layer.kind.attention == "linear":
        forward = plans.micro * PIECES * plans.cp * STATE_BYTES * 2 * _state_values(work) / plans.tp
        backward = forward
    elif work.latent(layer):
        forward = b * whole * _latent_width(work, layer)
        backward = (b + GRADIENT_BYTES) * whole * (shape.kv_lora_rank + shape.qk_rope_head_dim)
    else:
        forward = 2 * b * whole * work.key_width / plans.tp
        backward = (1 + GRADIENT_BYTES / b) * forward
    shared = plans.cp > 1
    return np.where(shared, forward, 0.0), np.where(shared, backward, 0.0)


def further_flops(
    work: Workload, layer: LayerWork, plans: Plans, fused: FusedProviders, tokens: Array
) -> tuple[Array, Array]:
    """Flops that a rank has only because its sequence is cut: (forward, backward); 0 where cp is 1.

    Latent, and sparse by the family's own code: keys and values of other ranks' tokens are expanded,
    ``2·(m·S − T·t)·r_kv·n·(d_n + d_v)/t``; in backward again, and the gradient of their input. Linear: the recurrence
    once more over values and keys, ``16·T·d·W``, and its gradient. Attention that runs again in backward is counted by
    who counts attention (:func:`attends_again`).
    """
    shape, none = work.profile.shape, np.zeros(len(plans))
    if layer.kind.attention == "linear":
        forward = 16.0 * tokens * _state_values(work)
        backward = 2 * forward
    elif expands(work, layer, fused):
        expansion = shape.kv_lora_rank * shape.num_attention_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        forward = 2.0 * tokens * (plans.cp - 1) * expansion
        backward = 2 * forward
    else:
        return none, none
    shared = plans.cp > 1
    return np.where(shared, forward, 0.0), np.where(shared, backward, 0.0)


def held_bytes(work: Workload, layer: LayerWork, plans: Plans, fused: FusedProviders, tokens: Array) -> Array:
    """Alive on a rank while such a layer runs, beyond its own tokens; 0 where cp is 1.

    Softmax: keys and values of all tokens, ``2·b·m·S·g·d/t``, and their gradient in fp32. Latent: the same of all that
    is compressed, and where it is expanded a rank's share and its gradient, ``2·b·T·n·(d_n + d_r + d_v)``. Linear: the
    states of all pieces and their gradient.
    """
    shape, b = work.profile.shape, work.base_bytes
    gathered, _ = exchanged_bytes(work, layer, plans, tokens)
    if layer.kind.attention == "linear":
        size = 2 * gathered
    else:
        size = gathered * (1 + GRADIENT_BYTES / b)
        if expands(work, layer, fused):
            key = shape.qk_nope_head_dim + shape.qk_rope_head_dim
            size = size + 2 * b * tokens * shape.num_attention_heads * (key + shape.v_head_dim)
    return np.where(plans.cp > 1, size, 0.0)


def _state_values(work: Workload) -> float:
    """n·d·d of one linear attention."""
    return float(work.linear_width * (work.profile.shape.linear_head_dim or work.profile.shape.head_dim))


def _latent_width(work: Workload, layer: LayerWork) -> int:
    shape = work.profile.shape
    index = shape.index_head_dim if layer.kind.attention == "dsa" else 0
    return shape.kv_lora_rank + shape.qk_rope_head_dim + index
