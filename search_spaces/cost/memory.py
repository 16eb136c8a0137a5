"""Memory of the fullest rank, by component and moment.

Legend: w bytes per frozen weight, N parameters, U bytes of one layer gathered, P prefetch depth,
e = EP degree, z = shard degree, T tokens of a micro-batch, R routed rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.cost import MemoryComponent, MemoryReport, Moment
from shardwright.schemas.ops import EvidenceOrigin
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.cost import activations
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.routing import routed_rows
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.providers import loss_bytes
from shardwright.search_spaces.sharding import dense_shards, expert_padding_factor, expert_shards

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


class Terms:
    """Collects components and adds them up by moment."""

    def __init__(self) -> None:
        self.components: list[MemoryComponent] = []

    def add(
        self,
        name: str,
        size: float,
        moments: tuple[Moment, ...],
        formula: str,
        origin: EvidenceOrigin = "modelled",
    ) -> None:
        self.components.append(
            MemoryComponent(name=name, bytes=math.ceil(size), moments=moments, formula=formula, origin=origin)
        )

    def by_moment(self) -> dict[Moment, int]:
        return {moment: sum(c.bytes for c in self.components if moment in c.moments) for moment in ALL}


def memory_report(
    work: Workload, cluster: ClusterSpec, strategy: ParallelStrategy, fused: FusedProviders
) -> MemoryReport:
    """Every memory term of LoRA on a frozen base under FSDP2 × EP."""
    terms = Terms()
    tokens = strategy.micro_batch_sequences * work.recipe.batch.sequence_tokens
    rows = rows_of(work, strategy, tokens)
    _static(terms, work, strategy)
    _gathers(terms, work, strategy)
    _activations(terms, work, strategy, tokens, rows, fused)
    _dispatch(terms, work, strategy, tokens, rows)
    _loss(terms, work, tokens, fused)
    reserve = _reserve(terms, work, cluster, strategy)
    moments = terms.by_moment()
    peak_moment = max(ALL, key=lambda moment: (moments[moment], -ALL.index(moment)))
    peak = moments[peak_moment]
    outside = 0 if cluster.device.type == "cpu" else reserve
    return MemoryReport(
        components=tuple(terms.components),
        by_moment=moments,
        peak_bytes=peak,
        peak_moment=peak_moment,
        reserved_bytes=math.ceil(peak * (1 + ALLOCATOR_SLACK)) + outside,
        budget_bytes=cluster.device.usable_memory_bytes,
    )


def rows_of(work: Workload, strategy: ParallelStrategy, tokens: int) -> int:
    """Routed rows of the fullest rank in one micro-batch."""
    shape = work.profile.shape
    return routed_rows(
        tokens, shape.experts_per_token, shape.num_experts, strategy.mesh.ep, strategy.expert_padding_tokens
    )


def gathered_layer_bytes(work: Workload, layer: LayerWork, strategy: ParallelStrategy) -> tuple[float, float]:
    """Bytes of one layer that are gathered: (non-expert over shard × ep, experts over shard).

    Base and adapters in the compute dtype. A group of one rank gathers nothing.
    """
    mesh, w, lora = strategy.mesh, work.base_bytes, layer.adapters
    dense = w * (layer.dense_parameters + lora.dense_parameters) if dense_shards(mesh) > 1 else 0.0
    experts = w * (layer.expert_parameters + lora.expert_parameters) / mesh.ep if expert_shards(mesh) > 1 else 0.0
    return dense, experts


def gathered_root_bytes(work: Workload, strategy: ParallelStrategy) -> float:
    """Embedding, head and final norm, which stay gathered from the first use to the end of backward."""
    if dense_shards(strategy.mesh) == 1:
        return 0.0
    return work.base_bytes * (work.root_parameters + work.root_adapters.dense_parameters)


def adapter_shard(work: Workload, strategy: ParallelStrategy) -> float:
    """Adapter parameters of one rank."""
    mesh = strategy.mesh
    experts = work.adapter_expert_parameters * expert_padding_factor(work.profile.shape, mesh)
    return work.adapter_dense_parameters / dense_shards(mesh) + experts / (mesh.ep * expert_shards(mesh))


def _static(terms: Terms, work: Workload, strategy: ParallelStrategy) -> None:
    mesh, w, a = strategy.mesh, work.base_bytes, work.adapter_bytes
    padding = expert_padding_factor(work.profile.shape, mesh)
    base = w * (work.dense_total / dense_shards(mesh) + work.expert_total * padding / (mesh.ep * expert_shards(mesh)))
    terms.add("frozen_base", base, ALL, "w·(N_dense/(z·e) + N_experts·pad/(e·z)); no gradient, no optimizer state")
    if work.profile.parameters.buffers:
        terms.add("buffers", 4 * work.profile.parameters.buffers, ALL, "4·values, a copy on every rank")
    local = adapter_shard(work, strategy)
    terms.add("adapter_parameters", a * local, ALL, f"{a}·(A_dense/(z·e) + A_experts/(e·z))")
    terms.add("adapter_gradients", a * local, ("backward_peak", "optimizer_step"), f"{a}·local adapter parameters")
    if strategy.offload == "none":
        terms.add("optimizer_state", 2 * a * local, STEP, f"Adam m and v in the adapter dtype: 2·{a}·local adapters")
    temporaries = a * local * (1 if strategy.offload == "none" else 3)
    terms.add("optimizer_temporaries", temporaries, ("optimizer_step",), "foreach update: one copy of local adapters")


def _gathers(terms: Terms, work: Workload, strategy: ParallelStrategy) -> None:
    sizes = [sum(gathered_layer_bytes(work, layer, strategy)) for layer in work.layers]
    largest = max(sizes, default=0.0)
    root = gathered_root_bytes(work, strategy)
    if root:
        terms.add("gathered_root", root, KEPT, "w·(embedding + head + final norm): gathered once per pass")
    if largest and strategy.reshard_after_forward:
        depth = strategy.prefetch_depth
        terms.add("gather_buffers", (1 + depth) * largest, PASSES, f"(1 + P)·U with P = {depth}")
        terms.add("gather_staging", largest, PASSES, "one U in the flat all-gather buffer until it is copied out")
    elif largest:
        everything = sum(size * layer.count for size, layer in zip(sizes, work.layers, strict=True))
        terms.add("gather_buffers", everything, KEPT, "sum of U over all layers: kept until their backward")
        terms.add("gather_staging", largest, PASSES, "one U in the flat all-gather buffer until it is copied out")
    reduce_bytes = 4 if work.recipe.precision.reduce == "float32" else 2
    lora = [
        (layer.adapters.dense_parameters if dense_shards(strategy.mesh) > 1 else 0)
        + (layer.adapters.expert_parameters / strategy.mesh.ep if expert_shards(strategy.mesh) > 1 else 0)
        for layer in work.layers
    ]
    if max(lora, default=0):
        terms.add(
            "adapter_reduction",
            2 * (work.base_bytes + reduce_bytes) * max(lora),
            ("backward_peak",),
            "two layers in flight: whole gradient in compute dtype and reduce dtype",
        )


def _activations(
    terms: Terms, work: Workload, strategy: ParallelStrategy, tokens: int, rows: int, fused: FusedProviders
) -> None:
    eager_norms = fused.norms(work.profile.shape.num_layers)["eager"]

    def kept(layer: LayerWork) -> float:
        return activations.layer_bytes(work, layer, tokens, rows, eager_norms)

    root = 2 * tokens * work.base_bytes * work.hidden
    whole = sum(kept(layer) * layer.count for layer in work.layers) + root
    if strategy.checkpointing == "none":
        terms.add("activations", whole, KEPT, "sum over layers of what adapters' backward needs (see activations)")
    else:
        inputs = activations.checkpoint_bytes(work, tokens)
        saved = sum(inputs * layer.count for layer in work.layers)
        terms.add("activations", saved + root, KEPT, "b·H·T per layer, recomputed in backward")
        recomputed = max((kept(layer) for layer in work.layers), default=0.0)
        terms.add("recomputed_layer", recomputed, ("backward_peak",), "everything one layer keeps, once")

    def workspace(size: Callable[[Workload, LayerWork, int, int], float]) -> float:
        return max((size(work, layer, tokens, rows) for layer in work.layers), default=0.0)

    forward = workspace(activations.forward_workspace_bytes)
    backward = workspace(activations.backward_workspace_bytes)
    terms.add("forward_workspace", forward, ("forward_peak",), "T·b·(H + I_dense) + 2·R·b·H")
    terms.add("backward_workspace", backward, ("backward_peak",), "T·b·(2·H + 2·I_dense) + R·b·(2·I + 2·H)")


def _dispatch(terms: Terms, work: Workload, strategy: ParallelStrategy, tokens: int, rows: int) -> None:
    if strategy.mesh.ep == 1 or not any(layer.routed for layer in work.layers):
        return
    sent = tokens * work.profile.shape.experts_per_token
    size = (sent + 2 * rows) * work.hidden * work.base_bytes
    terms.add("dispatch_buffers", size, PASSES, "b·H·(T·K sent + R received + R reordered by expert)")


def _loss(terms: Terms, work: Workload, tokens: int, fused: FusedProviders) -> None:
    provider = fused.provider("linear_cross_entropy")
    size = loss_bytes(provider, work.dtype, tokens, work.hidden, work.vocabulary)
    formula = "12·T·V: logits, fp32 copy or log-softmax, gradient" if provider == "eager" else f"{provider}: in chunks"
    terms.add("loss", size, ("loss",), formula, "measured" if provider == "eager" else "modelled")


def _reserve(terms: Terms, work: Workload, cluster: ClusterSpec, strategy: ParallelStrategy) -> int:
    mesh = strategy.mesh
    sizes = (mesh.world_size, dense_shards(mesh), mesh.shard, mesh.ep, mesh.replicate)
    groups = sum(1 for size in sizes if size > 1)
    if cluster.device.type == "cpu":
        size = CPU_PROCESS_BYTES + groups * GLOO_GROUP_BYTES
        terms.add("runtime_reserve", size, ALL, f"process with torch loaded + {groups} gloo groups", "measured")
    else:
        size = CUDA_CONTEXT_BYTES + groups * NCCL_GROUP_BYTES
        formula = f"context + {groups} communicators of {NCCL_GROUP_BYTES} bytes; outside the allocator"
        terms.add("runtime_reserve", size, (), formula, "assumed")
    return size
