"""Context parallelism: what the ranks of one sequence exchange in a layer, compute besides, and hold for it.

A sequence is cut into 2·cp pieces; a rank has the i-th from the front and the i-th from the end, so that causal work is
even. What passes between ranks depends on the attention:

* softmax: keys and values of all tokens, around a ring, while those of the piece before are attended to;
* latent (MLA): the compressed keys and values of all tokens, gathered before attention; each rank expands them piece by
  piece. Backward gathers again, and reduces their gradient;
* sparse (DSA): the same with the indexer's keys, and nothing to expand: it attends in the latent;
* linear: states. A piece moves the state by ``S⁺ = M S + N``; pieces gather ``[N | M]`` in fp32, and in backward the
  gradient of their first states (``kernels/kda/context.py``). The convolution's three tokens before a piece are left
  out.

Legend: S tokens of a sequence, T tokens of a rank, m sequences of a micro-batch, n heads, d head dim of linear
attention, W = n·d, r_kv latent width, d_n, d_r, d_v parts of a head, d_I indexer width, b bytes per value, t TP degree.
"""

from __future__ import annotations

import numpy as np

from shardwright.search_spaces.cost.plans import Array, Plans
from shardwright.search_spaces.cost.workload import LayerWork, Workload

PIECES = 2
"""Pieces of a sequence on a rank."""

STATE_BYTES = 4


def passes_in_ring(work: Workload, layer: LayerWork) -> bool:
    """Whether keys and values travel while attention works, so that it hides them."""
    return layer.kind.attention not in ("none", "linear") and not work.latent(layer)


def exchanged_bytes(work: Workload, layer: LayerWork, plans: Plans, tokens: Array) -> tuple[Array, Array]:
    """Bytes of the whole tensors that a CP group exchanges: (in each forward, in backward); 0 where cp is 1.

    Softmax: ``2·b·m·S·g·d/t``, twice in backward. Latent: ``b·m·S·(r_kv + d_r)``, twice in backward. Linear:
    ``4·m·2·cp·n·d·2·d/t`` and half of that.
    """
    whole, b, none = tokens * plans.tp * plans.cp, work.base_bytes, np.zeros(len(plans))
    if layer.kind.attention == "none":
        return none, none
    if layer.kind.attention == "linear":
        forward = plans.micro * PIECES * plans.cp * STATE_BYTES * 2 * _state_values(work) / plans.tp
        backward = forward / 2
    elif work.latent(layer):
        forward = b * whole * _latent_width(work, layer)
        backward = 2 * forward
    else:
        forward = 2 * b * whole * work.key_width / plans.tp
        backward = 2 * forward
    shared = plans.cp > 1
    return np.where(shared, forward, 0.0), np.where(shared, backward, 0.0)


def further_flops(work: Workload, layer: LayerWork, plans: Plans, tokens: Array) -> tuple[Array, Array]:
    """Flops that a rank has only because its sequence is cut: (forward, backward); 0 where cp is 1.

    Latent: keys and values of other ranks' tokens are expanded, ``2·(m·S − T·t)·r_kv·n·(d_n + d_v)/t``; in backward
    again, and the gradient of their input. Linear: how a piece moves the state, two products of ``[d, d] × [d, 2·d]``
    for a token and head, ``8·T·d·W``; in backward the gradient of the first state, two of ``[d, d] × [d, d]``.
    """
    shape, none = work.profile.shape, np.zeros(len(plans))
    if layer.kind.attention == "linear":
        forward = 8.0 * tokens * _state_values(work)
        backward = forward / 2
    elif layer.kind.attention == "mla" and work.latent(layer):
        expansion = shape.kv_lora_rank * shape.num_attention_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        forward = 2.0 * tokens * (plans.cp - 1) * expansion
        backward = 2 * forward
    else:
        return none, none
    shared = plans.cp > 1
    return np.where(shared, forward, 0.0), np.where(shared, backward, 0.0)


def held_bytes(work: Workload, layer: LayerWork, plans: Plans, tokens: Array) -> Array:
    """Alive on a rank while such a layer runs, beyond its own tokens; 0 where cp is 1.

    Softmax: keys and values of two neighbours, ``4·b·T·g·d``. Latent: everything compressed and its gradient, and where
    it is expanded a rank's share and its gradient, ``2·b·T·n·(d_n + d_r + d_v)``. Linear: the states of all pieces.
    """
    shape, b = work.profile.shape, work.base_bytes
    gathered, _ = exchanged_bytes(work, layer, plans, tokens)
    if layer.kind.attention == "linear":
        size = gathered
    elif work.latent(layer):
        size = 2 * gathered
        if layer.kind.attention == "mla":
            key = shape.qk_nope_head_dim + shape.qk_rope_head_dim
            size = size + 2 * b * tokens * shape.num_attention_heads * (key + shape.v_head_dim)
    else:
        size = 4 * b * tokens * work.key_width * (layer.kind.attention != "none")
    return np.where(plans.cp > 1, size, 0.0)


def _state_values(work: Workload) -> float:
    """n·d·d of one linear attention."""
    return float(work.linear_width * (work.profile.shape.linear_head_dim or work.profile.shape.head_dim))


def _latent_width(work: Workload, layer: LayerWork) -> int:
    shape = work.profile.shape
    index = shape.index_head_dim if layer.kind.attention == "dsa" else 0
    return shape.kv_lora_rank + shape.qk_rope_head_dim + index
