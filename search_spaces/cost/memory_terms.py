"""Components of memory by moment, for all plans at once, and the end of the pipeline they are counted on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardwright.schemas.cost import Moment
from shardwright.schemas.ops import EvidenceOrigin
from shardwright.search_spaces.cost.plans import Array, Plans
from shardwright.search_spaces.cost.routing import over_layers, routed_rows
from shardwright.search_spaces.cost.workload import Workload

ALL: tuple[Moment, ...] = ("load", "forward_peak", "loss", "backward_peak", "optimizer_step")
STEP: tuple[Moment, ...] = ("forward_peak", "loss", "backward_peak", "optimizer_step")
PASSES: tuple[Moment, ...] = ("forward_peak", "backward_peak")
KEPT: tuple[Moment, ...] = ("forward_peak", "loss", "backward_peak")

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


def rows_of(
    work: Workload,
    plans: Plans,
    tokens: Array,
    quantile: float | None = None,
    *,
    padded: bool = True,
    summed: bool = False,
) -> Array:
    """Routed rows of the fullest rank in one micro-batch; times expert_tp, whose ranks compute all alike.

    Args:
        padded: with the plan's padding, as they are computed; without it, as they travel between ranks.
        summed: of all layers together, a layer's share: measured loads of a rank even out over layers.
    """
    shape = work.profile.shape
    rows = routed_rows(
        tokens,
        shape.experts_per_token,
        shape.num_experts,
        plans.ep,
        plans.padding if padded else 1,
        quantile,
        over_layers(work.loads) if summed else work.loads,
        plans.balanced,
        plans.redundant,
        plans.chunks,
    )
    return np.asarray(rows * plans.expert_tp)
