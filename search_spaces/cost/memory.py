"""Memory of the fullest rank, by component and moment, for all plans at once.

Legend: w bytes per frozen weight as stored, N parameters, U bytes of one layer gathered, P prefetch depth,
e = EP degree, z = shards of an EP rank's experts, t = TP degree, p pipeline stages, T tokens of a
micro-batch on a rank, R routed rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.cost import MemoryComponent, MemoryReport, Moment
from shardwright.schemas.ops import EvidenceOrigin
from shardwright.search_spaces.cost import activations
from shardwright.search_spaces.cost.communication import dense_group, shard_group
from shardwright.search_spaces.cost.formats import dense_bytes, dequantised_bytes, expert_bytes
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.plans import Array, Flags, Plans, per_value
from shardwright.search_spaces.cost.routing import MEMORY_QUANTILE, routed_rows
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.providers import PROVIDERS, loss_bytes
from shardwright.search_spaces.sharding import padding_factors

ALL: tuple[Moment, ...] = ("load", "forward_peak", "loss", "backward_peak", "optimizer_step")
STEP: tuple[Moment, ...] = ("forward_peak", "loss", "backward_peak", "optimizer_step")
PASSES: tuple[Moment, ...] = ("forward_peak", "backward_peak")
KEPT: tuple[Moment, ...] = ("forward_peak", "loss", "backward_peak")

ALLOCATOR_SLACK = 0.05
"""Reserved over allocated memory, less one: published pairs on B200 give 0.040 and 0.056."""

CUDA_CONTEXT_BYTES = 750_000_000
"""Context and libraries on an accelerator, outside the allocator; assumed, 0.5–1 GiB."""

NCCL_GROUP_BYTES = 375_000_000
"""One NCCL communicator of 2–8 ranks: 0.34–0.39 GiB published for H200."""

CPU_PROCESS_BYTES = 560_000_000
"""A process that has imported torch and transformers: measured 395–560 MB resident."""

GLOO_GROUP_BYTES = 16_000_000
"""Buffers of one gloo group; assumed."""

HOST_SHARE = 0.8
"""Share of host memory that offloading may fill."""


@dataclass(frozen=True)
class Term:
    """One component for every plan, whole bytes."""

    name: str
    bytes: Array
    moments: tuple[Moment, ...]
    formula: str
    origin: EvidenceOrigin = "modelled"
    always: bool = False
    """Reported even where it is zero."""


@dataclass
class Terms:
    """Collects components and adds them up by moment."""

    plans: Plans
    found: list[Term] = field(default_factory=list)

    def add(
        self,
        name: str,
        size: Array | float,
        moments: tuple[Moment, ...],
        formula: str,
        origin: EvidenceOrigin = "modelled",
        *,
        always: bool = False,
    ) -> None:
        whole = np.ceil(np.broadcast_to(np.asarray(size, dtype=np.float64), (len(self.plans),)))
        if always or np.any(whole > 0):
            self.found.append(Term(name, whole, moments, formula, origin, always))

    def by_moment(self) -> Array:
        """[moments, plans]."""
        none = np.zeros(len(self.plans))
        return np.stack([sum((t.bytes for t in self.found if moment in t.moments), start=none) for moment in ALL])


@dataclass(frozen=True)
class Memory:
    """Memory of every plan on its fullest pipeline stage."""

    stages: tuple[tuple[Term, ...], ...]
    """Components of the first and, with pipelines, of the last stage."""
    stage: Array
    """Which of them is the fullest."""
    by_moment: Array
    peak: Array
    reserved: Array
    budget: int

    @property
    def fits(self) -> Flags:
        return self.reserved <= self.budget

    def report(self, plan: int) -> MemoryReport:
        """The report of one plan."""
        terms = self.stages[int(self.stage[plan])]
        moments = {moment: int(self.by_moment[i, plan]) for i, moment in enumerate(ALL)}
        return MemoryReport(
            components=tuple(
                MemoryComponent(
                    name=t.name, bytes=int(t.bytes[plan]), moments=t.moments, formula=t.formula, origin=t.origin
                )
                for t in terms
                if t.always or t.bytes[plan] > 0
            ),
            by_moment=moments,
            peak_bytes=int(self.peak[plan]),
            peak_moment=max(ALL, key=lambda moment: (moments[moment], -ALL.index(moment))),
            reserved_bytes=int(self.reserved[plan]),
            budget_bytes=self.budget,
        )


def memory_of(work: Workload, cluster: ClusterSpec, plans: Plans, fused: FusedProviders) -> Memory:
    """Every memory term of LoRA on a frozen base under FSDP2 × EP, with pipelines on the fullest stage."""
    ends = ("first", "last") if np.any(plans.pp > 1) else ("first",)
    stages, moments, reserves = [], [], []
    for end in ends:
        terms = Terms(plans)
        stage = Stage.of(work, plans, end)
        _static(terms, work, cluster, plans, stage)
        _gathers(terms, work, cluster, plans, stage)
        _activations(terms, work, cluster, plans, stage, fused)
        _dispatch(terms, work, plans)
        _loss(terms, work, plans, stage, fused)
        reserves.append(_reserve(terms, work, cluster, plans))
        moments.append(terms.by_moment())
        stages.append(tuple(terms.found))
    peaks = np.stack([one.max(axis=0) for one in moments])
    fullest = peaks.argmax(axis=0)
    peak = peaks.max(axis=0)
    outside = 0.0 if cluster.device.type == "cpu" else reserves[0]
    return Memory(
        stages=tuple(stages),
        stage=fullest,
        by_moment=np.where(fullest == 0, moments[0], moments[-1]),
        peak=peak,
        reserved=np.ceil(peak * (1 + ALLOCATOR_SLACK)) + outside,
        budget=cluster.device.usable_memory_bytes,
    )


@dataclass(frozen=True)
class Stage:
    """One end of the pipeline: its share of layers, whether it holds embedding and head, batches in flight."""

    layers: Array
    embedding: Array
    head: Array
    in_flight: Array

    @classmethod
    def of(cls, work: Workload, plans: Plans, end: str) -> Stage:
        alone = plans.pp == 1
        first = np.ones(len(plans)) if end == "first" else alone.astype(np.float64)
        last = alone.astype(np.float64) if end == "first" else np.ones(len(plans))
        waiting = np.where(alone, 1.0, np.minimum(plans.accumulation, plans.pp if end == "first" else 1.0))
        return cls(plans.stage_share(work.profile.shape.num_layers), first, last, waiting)

    def root_parameters(self, work: Workload) -> Array:
        """Embedding and head are halves of the root (one table where they are tied)."""
        if work.profile.shape.tie_word_embeddings:
            return np.full_like(self.head, work.root_parameters)
        return work.root_parameters * (self.embedding + self.head) / 2


def rows_of(work: Workload, plans: Plans, tokens: Array, quantile: float | None = None) -> Array:
    """Routed rows of the fullest rank in one micro-batch; times expert_tp, whose ranks compute all alike."""
    shape = work.profile.shape
    rows = routed_rows(
        tokens,
        shape.experts_per_token,
        shape.num_experts,
        plans.ep,
        plans.padding,
        quantile,
        work.loads,
        plans.balanced,
        plans.redundant,
    )
    return np.asarray(rows * plans.expert_tp)


def gathered_layer_bytes(work: Workload, layer: LayerWork, plans: Plans) -> tuple[Array, Array]:
    """Bytes of one layer that are gathered: (non-expert over shard × ep × cp, experts over z).

    Base as stored, adapters in the compute dtype. A group of one rank gathers nothing.
    """
    b, lora = work.base_bytes, layer.adapters
    dense = (dense_bytes(work, plans) * layer.dense_parameters + b * lora.dense_parameters) / plans.tp
    share = plans.ep * plans.expert_tp
    experts = (expert_bytes(work, plans) * layer.expert_parameters + b * lora.expert_parameters) / share
    return np.where(plans.dense_shards > 1, dense, 0.0), np.where(plans.expert_shards > 1, experts, 0.0)


def gathered_root_bytes(work: Workload, plans: Plans, root: Array | float | None = None) -> Array:
    """Embedding, head and final norm, which stay gathered from the first use to the end of backward."""
    parameters = work.root_parameters if root is None else root
    size = work.base_bytes * (parameters + work.root_adapters.dense_parameters) / plans.tp
    return np.where(plans.dense_shards > 1, size, 0.0)


def adapter_shard(work: Workload, plans: Plans, layers: Array | float = 1.0) -> Array:
    """Adapter parameters of one rank."""
    experts = work.adapter_expert_parameters * padding_factors(work.profile.shape, plans)
    spread = plans.ep * plans.expert_tp * plans.expert_shards
    return layers * (work.adapter_dense_parameters / (plans.tp * plans.dense_shards) + experts / spread)


def expert_base_bytes(work: Workload, plans: Plans, layers: Array | float = 1.0) -> Array:
    """Stored routed experts of one rank, with padding and redundant copies."""
    spread = plans.ep * plans.expert_tp * plans.expert_shards
    padded = work.expert_total * padding_factors(work.profile.shape, plans) / spread
    copies = plans.redundant * work.expert_total / max(work.profile.shape.num_experts, 1)
    return layers * expert_bytes(work, plans) * (padded + copies / (plans.expert_tp * plans.expert_shards))


def kept_bytes(work: Workload, layer: LayerWork, plans: Plans, fused: FusedProviders, tokens: Array) -> Array:
    """What one layer of this kind keeps without checkpointing."""
    rows = rows_of(work, plans, tokens, MEMORY_QUANTILE)
    copies = activations.adapter_copies_bytes(work, layer, plans)
    return np.asarray(activations.layer_bytes(work, layer, tokens, rows, fused, plans.expert_tp) + copies)


def saved_activation_bytes(work: Workload, plans: Plans, fused: FusedProviders) -> Array:
    """Kept by all layers of the model for one micro-batch: whole, or inputs where recomputed.

    Layers before the first adapter keep nothing, nor does the attention before it in its own layer.
    """
    tokens = plans.tokens(work.recipe.batch.sequence_tokens)
    total = np.zeros(len(plans))
    for layer, recomputed in zip(work.layers, plans.recomputed, strict=True):
        live = (layer.count - layer.silent) / layer.count
        whole = live * (layer.count - recomputed)
        total = total + whole * kept_bytes(work, layer, plans, fused, tokens)
        total = total + live * recomputed * activations.checkpoint_bytes(work, layer, fused, tokens)
        if layer.headless:
            total = total - np.where(recomputed < layer.count, _unreached(work, layer, plans, fused, tokens), 0.0)
    return total


def _unreached(work: Workload, layer: LayerWork, plans: Plans, fused: FusedProviders, tokens: Array) -> Array:
    """What the layer of the model's first adapter does not keep where that stands behind attention.

    No gradient reaches attention, the norms, the router and the weighting of rows, nor shared experts without adapters.
    """
    per_token = activations.attention_bytes(work, layer, fused) + activations.residual_bytes(work, fused)
    per_token += activations.router_bytes(work, layer, fused)
    if not (layer.adapters.mlp_in or layer.adapters.mlp_out):
        per_token += activations.mlp_bytes(work, layer, fused)
    weighted = fused.provider("experts") == "eager" and layer.routed
    rows = rows_of(work, plans, tokens, MEMORY_QUANTILE) * work.base_bytes * work.row_width if weighted else 0.0
    return np.asarray(tokens * per_token + rows)


def _static(terms: Terms, work: Workload, cluster: ClusterSpec, plans: Plans, stage: Stage) -> None:
    a = work.adapter_bytes
    dense_layers = work.dense_total - work.root_parameters
    dense = dense_bytes(work, plans) * dense_layers * stage.layers + work.base_bytes * stage.root_parameters(work)
    experts = expert_base_bytes(work, plans, stage.layers)
    hosted = plans.offloads("frozen_experts")
    base = dense / (plans.tp * plans.dense_shards) + np.where(hosted, 0.0, experts)
    formula = "w·(N_dense/(t·shard·e·cp) + N_experts·pad/(e·t_x·z)); no gradient, no optimizer state"
    terms.add("frozen_base", base, ALL, formula, always=True)
    room = HOST_SHARE * cluster.host.memory_bytes / cluster.devices_per_node
    terms.add(
        "host_overflow",
        np.where(hosted, np.maximum(0.0, experts - room), 0.0),
        ALL,
        "offloaded experts beyond 80 % of the rank's share of host memory",
    )
    terms.add("buffers", 4.0 * work.profile.parameters.buffers, ALL, "4·values, a copy on every rank")
    local = adapter_shard(work, plans, stage.layers)
    terms.add("adapter_parameters", a * local, ALL, f"{a}·(A_dense/(t·shard·e·cp) + A_experts/(e·t_x·z))", always=True)
    formula = f"{a}·local adapter parameters"
    terms.add("adapter_gradients", a * local, ("optimizer_step",), formula, always=True)
    away = plans.offloads("adapter_optimizer")
    state = np.where(away, 0.0, 2 * a * local)
    terms.add("optimizer_state", state, STEP, f"Adam m and v in the adapter dtype: 2·{a}·local adapters")
    copies = np.where(away, 3.0, 1.0 if cluster.device.type == "cpu" else 0.0)
    formula = "copies of local adapters: one by a foreach update, none by a fused one, three with the state on the host"
    terms.add("optimizer_temporaries", a * local * copies, ("optimizer_step",), formula, always=True)


def _gathers(terms: Terms, work: Workload, cluster: ClusterSpec, plans: Plans, stage: Stage) -> None:
    hosted = plans.offloads("frozen_experts")
    dense_in, shard_in = dense_group(plans, cluster).inner, shard_group(plans, cluster).inner
    largest, everything, inside = np.zeros(len(plans)), np.zeros(len(plans)), np.zeros(len(plans))
    lora, unpacked = np.zeros(len(plans)), np.zeros(len(plans))
    for layer in work.layers:
        dense, experts = gathered_layer_bytes(work, layer, plans)
        fetched = expert_bytes(work, plans) * layer.expert_parameters / (plans.ep * plans.expert_tp)
        experts = np.where(hosted & (plans.expert_shards == 1), fetched, experts)
        largest = np.maximum(largest, dense + experts)
        everything = everything + (dense + experts) * layer.count * stage.layers
        inside = inside + (dense / dense_in + experts / shard_in) * layer.count * stage.layers
        adapters = np.where(plans.dense_shards > 1, layer.adapters.dense_parameters / plans.tp, 0.0)
        share = layer.adapters.expert_parameters / (plans.ep * plans.expert_tp)
        lora = np.maximum(lora, adapters + np.where(plans.expert_shards > 1, share, 0.0))
        unpacked = np.maximum(unpacked, dequantised_bytes(work, layer, plans))
    root = gathered_root_bytes(work, plans, stage.root_parameters(work))
    terms.add("gathered_root", root, KEPT, "w·(embedding + head + final norm)/t: gathered once per pass")
    buffers = np.where(plans.reshard, (1 + plans.prefetch) * largest, 0.0)
    terms.add("gather_buffers", buffers, PASSES, "(1 + P)·U, P = prefetch depth")
    whole = np.where(plans.reshard, 0.0, everything)
    terms.add("kept_layers", whole, KEPT, "sum of U over all layers: kept until their backward")
    node = np.where(plans.reshard & plans.node_scope, inside, 0.0)
    terms.add("node_shards", node, KEPT, "sum of U over all layers, spread over the ranks of a node")
    formula = "one U in the flat all-gather buffer until it is copied out"
    terms.add("gather_staging", largest, PASSES, formula)
    terms.add("unpacked_layer", unpacked, PASSES, "b·N of one layer's packed weights, unpacked to compute")
    width = work.base_bytes + (4 if work.recipe.precision.reduce == "float32" else 2)
    formula = "two layers in flight: whole gradient in compute dtype and reduce dtype"
    terms.add("adapter_reduction", 2 * width * lora, ("backward_peak",), formula)


def _activations(
    terms: Terms, work: Workload, cluster: ClusterSpec, plans: Plans, stage: Stage, fused: FusedProviders
) -> None:
    tokens = plans.tokens(work.recipe.batch.sequence_tokens)
    rows = rows_of(work, plans, tokens, MEMORY_QUANTILE)
    saved = saved_activation_bytes(work, plans, fused) * stage.layers * stage.in_flight
    recomputed, largest = np.zeros(len(plans)), np.zeros(len(plans))
    for layer, again in zip(work.layers, plans.recomputed, strict=True):
        kept = kept_bytes(work, layer, plans, fused, tokens)
        inputs = activations.checkpoint_bytes(work, layer, fused, tokens)
        recomputed = np.maximum(recomputed, np.where(again > 0, kept, 0.0))
        largest = np.maximum(largest, np.where(again < layer.count, kept, inputs))
    away = plans.offloads("activations")
    room = HOST_SHARE * cluster.host.memory_bytes / cluster.devices_per_node
    hosted = np.minimum(np.maximum(saved - 2 * largest, 0.0), room)
    root = 2 * tokens * work.base_bytes * work.hidden
    formula = "sum over layers of what adapters' backward needs, or b·H·T where a layer is recomputed"
    terms.add("activations", np.where(away, saved - hosted, saved) + root, KEPT, formula, always=True)
    _gradients_in_backward(terms, work, plans, stage, np.where(away, saved - hosted, saved))
    terms.add("recomputed_layer", recomputed, ("backward_peak",), "everything one layer keeps, once")

    def most(sizes: Iterable[Array | float]) -> Array:
        found = np.zeros(len(plans))
        for size in sizes:
            found = np.maximum(found, size)
        return found

    forward = most(activations.forward_workspace_bytes(work, one, tokens, rows, fused) for one in work.layers)
    together = np.zeros(len(plans))
    for layer, again in zip(work.layers, plans.recomputed, strict=True):
        kept = kept_bytes(work, layer, plans, fused, tokens)
        own = activations.backward_workspace_bytes(work, layer, tokens, rows, fused, kept, plans.expert_tp)
        repeated = activations.recomputing_workspace_bytes(work, layer, fused, tokens, kept)
        together = np.maximum(together, np.where(again > 0, kept + np.maximum(own, repeated), own))
    backward = np.maximum(together - recomputed, 0.0)
    terms.add("forward_workspace", forward, ("forward_peak",), "T·b·(H + I_dense) + 2·R·b·H, or attention's own")
    formula = "T·b·(2·H + 2·I_dense) + R·b·(2·I + 2·H), or attention's own beyond what is free by then"
    terms.add("backward_workspace", backward, ("backward_peak",), formula)
    gathered = np.where(plans.tp > 1, 2 * tokens * plans.tp * work.base_bytes * work.hidden, 0.0)
    terms.add("gathered_tokens", gathered, PASSES, "2·b·H·T·t: a block's input and output over the TP group")
    ring = np.where(plans.cp > 1, 4 * tokens * work.base_bytes * work.key_width, 0.0)
    terms.add("context_buffers", ring, PASSES, "keys and values of two neighbours in the ring")


def _gradients_in_backward(terms: Terms, work: Workload, plans: Plans, stage: Stage, saved: Array) -> None:
    """Gradients grow while activations are freed: what counts is the fuller end, and one layer's at the first.

    From the second micro-batch of a step on all gradients are there from the start.
    """
    whole = work.adapter_bytes * adapter_shard(work, plans, stage.layers)
    one = whole / np.maximum(1.0, work.profile.shape.num_layers * stage.layers)
    first = np.maximum(whole - saved, 0.0) + np.minimum(one, whole)
    formula = "gradients beyond the activations that are free by then, and one layer's; all of them when accumulating"
    size = np.where((plans.accumulation > 1) | (plans.pp > 1), whole, np.minimum(first, whole))
    terms.add("gradients_in_backward", size, ("backward_peak",), formula)


def _dispatch(terms: Terms, work: Workload, plans: Plans) -> None:
    if not any(layer.routed for layer in work.layers):
        return
    tokens = plans.tokens(work.recipe.batch.sequence_tokens)
    rows = rows_of(work, plans, tokens, MEMORY_QUANTILE)
    sent = tokens * work.profile.shape.experts_per_token
    in_flight = np.minimum(1.0, 2 / plans.chunks)
    size = in_flight * (sent + 2 * rows) * work.row_width * work.base_bytes
    formula = "b·H·(T·K sent + R received + R reordered by expert), two chunks of it at most"
    terms.add("dispatch_buffers", np.where(plans.ep > 1, size, 0.0), PASSES, formula)


def _loss(terms: Terms, work: Workload, plans: Plans, stage: Stage, fused: FusedProviders) -> None:
    provider = fused.provider("linear_cross_entropy")
    tokens = plans.tokens(work.recipe.batch.sequence_tokens)
    if provider in PROVIDERS:
        size = loss_bytes(provider, work.dtype, tokens, work.hidden, work.vocabulary) * stage.head
    else:

        def held(count: int) -> tuple[float]:
            shape = {"T": count, "H": work.hidden, "V": work.vocabulary}
            cost = fused.cost("linear_cross_entropy", shape, work.dtype)
            return (float(cost.forward.workspace_bytes + cost.saved_bytes),)

        size = per_value(tokens, held)[0] * stage.head
    formula = "12·T·V: logits, fp32 copy or log-softmax, gradient" if provider == "eager" else f"{provider}: in chunks"
    origin: EvidenceOrigin = "measured" if provider == "eager" else "modelled"
    terms.add("loss", size, ("loss",), formula, origin, always=True)


def _reserve(terms: Terms, work: Workload, cluster: ClusterSpec, plans: Plans) -> Array:
    sizes = [plans.world, plans.dense_shards, plans.expert_shards, plans.ep, plans.replicate]
    sizes += [plans.tp, plans.cp, plans.pp, plans.expert_tp]
    groups = sum((size > 1).astype(np.float64) for size in sizes)
    if cluster.device.type == "cpu":
        size = CPU_PROCESS_BYTES + groups * GLOO_GROUP_BYTES
        terms.add("runtime_reserve", size, ALL, "process with torch loaded + gloo groups", "measured")
    else:
        size = CUDA_CONTEXT_BYTES + groups * NCCL_GROUP_BYTES
        formula = f"context + communicators of {NCCL_GROUP_BYTES} bytes; outside the allocator"
        terms.add("runtime_reserve", size, (), formula, "assumed")
    return np.asarray(size)
