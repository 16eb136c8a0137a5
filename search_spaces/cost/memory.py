"""Memory of the fullest rank, by component and moment, for all plans at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.cost import MemoryComponent, MemoryReport
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.holes import hole_bytes
from shardwright.search_spaces.cost.memory_activations import add_activations, add_dispatch, add_loss
from shardwright.search_spaces.cost.memory_terms import ALL, Stage, Term, Terms
from shardwright.search_spaces.cost.memory_weights import add_first_gather, add_gathers, add_static
from shardwright.search_spaces.cost.plans import Array, Flags, Plans
from shardwright.search_spaces.cost.workload import Workload

UNSEEN_SHARE = 0.02
"""Reserved beyond the peak and the holes between tensors, over the peak: for what the passages leave out (gradients and
moments, small tensors, rows that vary from step to step); assumed."""

HOST_SLACK = 0.05
"""Resident beyond allocated memory of a process on a CPU, over the peak; assumed."""

GROWING = ("cuda",)
"""Types of devices whose allocator's segments grow, as the runtime asks of it (``runtime/launch/allocator.py``)."""

CUDA_CONTEXT_BYTES = 750_000_000
"""Context and libraries on an accelerator, outside the allocator; assumed, 0.5–1 GiB."""

NCCL_GROUP_BYTES = 375_000_000
"""One NCCL communicator of 2–8 ranks: 0.34–0.39 GiB published for H200."""

CPU_PROCESS_BYTES = 560_000_000
"""A process that has imported torch and transformers: measured 395–560 MB resident."""

GLOO_GROUP_BYTES = 16_000_000
"""Buffers of one gloo group; assumed."""


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
    holes: Array
    """Of what is reserved, what the allocator holds between tensors. No rule binds it: fewer tensors can leave more."""
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
        add_static(terms, work, cluster, plans, stage)
        free = add_gathers(terms, work, cluster, plans, stage)
        add_activations(terms, work, cluster, plans, stage, fused, free)
        add_dispatch(terms, work, plans, fused)
        add_loss(terms, work, plans, stage, fused)
        add_first_gather(terms, work, plans, stage)
        beyond = holes_of(work, plans, fused, cluster.device.type)
        terms.add("allocator_holes", beyond, (), "between tensors: two steps run on a model of the allocator")
        reserves.append(_reserve(terms, work, cluster, plans))
        moments.append(terms.by_moment())
        stages.append(tuple(terms.found))
    peaks = np.stack([one.max(axis=0) for one in moments])
    fullest = peaks.argmax(axis=0)
    peak = peaks.max(axis=0)
    on_host = cluster.device.type == "cpu"
    outside, slack = 0.0 if on_host else reserves[0], HOST_SLACK if on_host else UNSEEN_SHARE
    return Memory(
        stages=tuple(stages),
        stage=fullest,
        by_moment=np.where(fullest == 0, moments[0], moments[-1]),
        peak=peak,
        reserved=np.ceil(peak * (1 + slack)) + beyond + outside,
        holes=beyond,
        budget=cluster.device.usable_memory_bytes,
    )


def holes_of(work: Workload, plans: Plans, fused: FusedProviders, device_type: str) -> Array:
    """What the device's allocator holds between tensors; nothing on a CPU, which has no such allocator."""
    if device_type == "cpu":
        return np.zeros(len(plans))
    return np.ceil(hole_bytes(work, plans, fused, device_type in GROWING))


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
