"""What the further axes of a plan add to a step: tensor, context and pipeline parallelism, offload to the host.

Legend: m micro-batches per step, T tokens of one on a rank, H hidden, b bytes a value, p pipeline stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardwright.search_spaces.cost.communication import group
from shardwright.search_spaces.cost.context import exchanged_bytes
from shardwright.search_spaces.cost.formats import expert_bytes
from shardwright.search_spaces.cost.memory_activations import saved_activation_bytes
from shardwright.search_spaces.cost.overlap import split_s
from shardwright.search_spaces.cost.step_compute import PCIE_BYTES_PER_S
from shardwright.search_spaces.topology import domain_devices

if TYPE_CHECKING:
    from shardwright.search_spaces.cost.layer_time import LayerTime
    from shardwright.search_spaces.cost.step import Step


def tensor_parallel(step: Step) -> None:
    """Gathers and reduce-scatters around the products of each layer."""
    plans = step.plans
    ranks = group(plans.tp, 1, domain_devices(step.cluster))
    one = step.network.all_gather_s(step.tokens * plans.tp * step.work.base_bytes * step.work.hidden, ranks)
    seconds = np.zeros(len(plans))
    for position, layer in enumerate(step.work.layers):
        for count, again in step.counts(position, layer):
            seconds = seconds + count * (12 if again else 8) * one
    formula = "4 gathers and 4 reduce-scatters of T·H·b per layer, half more where it is recomputed"
    step.add("tensor_parallel", seconds, "exposed_communication", formula, step.network.origin("all_gather"))


def context_parallel(step: Step) -> None:
    """What the ranks of a sequence gather before attention, and reduce the gradients of."""
    plans = step.plans
    if not np.any(plans.cp > 1):
        return
    ranks = group(plans.cp, plans.tp, domain_devices(step.cluster))
    gathered = np.zeros(len(plans))
    for position, layer in enumerate(step.work.layers):
        sizes = exchanged_bytes(step.work, layer, plans, step.tokens)
        forward, backward = (step.network.all_gather_s(one, ranks) for one in sizes)
        for count, again in step.counts(position, layer):
            gathered = gathered + count * ((2 if again else 1) * forward + backward)
    formula = "keys and values, compressed ones, or states [N | M] of all pieces, before attention; their gradients"
    step.add("context_gathers", gathered, "exposed_communication", formula, step.network.origin("all_gather"))


def host_copies(step: Step, layers: list[LayerTime]) -> None:
    """Offloaded activations and experts over PCIe."""
    plans = step.plans
    if not np.any(plans.offload >= 2):
        return
    exposed, hidden = np.zeros(len(plans)), np.zeros(len(plans))
    saved = saved_activation_bytes(step.work, plans, step.fused) * step.stage / PCIE_BYTES_PER_S
    forward, backward = np.zeros(len(plans)), np.zeros(len(plans))
    fetched = np.zeros(len(plans))
    for position, (layer, time) in enumerate(zip(step.work.layers, layers, strict=True)):
        share = plans.ep * plans.expert_tp * plans.expert_shards
        fetched = fetched + layer.count * step.stage * expert_bytes(step.work, plans) * (
            layer.expert_parameters / share
        )
        for count, again in step.counts(position, layer):
            forward = forward + count / step.m * time.forward
            backward = backward + count / step.m * (time.backward + (time.forward if again else 0.0))
    fetch = fetched / PCIE_BYTES_PER_S
    away, hosted = plans.offloads("activations"), plans.offloads("frozen_experts")
    for compute in (forward, backward):
        for moved in (np.where(away, saved, 0.0), np.where(hosted, fetch, 0.0)):
            shown, behind = split_s(moved, compute, step.cluster, 1)
            exposed, hidden = exposed + step.m * shown, hidden + step.m * behind
    step.add("host_copies", exposed, "exposed_communication", "offloaded bytes over PCIe; not hidden", "assumed")
    step.add("host_copies_hidden", hidden, "hidden_communication", "behind computation", "assumed")


def pipeline(step: Step) -> None:
    """Bubble ``(p − 1)/m`` of what the stages spend; a message of T·H·b to the next stage and back."""
    plans = step.plans
    if not np.any(plans.pp > 1):
        return
    spent = [t.milliseconds for t in step.terms if t.kind != "hidden_communication"]
    busy = np.add.reduce(np.stack(spent), axis=0) / 1e3 + step.launching_s
    step.add("pipeline_bubble", (plans.pp - 1) / step.m * busy, "exposed_communication", "(p − 1)/m · stage time")
    apart = plans.world / plans.pp >= domain_devices(step.cluster)
    send = step.network.send_s(step.tokens * step.work.base_bytes * step.work.hidden, apart)
    seconds = np.where(plans.pp > 1, 2 * step.m * send, 0.0)
    step.add("pipeline_sends", seconds, "exposed_communication", "2·m messages of T·H·b bytes")
