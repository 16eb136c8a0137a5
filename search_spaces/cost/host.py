"""What the host spends on a layer, and how long the device waits for it.

A rank's host launches every kernel, walks the graph, and runs FSDP's hooks and the collectives' calls. On an
accelerator it runs ahead of the device, so only what exceeds the kernels' time is waited for; on a CPU it is the same
processor. Under expert parallelism, and where torch computes the experts, the host reads how many rows each expert has,
and for that waits for the device: what it launches between that and the layer's first products, the device waits for in
turn.

Legend: e EP degree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwright.search_spaces.cost.plans import Array
from shardwright.search_spaces.providers import PROVIDERS

if TYPE_CHECKING:
    from shardwright.search_spaces.cost.layer_time import LayerTime
    from shardwright.search_spaces.cost.step import Step

EXCHANGE_LAUNCHES = (34, 10)
"""Kernels and calls of a MoE layer's route, exchanges and regrouping at e > 1, (forward, backward), counted in a trace;
a call of a collective counts for four kernels."""

AFTER_COUNTS = 12
"""Of them those between the host's wait for the counts and the experts' products."""

EXPERT_UNIT_LAUNCHES = 10
"""Of a gather or reduction of the experts' own unit, where their stacks are cut: its collective's call and the copies,
casts and views of its six parameters; assumed. The layer's others are the unit that ``calibrate`` measures."""


@dataclass(frozen=True)
class Waits:
    """Seconds that the device waits for the host in one pass of a layer."""

    forward: Array
    backward: Array


def waits(step: Step, one: LayerTime, routed: bool) -> Waits:
    """Of one layer and micro-batch."""
    plans, rates = step.plans, step.rates
    apart = (plans.ep > 1) & routed
    units = np.where(plans.shard * plans.ep * plans.cp > 1, 1.0, 0.0)
    exchange = rates.exchange_host_s or tuple(n * rates.host_launch_s for n in EXCHANGE_LAUNCHES)
    moved = [exchange[i] + one.received_launches[i] * rates.host_launch_s for i in (0, 1)]
    passes = [one.launches[i] * rates.host_launch_s + np.where(apart, moved[i] * plans.chunks, 0.0) for i in (0, 1)]
    own = np.where((plans.expert_shards > 1) & routed, EXPERT_UNIT_LAUNCHES * rates.host_launch_s, 0.0)
    unit = units * (rates.unit_s + own)
    forward, backward = passes[0] + unit, passes[1] + unit * (1.0 + plans.reshard)
    if step.cluster.device.type == "cpu":
        return Waits(np.asarray(forward), np.asarray(backward))
    reads = apart | (routed and step.fused.provider("experts") in PROVIDERS)
    drained = np.where(reads, AFTER_COUNTS * rates.host_launch_s, 0.0)
    return Waits(np.maximum(drained, forward - one.forward), np.maximum(0.0, backward - one.backward))
