"""What the ranks of a step exchange for weights and experts: gathers, dispatch and combine, adapter gradients.

Legend: m micro-batches per step, T tokens of one on a rank, R routed rows, H hidden, b bytes a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardwright.search_spaces.cost.communication import (
    Group,
    dense_group,
    expert_group,
    node_groups,
    replica_group,
    shard_group,
)
from shardwright.search_spaces.cost.host import waits
from shardwright.search_spaces.cost.memory_weights import adapter_shard, gathered_layer_bytes, gathered_root_bytes
from shardwright.search_spaces.cost.overlap import split_s
from shardwright.search_spaces.cost.plans import Array
from shardwright.search_spaces.cost.workload import LayerWork, Workload

if TYPE_CHECKING:
    from shardwright.search_spaces.cost.layer_time import LayerTime
    from shardwright.search_spaces.cost.step import Step


def weight_gathers(step: Step, layers: list[LayerTime]) -> None:
    """FSDP's gathers of every layer and of the root, and the copies out of them."""
    plans = step.plans
    dense, shard = dense_group(plans, step.cluster), shard_group(plans, step.cluster)
    near_dense, near_shard = node_groups(plans, step.cluster)
    none = np.zeros(len(plans))
    exposed, hidden, copies, gathering, computing, first = none, none, none, none, none, none
    pooled = (plans.prefetch > 1) & (step.cluster.backend != "gloo")
    for position, (layer, one) in enumerate(zip(step.work.layers, layers, strict=True)):
        dense_bytes, expert_bytes_ = gathered_layer_bytes(step.work, layer, plans)
        far = gather_s(step, dense_bytes, expert_bytes_, dense, shard)
        near = gather_s(step, dense_bytes, expert_bytes_, near_dense, near_shard)
        again_s = np.where(plans.reshard, np.where(plans.node_scope, near, far), 0.0)
        copy = step.rates.gather_copies_s(dense_bytes + expert_bytes_)
        first = np.where(first > 0, first, far)
        host = waits(step, one, layer.routed)
        forward, backward = one.forward + host.forward, one.backward + host.backward
        for count, again in step.counts(position, layer):
            copies = copies + count * copy * np.where(plans.reshard, 2.0, 1.0)
            for gather, compute in ((far, forward), (again_s, backward + forward if again else backward)):
                shown, covered = split_s(gather, compute, step.cluster, plans.prefetch, step.rates.slowdown)
                exposed, hidden = exposed + count * shown, hidden + count * covered
                gathering, computing = gathering + count * gather, computing + count * compute
    covered = np.minimum(gathering, computing)
    exposed = np.where(pooled, gathering - covered + (step.rates.slowdown - 1) * covered, exposed)
    hidden = np.where(pooled, covered, hidden)
    root_bytes = gathered_root_bytes(step.work, plans)
    root = step.network.all_gather_s(root_bytes, dense)
    copies = copies + step.m * step.rates.gather_copies_s(root_bytes)
    passes = np.where(plans.reshard, 2.0, 1.0)
    exposed = exposed + np.where(hidden > 0, step.m * first * passes, 0.0)
    origin = step.network.origin("all_gather")
    times = "2·m gathers of each layer (m where weights are kept), m of the root"
    step.add("weight_gathers", exposed + step.m * root, "exposed_communication", f"{times}; not hidden", origin)
    step.add("weight_gathers_hidden", hidden, "hidden_communication", f"{times}; behind computation", origin)
    formula = "gathered weights copied out of the flat buffer, read and written"
    if step.cluster.device.type == "cpu":
        formula += "; fresh memory touched"
    step.add("gather_copies", copies, "compute", formula)


def gather_s(step: Step, dense: Array, experts: Array, dense_ranks: Group, expert_ranks: Group) -> Array:
    """Of a layer's two units, each rank's part copied into the flat buffer first."""
    seconds = np.zeros(len(step.plans))
    for size, ranks in ((dense, dense_ranks), (experts, expert_ranks)):
        own = step.rates.gather_input_s(size, ranks.size)
        seconds = seconds + own + step.network.all_gather_s(size, ranks)
    return np.asarray(seconds)


def expert_exchanges(step: Step, layers: list[LayerTime]) -> None:
    """Rows to their experts and back, in chunks and behind the shared expert where the plan says so."""
    plans, shape = step.plans, step.work.profile.shape
    ep = expert_group(plans, step.cluster)
    if not np.any(plans.ep > 1):
        return
    sent = exchanged_bytes(step.work, step.travelling) / plans.chunks
    plain = step.network.all_to_all_s(sent, ep)
    spread = step.network.hierarchical_exchange_s(sent, ep, shape.num_experts, shape.experts_per_token)
    one = np.where(plans.hierarchical, np.minimum(spread, plain), plain)
    exposed, hidden = np.zeros(len(plans)), np.zeros(len(plans))
    for position, (layer, time) in enumerate(zip(step.work.layers, layers, strict=True)):
        if not layer.routed:
            continue
        forward, backward = (time.terms["experts"][i] + time.terms["expert_rows"][i] for i in (0, 1))
        host = waits(step, time, layer.routed)
        beside = [plans.shared * shared_share(step.work, layer) * spent for spent in time.terms["dense_linears"]]
        for count, again in step.counts(position, layer):
            for passes, compute, shared, idle in (
                (2 if again else 1, forward, beside[0], host.forward),
                (1, backward, beside[1], host.backward),
            ):
                exchange = 2 * plans.chunks * one
                behind = (1 - 1 / plans.chunks) * np.minimum(exchange, compute) + np.minimum(one, shared)
                unhurried = np.maximum(0.0, np.minimum(exchange, idle) - behind)
                shown = exchange - behind - unhurried + (step.rates.slowdown - 1) * behind
                exposed, hidden = exposed + count * passes * shown, hidden + count * passes * (behind + unhurried)
    origin = step.network.origin("all_to_all")
    formula = "4 exchanges of N·H·b bytes per MoE layer and micro-batch, 6 where it is recomputed; N without padding"
    step.add("expert_all_to_all", exposed, "exposed_communication", formula, origin)
    formula = "chunks of an exchange behind the products of the chunk before; a dispatch behind the shared expert; "
    formula += "what the device would wait for the host"
    step.add("expert_all_to_all_hidden", hidden, "hidden_communication", formula, origin)


def exchanged_bytes(work: Workload, rows: Array) -> Array:
    """Bytes of one exchange of a micro-batch: routed rows of expert width, to their experts or back."""
    return rows * work.row_width * work.base_bytes


def shared_share(work: Workload, layer: LayerWork) -> float:
    """Share of the shared experts in a routed layer's parameters outside the routed ones."""
    matrices = 3 if work.profile.shape.gated_mlp else 2
    return min(1.0, matrices * work.hidden * layer.mlp_width / max(layer.dense_parameters, 1))


def adapter_gradients(step: Step) -> None:
    """Reduce-scatter per layer and micro-batch, of gradients copied into a flat buffer; all-reduce over replicas once.

    What runs beside computation delays it as a gather does.
    """
    plans, work = step.plans, step.work
    width = 4 if work.recipe.precision.reduce == "float32" else 2
    dense, shard = dense_group(plans, step.cluster), shard_group(plans, step.cluster)
    seconds = np.zeros(len(plans))
    for layer in work.layers:
        sizes = (
            (width * layer.adapters.dense_parameters / plans.tp, dense),
            (width * layer.adapters.expert_parameters / (plans.ep * plans.expert_tp), shard),
        )
        for size, ranks in sizes:
            copied = np.where(ranks.size > 1, step.rates.traffic_s(2 * size), 0.0)
            one = step.network.all_gather_s(size, ranks) + copied
            seconds = seconds + layer.count * step.stage * one
    seconds = seconds * step.m
    local = adapter_shard(work, plans, step.stage)
    seconds = seconds + step.network.all_reduce_s(width * local, replica_group(plans, step.cluster))
    formula, origin = "reduce-scatter of each layer's adapter gradients", step.network.origin("reduce_scatter")
    if step.cluster.backend != "nccl":
        step.add("adapter_gradients", seconds, "exposed_communication", formula, origin)
        return
    delay = (step.rates.slowdown - 1) * seconds
    step.add("adapter_gradients", delay, "exposed_communication", f"{formula}: what is computed is delayed", origin)
    step.add("adapter_gradients_hidden", seconds, "hidden_communication", f"{formula}: behind backward", origin)
