"""What the host does for one layer: its kernels, each weighed by the host's time for it.

One unit is the host's time per kernel of adapted linear maps, which ``calibrate`` measures. A kernel of one of torch's
elementwise operators takes the host less; a node of ours, written in Python, more than its kernels. Kernels are counted
in traces of the runtime's executor, weights are ratios of host times in one profile (Qwen3-30B-A3B, eight layers, one
H200).

Legend: E experts, C tokens of a chunk of linear attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.cost import family
from shardwright.search_spaces.cost.fusion import FusedProviders, kernel_cost
from shardwright.search_spaces.cost.linear_attention import chunks_of, unfused_chunks
from shardwright.search_spaces.cost.residuals import residual_moves
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.providers import PROVIDERS

Counts = tuple[float, float]
"""Of a forward and a backward."""

PLAIN = 0.63
"""Units of an elementwise operator's kernel: in that profile a sum takes 25.0 µs of the host's time, and a product,
which stands for the unit, 39.7."""

NODES: dict[str, Counts] = {
    "experts": (21, 15.5),
    "router": (6.5, 1.9),
    "qk_norm_rope": (4.5, 3.5),
    "add_rms_norm": (3.8, 2),
    "rms_norm": (2.6, 2.3),
}
"""Units of our own nodes, by operator: 843 and 615 µs for a whole MoE layer, 257 and 73 for a router, over a product's
39.7."""

PROJECTIONS = {"none": 0, "full": 4, "sliding": 4, "mla": 4, "dsa": 4, "linear": 8}
"""Products of a layer's attention, without that which compresses queries; an adapter on one adds ``ADAPTED``."""

ADAPTED: Counts = (4, 8)
"""Two casts and two products; in backward five products and gradients scaled and cast."""

BESIDE: dict[str, Counts] = {
    "none": (2, 4),
    "full": (3, 10),
    "sliding": (3, 10),
    "mla": (24, 40),
    "dsa": (24, 40),
    "linear": (13, 20),
}
"""Plain kernels beside projections, norms and rotation: attention (five backward), residual sums, and sums of what
three projections hand back; in latent attention also the norm of what is compressed, splits and joins."""

QUERY_LATENT: Counts = (9, 13)
"""Plain kernels of a compressed query: its product and its norm."""

LATENT_ROTATION: Counts = (16, 27)
"""Plain kernels that turn the shared key and the queries' part that meets it."""

UNTURNED = ("kimi_linear", "kimi_k3")
"""Families whose latent attention has no positions."""

ROTATION: Counts = (10, 20)
"""Plain kernels that turn q and k where no norm of heads is counted with them."""

INDEXER: Counts = (38, 0)
"""Plain kernels of an eager indexer with its products, its rotation, its choice of keys and their mask."""

ROUTER: Counts = (11, 14)
"""Plain kernels of an eager router."""

ROWS: Counts = (26, 17)
"""Plain kernels of a MoE layer by torch beside its gate's: sort, gather, both grouped products with their offsets,
combine."""

ADAPTED_EXPERTS: Counts = (9, 17)
"""Kernels of an adapter on one stack by torch: four grouped products and their offsets, casts, sums."""

EXPERT_CASTS: Counts = (4, 4)
"""Plain kernels that bring the adapters of our own node to its dtype and their gradients back."""

NEW_LAUNCH, NEW_LAYOUT = 1.8, 3.8
"""Units that rows which travelled cost our node besides, for they are never as many as before: each launch goes through
triton (25 to 60 µs) instead of being bound (``kernels/bound.py``), and its guards run (92 µs, ``kernels/admitted.py``),
over 24 µs."""

MLP: Counts = (3, 3)
"""Products of a dense MLP or of shared experts, beside the kernels of its gate."""

MLP_SUMS: Counts = (0, 2)
"""Plain kernels of its backward besides: gate and up hand back two gradients, and what is shared a third."""

RESIDUAL_SUMS: Counts = (2, 2)
"""Plain kernels of ``BESIDE`` that add to a residual stream, which attention residuals take the place of."""

CHUNK_KERNELS: tuple[Counts, Counts] = ((7.1, 19), (19, 62))
"""Plain kernels of one unfused linear attention, forward and backward: (a row of a chunk's triangle but the first,
solved one by one; a chunk of the sequence)."""

CHUNK_SAVED = (2.0, 22.0)
"""Tensors that it saves for its backward, of a row and of a chunk: 927 and 1,631 of one layer in traces of 2,048 and
4,096 tokens, of which 97 are neither's, somewhat more than another layer's."""

SAVED_TENSOR = 0.33
"""Units of one tensor that goes through checkpointing's hooks: in a trace of eight layers 461 in each of two forwards
take 15 ms of the host's time, where a kernel takes 50.6 µs."""


@dataclass(frozen=True)
class Launches:
    """Units of one layer, (forward, backward)."""

    layer: Counts
    attention: Counts
    """Of them those of an unfused linear attention."""
    received: Counts = (0.0, 0.0)
    """Besides, where the rows of experts have travelled."""
    saved: float = 0.0
    """Besides, in each forward of a recomputed layer: what an unfused linear attention saves, through hooks."""


def launches_of(
    work: Workload, layer: LayerWork, fused: FusedProviders, norms: Sequence[tuple[str, float, OpCost]]
) -> Launches:
    """All units of one layer.

    Args:
        norms: (operator, how many in a layer, its cost) for each way that the layer's norms run.
    """
    kind, found, received = layer.kind.attention, [0.0, 0.0], (0.0, 0.0)

    def add(counts: Counts, times: float = 1.0) -> None:
        for at in (0, 1):
            found[at] += times * counts[at]

    experts = 2.0 if layer.adapters.expert_ranks else 0.0
    add((PROJECTIONS[kind], PROJECTIONS[kind]))
    add(BESIDE[kind], PLAIN)
    add(ADAPTED, max(0.0, layer.adapters.targets - experts))
    if work.latent(layer) and work.profile.shape.q_lora_rank:
        add(QUERY_LATENT, PLAIN)
    if work.latent(layer) and work.profile.model_type not in UNTURNED:
        add(LATENT_ROTATION, PLAIN)
    if kind == "dsa" and not fused.kernel("dsa"):
        add(INDEXER, PLAIN)
    if fused.kernel("qk_norm_rope"):
        add(NODES["qk_norm_rope"])
    elif kind in ("full", "sliding") and not any(op == "qk_norm_rope" for op, _, _ in norms):
        add(ROTATION, PLAIN)
    gate = family.eager_gate(work.profile.model_type, work.dtype)[1]
    if layer.mlp_width:
        add(MLP)
        add(MLP_SUMS, PLAIN)
        add(units("gate", family.gate_cost(work, fused, family.COUNTED_TOKENS, layer.mlp_width)))
    mixed = residual_moves(work, layer, fused).kernels
    if mixed[0]:
        add(mixed, PLAIN)
        add(RESIDUAL_SUMS, -PLAIN)
    for op, share, cost in norms:
        add(units(op, cost), share)
    if layer.routed:
        add(NODES["router"] if fused.kernel("router") else (PLAIN * ROUTER[0], PLAIN * ROUTER[1]))
        if fused.provider("experts") in PROVIDERS:
            add(ROWS, PLAIN)
            add(gate, PLAIN)
            add(ADAPTED_EXPERTS, experts)
        else:
            add(NODES["experts"])
            add(EXPERT_CASTS, PLAIN if experts else 0.0)
            received = _received(work, layer)
    chunked: Counts = (0.0, 0.0)
    saved = 0.0
    if kind == "linear" and unfused_chunks(work, fused):
        size = chunks_of(work).tokens
        chunks = work.recipe.batch.sequence_tokens / size
        forward, backward = (PLAIN * (row * (size - 1) + each * chunks) for row, each in CHUNK_KERNELS)
        chunked = forward, backward
        saved = SAVED_TENSOR * (CHUNK_SAVED[0] * (size - 1) + CHUNK_SAVED[1] * chunks)
        add(chunked)
    return Launches((found[0], found[1]), chunked, received, saved)


def _received(work: Workload, layer: LayerWork) -> Counts:
    """Units beyond those of rows that are as many in every step."""
    shape, rank = work.profile.shape, round(layer.adapters.expert_ranks / 2)
    sizes = {"R": 4096, "H": work.row_width, "I": shape.expert_intermediate_size, "E": shape.num_experts}
    cost = kernel_cost("experts", {**sizes, "r": rank}, work.dtype)
    backward = cost.backward or cost.forward
    return NEW_LAYOUT + NEW_LAUNCH * cost.forward.launches, NEW_LAYOUT + NEW_LAUNCH * backward.launches


def units(op: str, cost: OpCost) -> Counts:
    """Of one operator: a node of ours as it was seen, or as many plain kernels as it launches."""
    if cost.provider not in PROVIDERS and op in NODES:
        return NODES[op]
    backward = cost.backward or cost.forward
    return PLAIN * cost.forward.launches, PLAIN * backward.launches
