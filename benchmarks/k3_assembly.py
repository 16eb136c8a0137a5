"""From layers measured on one device to a step of 128: the cost model's plan with each kind of layer as measured.

A kind's compute is scaled by measured ÷ predicted on the slice. Communication, head, optimizer and launches stay as
modelled. What the result does not know is added up as its uncertainty:

* the spread of each measured kind;
* experts, whose rows for each expert differ between slice and plan, so that their correction may not carry over: its
  whole size counts;
* kinds that were not measured: they take the mean correction, and the range of the measured ones counts;
* communication: a stated share.

Terms of one kind are systematic and add up; the four sources are independent and add as squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.layer_time import layer_time
from shardwright.search_spaces.cost.plans import plans_of
from shardwright.search_spaces.cost.step import Step
from shardwright.search_spaces.cost.workload import Workload

EXPERT_TERMS = ("experts", "expert_rows", "dequantise")
COMMUNICATION_SHARE = 0.3
"""Of exposed communication, where no link was measured."""


@dataclass(frozen=True)
class KindTime:
    """One kind of layer in a plan, on one device, for one micro-batch."""

    kind: str
    forward_ms: float
    backward_ms: float
    expert_ms: float
    """Of both, the experts' share."""
    forwards: float
    """Forward passes in a step: layers × micro-batches, recomputed ones twice."""
    backwards: float

    @property
    def one_ms(self) -> float:
        """Forward, its recomputation and backward."""
        return 2 * self.forward_ms + self.backward_ms

    @property
    def step_ms(self) -> float:
        return self.forwards * self.forward_ms + self.backwards * self.backward_ms


@dataclass(frozen=True)
class Measured:
    """One kind of layer as a device ran it: forward, recomputation and backward."""

    kind: str
    measured_ms: float
    predicted_ms: float
    spread_pct: float

    @property
    def correction(self) -> float:
        return self.measured_ms / self.predicted_ms


@dataclass(frozen=True)
class Assembled:
    """A step of the plan from measured layers."""

    step_ms: float
    uncertainty_ms: float
    modelled_ms: float
    """The cost model alone."""
    corrections: dict[str, float]
    sources_ms: dict[str, float]
    """Uncertainty by source."""

    @property
    def low_ms(self) -> float:
        return max(0.0, self.step_ms - self.uncertainty_ms)

    @property
    def high_ms(self) -> float:
        return self.step_ms + self.uncertainty_ms


def kind_times(
    work: Workload,
    cluster: ClusterSpec,
    strategy: ParallelStrategy,
    fused: FusedProviders,
    calibration: Calibration | None = None,
) -> tuple[KindTime, ...]:
    """Every kind of layer of a plan as the cost model has it."""
    step = Step(work, cluster, plans_of([strategy], work.profile), fused, calibration)
    found = []
    for position, layer in enumerate(work.layers):
        one = layer_time(work, layer, step.plans, step.rates, fused, step.tokens, step.rows)
        counts = [(float(count[0]), again) for count, again in step.counts(position, layer)]
        experts = sum(float((f + b).item()) for name, (f, b) in one.terms.items() if name in EXPERT_TERMS)
        found.append(
            KindTime(
                kind=layer.kind.name,
                forward_ms=1e3 * float(one.forward.item()),
                backward_ms=1e3 * float(one.backward.item()),
                expert_ms=1e3 * experts,
                forwards=sum(count * (2 if again else 1) for count, again in counts),
                backwards=sum(count for count, _ in counts),
            )
        )
    return tuple(found)


def assemble(
    modelled_ms: float,
    exposed_communication_ms: float,
    kinds: Sequence[KindTime],
    measured: Sequence[Measured],
    communication_share: float = COMMUNICATION_SHARE,
) -> Assembled:
    """The plan's step from measured layers.

    Args:
        modelled_ms: the cost model's step.
        exposed_communication_ms: of it, communication that nothing hides.
        kinds: the plan's layers as the cost model has them.
        measured: at least one kind of them.
        communication_share: uncertainty of communication, as a share of it.

    Raises:
        ValueError: nothing was measured, or a kind that the plan does not have.
    """
    known = {one.kind: one for one in measured}
    if not known or set(known) - {kind.kind for kind in kinds}:
        raise ValueError(f"measured kinds {sorted(known)} are not among the plan's {[kind.kind for kind in kinds]}")
    values = [one.correction for one in known.values()]
    mean, spread = sum(values) / len(values), max(values) - min(values)
    step, sources = modelled_ms, {"spread": 0.0, "experts": 0.0, "not_measured": 0.0}
    corrections = {}
    for kind in kinds:
        one = known.get(kind.kind)
        corrections[kind.kind] = factor = mean if one is None else one.correction
        step += (factor - 1) * kind.step_ms
        if one is None:
            sources["not_measured"] += spread * kind.step_ms
        else:
            sources["spread"] += one.spread_pct / 100 * factor * kind.step_ms
        share = kind.expert_ms / max(kind.forward_ms + kind.backward_ms, 1e-12)
        sources["experts"] += abs(factor - 1) * share * kind.step_ms
    sources["communication"] = communication_share * exposed_communication_ms
    uncertainty = math.sqrt(sum(size**2 for size in sources.values()))
    return Assembled(step, uncertainty, modelled_ms, corrections, sources)
