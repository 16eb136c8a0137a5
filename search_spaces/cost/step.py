"""Time of one optimizer step on the slowest rank, by term, for all plans at once.

Terms are made by ``step_compute`` (what is computed), ``step_exchange`` (weights and experts) and ``step_axes`` (the
further axes). Legend: m micro-batches per step, T tokens of one on a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from shardwright.schemas.canonical import round_significant
from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.cost import TimeComponent, TimeReport
from shardwright.schemas.ops import EvidenceOrigin
from shardwright.search_spaces.cost.communication import Network
from shardwright.search_spaces.cost.compute import Rates
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.layer_time import layer_time
from shardwright.search_spaces.cost.memory_terms import rows_of
from shardwright.search_spaces.cost.plans import Array, Plans
from shardwright.search_spaces.cost.step_axes import context_parallel, host_copies, pipeline, tensor_parallel
from shardwright.search_spaces.cost.step_compute import head_and_loss, layers_compute, optimizer
from shardwright.search_spaces.cost.step_exchange import adapter_gradients, expert_exchanges, weight_gathers
from shardwright.search_spaces.cost.workload import LayerWork, Workload

Kind = Literal["compute", "exposed_communication", "hidden_communication", "launch", "optimizer"]


@dataclass(frozen=True)
class TimeTerm:
    """One component for every plan, milliseconds."""

    name: str
    milliseconds: Array
    kind: Kind
    formula: str
    origin: EvidenceOrigin


@dataclass(frozen=True)
class Times:
    """Step time of every plan."""

    terms: tuple[TimeTerm, ...]
    step_ms: Array
    tokens_per_step: int

    def report(self, plan: int) -> TimeReport:
        """The report of one plan, six significant digits as plans store them."""
        components = tuple(
            TimeComponent(
                name=t.name,
                milliseconds=round_significant(float(t.milliseconds[plan])),
                kind=t.kind,
                formula=t.formula,
                origin=t.origin,
            )
            for t in self.terms
            if t.milliseconds[plan] > 0
        )
        spent = [c for c in components if c.kind != "hidden_communication"]
        step_ms = float(self.step_ms[plan])
        return TimeReport(
            components=components,
            step_ms=round_significant(step_ms),
            tokens_per_s=round_significant(self.tokens_per_step / step_ms * 1e3),
            bound_by=max(spent, key=lambda c: c.milliseconds).name,
        )


@dataclass
class Step:
    """Collects the time terms of one optimizer step."""

    work: Workload
    cluster: ClusterSpec
    plans: Plans
    fused: FusedProviders
    calibration: Calibration | None
    terms: list[TimeTerm] = field(default_factory=list)

    def __post_init__(self) -> None:
        work, plans = self.work, self.plans
        self.rates = Rates.of(self.cluster, work.dtype, self.calibration)
        self.network = Network(self.cluster, self.calibration)
        self.tokens = plans.tokens(work.recipe.batch.sequence_tokens)
        self.rows = rows_of(work, plans, self.tokens)
        self.travelling = rows_of(work, plans, self.tokens, padded=False)
        self.m = plans.accumulation
        self.stage = plans.stage_share(work.profile.shape.num_layers)
        self.launching_s = np.zeros(len(plans))

    def add(
        self, name: str, seconds: Array | float, kind: Kind, formula: str, origin: EvidenceOrigin = "modelled"
    ) -> None:
        whole = np.broadcast_to(np.asarray(seconds, dtype=np.float64), (len(self.plans),))
        if np.any(whole > 0):
            self.terms.append(TimeTerm(name, 1e3 * whole, kind, formula, origin))

    def run(self) -> Times:
        """All terms. Order matters for ties only."""
        layers = [
            layer_time(self.work, layer, self.plans, self.rates, self.fused, self.tokens, self.rows)
            for layer in self.work.layers
        ]
        layers_compute(self, layers)
        head_and_loss(self)
        weight_gathers(self, layers)
        expert_exchanges(self, layers)
        tensor_parallel(self)
        context_parallel(self)
        host_copies(self, layers)
        pipeline(self)
        adapter_gradients(self)
        optimizer(self)
        formula = "operators × launch time, beyond what computing covers"
        self.add("launch", self.launching_s, "launch", formula)
        spent = [t.milliseconds for t in self.terms if t.kind != "hidden_communication"]
        step_ms = np.add.reduce(np.stack(spent), axis=0)
        return Times(tuple(self.terms), step_ms, self.work.recipe.batch.tokens_per_step)

    def counts(self, position: int, layer: LayerWork) -> tuple[tuple[Array, bool], ...]:
        """(layers of this kind on the fullest stage in all micro-batches, whether they are recomputed)."""
        again = self.plans.recomputed[position]
        scale = self.m * self.stage
        return (scale * (layer.count - again), False), (scale * again, True)

    def wait_s(self, compute_s: Array, launches: Array | float) -> Array:
        """Launch time of a pass: on an accelerator what its kernels do not cover, on a CPU all of it."""
        seconds = np.asarray(launches * self.rates.host_launch_s)
        if self.cluster.device.type == "cpu":
            return np.broadcast_to(seconds, np.shape(compute_s))
        return np.maximum(0.0, seconds - compute_s)


def times_of(
    work: Workload, cluster: ClusterSpec, plans: Plans, fused: FusedProviders, calibration: Calibration | None
) -> Times:
    """Every time term of one optimizer step, for every plan."""
    return Step(work, cluster, plans, fused, calibration).run()
