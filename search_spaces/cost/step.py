"""Time of one optimizer step on the slowest rank, by term, for all plans at once.

Legend: m micro-batches per step, T tokens of one on a rank, H hidden, V vocabulary, U gathered layer,
e = EP, t = TP, c = CP degree, p pipeline stages, c_k chunks of an expert exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from shardwright.schemas.canonical import round_significant
from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.cost import TimeComponent, TimeReport
from shardwright.schemas.ops import EvidenceOrigin
from shardwright.search_spaces.cost.communication import (
    Group,
    Network,
    dense_group,
    expert_group,
    group,
    node_groups,
    replica_group,
    shard_group,
)
from shardwright.search_spaces.cost.compute import Rates
from shardwright.search_spaces.cost.context import exchanged_bytes, passes_in_ring
from shardwright.search_spaces.cost.formats import expert_bytes
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.layer_time import LayerTime, layer_time
from shardwright.search_spaces.cost.memory_activations import saved_activation_bytes
from shardwright.search_spaces.cost.memory_terms import rows_of
from shardwright.search_spaces.cost.memory_weights import adapter_shard, gathered_layer_bytes, gathered_root_bytes
from shardwright.search_spaces.cost.overlap import SLOWDOWN, split_s
from shardwright.search_spaces.cost.plans import Array, Plans, per_value
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.topology import domain_devices

Kind = Literal["compute", "exposed_communication", "hidden_communication", "launch", "optimizer"]

FORMULAS = {
    "dense_linears": "m·L·4·T·N_dense flops (forward and input gradient), or weights and activations moved",
    "attention": "m·L·2·S·T·n·d flops causal, backward 2.5×; latent, linear and sparse by their own counts",
    "norms": "bytes of two norms per layer by the chosen provider",
    "residual_and_rotary": "bytes of residual adds, rotary and dense SwiGLU",
    "adapters": "2·r·(in + out) per token or row, backward 2×; larger of flops and bytes",
    "experts": "12·R·H·I flops plus weights and rows moved, R of the fullest rank",
    "expert_rows": "sort, gather, activation, weighting, combine: 24 + 12 passes over R·H when eager",
    "dequantise": "one layer's packed weights unpacked in each pass: b·N written",
}

CURVES = {"experts": "grouped_gemm_flops", "dense_linears": "gemm_flops", "attention": "attention_flops"}

OPTIMIZER_LAUNCHES = 40
"""Kernels of clipping and one foreach update; assumed."""

PCIE_BYTES_PER_S = 25e9
"""Host to device copies per rank; assumed."""

HOST_BYTES_PER_S = 20e9
"""One rank's share of host memory bandwidth in an update made there; assumed."""


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
        self._compute(layers)
        self._head()
        self._gathers(layers)
        self._dispatch(layers)
        self._tensor()
        self._context(layers)
        self._host_copies(layers)
        self._pipeline()
        self._adapter_gradients()
        self._optimizer()
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

    def _compute(self, layers: list[LayerTime]) -> None:
        recompute = np.zeros(len(self.plans))
        sums: dict[str, Array] = {}
        for position, (layer, one) in enumerate(zip(self.work.layers, layers, strict=True)):
            waits = self._wait_s(one.forward, one.launches[0]), self._wait_s(one.backward, one.launches[1])
            for count, again in self.counts(position, layer):
                for name, (forward, backward) in one.terms.items():
                    sums[name] = sums.get(name, 0.0) + count * (forward + backward)
                recompute = recompute + (count * one.forward if again else 0.0)
                self.launching_s = self.launching_s + count * ((2 if again else 1) * waits[0] + waits[1])
        for name, seconds in sums.items():
            self.add(name, seconds, "compute", FORMULAS[name], self.rates.origin(CURVES.get(name, "copy_bytes_per_s")))
        self.add("recompute", recompute, "compute", "the forward of recomputed layers again")

    def _head(self) -> None:
        work = self.work

        def counted(tokens: int) -> tuple[float, ...]:
            cost = self.fused.cost(
                "linear_cross_entropy", {"T": tokens, "H": work.hidden, "V": work.vocabulary}, work.dtype
            )
            found: list[float] = []
            for one in (cost.forward, cost.backward):
                found += [one.flops, one.bytes_read + one.bytes_written, one.launches] if one else [0.0, 0.0, 0.0]
            return tuple(found)

        numbers = per_value(self.tokens, counted)
        seconds = np.zeros(len(self.plans))
        for flops, moved, launches in (numbers[:3], numbers[3:]):
            spent = self.rates.gemm_s(flops, 0.0 * flops, self.tokens) + self.rates.traffic_s(moved)
            self.launching_s = self.launching_s + self.m * self._wait_s(spent, launches)
            seconds = seconds + spent
        self.add("head_and_loss", self.m * seconds, "compute", "4·T·H·V flops and the logits' passes through memory")

    def _gathers(self, layers: list[LayerTime]) -> None:
        plans = self.plans
        dense, shard = dense_group(plans, self.cluster), shard_group(plans, self.cluster)
        near_dense, near_shard = node_groups(plans, self.cluster)
        none = np.zeros(len(plans))
        exposed, hidden, copies, gathering, computing, first = none, none, none, none, none, none
        pooled = (plans.prefetch > 1) & (self.cluster.backend != "gloo")
        for position, (layer, one) in enumerate(zip(self.work.layers, layers, strict=True)):
            dense_bytes, expert_bytes_ = gathered_layer_bytes(self.work, layer, plans)
            far = self._gather_s(dense_bytes, expert_bytes_, dense, shard)
            near = self._gather_s(dense_bytes, expert_bytes_, near_dense, near_shard)
            again_s = np.where(plans.reshard, np.where(plans.node_scope, near, far), 0.0)
            copy = self.rates.gather_copies_s(dense_bytes + expert_bytes_)
            first = np.where(first > 0, first, far)
            forward = one.forward + self._wait_s(one.forward, one.launches[0])
            backward = one.backward + self._wait_s(one.backward, one.launches[1])
            for count, again in self.counts(position, layer):
                copies = copies + count * copy * np.where(plans.reshard, 2.0, 1.0)
                for gather, compute in ((far, forward), (again_s, backward + forward if again else backward)):
                    shown, covered = split_s(gather, compute, self.cluster, plans.prefetch)
                    exposed, hidden = exposed + count * shown, hidden + count * covered
                    gathering, computing = gathering + count * gather, computing + count * compute
        covered = np.minimum(gathering, computing)
        exposed = np.where(pooled, gathering - covered + (SLOWDOWN - 1) * covered, exposed)
        hidden = np.where(pooled, covered, hidden)
        root_bytes = gathered_root_bytes(self.work, plans)
        root = self.network.all_gather_s(root_bytes, dense)
        copies = copies + self.m * self.rates.gather_copies_s(root_bytes)
        passes = np.where(plans.reshard, 2.0, 1.0)
        exposed = exposed + np.where(hidden > 0, self.m * first * passes, 0.0)
        origin = self.network.origin("all_gather")
        times = "2·m gathers of each layer (m where weights are kept), m of the root"
        self.add("weight_gathers", exposed + self.m * root, "exposed_communication", f"{times}; not hidden", origin)
        self.add("weight_gathers_hidden", hidden, "hidden_communication", f"{times}; behind computation", origin)
        formula = "gathered weights copied out of the flat buffer, read and written"
        if self.cluster.device.type == "cpu":
            formula += "; fresh memory touched"
        self.add("gather_copies", copies, "compute", formula)

    def _gather_s(self, dense: Array, experts: Array, dense_ranks: Group, expert_ranks: Group) -> Array:
        return np.asarray(
            self.network.all_gather_s(dense, dense_ranks) + self.network.all_gather_s(experts, expert_ranks)
        )

    def _dispatch(self, layers: list[LayerTime]) -> None:
        plans, shape = self.plans, self.work.profile.shape
        ep = expert_group(plans, self.cluster)
        if not np.any(plans.ep > 1):
            return
        sent = self.rows * self.work.row_width * self.work.base_bytes / plans.chunks
        plain = self.network.all_to_all_s(sent, ep)
        spread = self.network.hierarchical_exchange_s(sent, ep, shape.num_experts, shape.experts_per_token)
        one = np.where(plans.hierarchical, np.minimum(spread, plain), plain)
        exposed, hidden = np.zeros(len(plans)), np.zeros(len(plans))
        for position, (layer, time) in enumerate(zip(self.work.layers, layers, strict=True)):
            if not layer.routed:
                continue
            forward, backward = (
                (time.terms["experts"][i] + time.terms["expert_rows"][i]) * self._stretch(spent, time.launches[i])
                for i, spent in enumerate((time.forward, time.backward))
            )
            beside = [plans.shared * _shared_share(self.work, layer) * spent for spent in time.terms["dense_linears"]]
            for count, again in self.counts(position, layer):
                for passes, compute, shared in ((2 if again else 1, forward, beside[0]), (1, backward, beside[1])):
                    exchange = 2 * plans.chunks * one
                    behind = (1 - 1 / plans.chunks) * np.minimum(exchange, compute) + np.minimum(one, shared)
                    shown = exchange - behind + (SLOWDOWN - 1) * behind
                    exposed, hidden = exposed + count * passes * shown, hidden + count * passes * behind
        origin = self.network.origin("all_to_all")
        formula = "4 exchanges of R·H·b bytes per MoE layer and micro-batch, 6 where it is recomputed"
        self.add("expert_all_to_all", exposed, "exposed_communication", formula, origin)
        formula = "chunks of an exchange behind the products of the chunk before; a dispatch behind the shared expert"
        self.add("expert_all_to_all_hidden", hidden, "hidden_communication", formula, origin)

    def _tensor(self) -> None:
        plans = self.plans
        ranks = group(plans.tp, 1, domain_devices(self.cluster))
        one = self.network.all_gather_s(self.tokens * plans.tp * self.work.base_bytes * self.work.hidden, ranks)
        seconds = np.zeros(len(plans))
        for position, layer in enumerate(self.work.layers):
            for count, again in self.counts(position, layer):
                seconds = seconds + count * (12 if again else 8) * one
        formula = "4 gathers and 4 reduce-scatters of T·H·b per layer, half more where it is recomputed"
        self.add("tensor_parallel", seconds, "exposed_communication", formula, self.network.origin("all_gather"))

    def _context(self, layers: list[LayerTime]) -> None:
        """What the ranks of a sequence pass on: around a ring behind attention, or gathered before it."""
        plans = self.plans
        if not np.any(plans.cp > 1):
            return
        ranks = group(plans.cp, plans.tp, domain_devices(self.cluster))
        gathered, exposed, covered = (np.zeros(len(plans)) for _ in range(3))
        for position, (layer, time) in enumerate(zip(self.work.layers, layers, strict=True)):
            sizes = exchanged_bytes(self.work, layer, plans, self.tokens)
            passes = [
                (self.network.all_gather_s(one, ranks), time.terms["attention"][i]) for i, one in enumerate(sizes)
            ]
            for count, again in self.counts(position, layer):
                for times, (exchange, compute) in zip((2 if again else 1, 1), passes, strict=True):
                    if passes_in_ring(self.work, layer):
                        shown, behind = split_s(exchange, compute, self.cluster, 1)
                        exposed, covered = exposed + count * times * shown, covered + count * times * behind
                    else:
                        gathered = gathered + count * times * exchange
        origin = self.network.origin("all_gather")
        formula = "compressed keys and values, or states [N | M] of all pieces, before attention"
        self.add("context_gathers", gathered, "exposed_communication", formula, origin)
        self.add(
            "context_ring", exposed, "exposed_communication", "keys and values around the ring; not hidden", origin
        )
        self.add("context_ring_hidden", covered, "hidden_communication", "keys and values behind attention", origin)

    def _host_copies(self, layers: list[LayerTime]) -> None:
        plans = self.plans
        if not np.any(plans.offload >= 2):
            return
        exposed, hidden = np.zeros(len(plans)), np.zeros(len(plans))
        saved = saved_activation_bytes(self.work, plans, self.fused) * self.stage / PCIE_BYTES_PER_S
        forward, backward = np.zeros(len(plans)), np.zeros(len(plans))
        fetched = np.zeros(len(plans))
        for position, (layer, time) in enumerate(zip(self.work.layers, layers, strict=True)):
            share = plans.ep * plans.expert_tp * plans.expert_shards
            fetched = fetched + layer.count * self.stage * expert_bytes(self.work, plans) * (
                layer.expert_parameters / share
            )
            for count, again in self.counts(position, layer):
                forward = forward + count / self.m * time.forward
                backward = backward + count / self.m * (time.backward + (time.forward if again else 0.0))
        fetch = fetched / PCIE_BYTES_PER_S
        away, hosted = plans.offloads("activations"), plans.offloads("frozen_experts")
        for compute in (forward, backward):
            for moved in (np.where(away, saved, 0.0), np.where(hosted, fetch, 0.0)):
                shown, behind = split_s(moved, compute, self.cluster, 1)
                exposed, hidden = exposed + self.m * shown, hidden + self.m * behind
        self.add("host_copies", exposed, "exposed_communication", "offloaded bytes over PCIe; not hidden", "assumed")
        self.add("host_copies_hidden", hidden, "hidden_communication", "behind computation", "assumed")

    def _pipeline(self) -> None:
        """Bubble ``(p − 1)/m`` of what the stages spend; a message of T·H·b to the next stage and back."""
        plans = self.plans
        if not np.any(plans.pp > 1):
            return
        spent = [t.milliseconds for t in self.terms if t.kind != "hidden_communication"]
        busy = np.add.reduce(np.stack(spent), axis=0) / 1e3 + self.launching_s
        self.add("pipeline_bubble", (plans.pp - 1) / self.m * busy, "exposed_communication", "(p − 1)/m · stage time")
        apart = plans.world / plans.pp >= domain_devices(self.cluster)
        send = self.network.send_s(self.tokens * self.work.base_bytes * self.work.hidden, apart)
        seconds = np.where(plans.pp > 1, 2 * self.m * send, 0.0)
        self.add("pipeline_sends", seconds, "exposed_communication", "2·m messages of T·H·b bytes")

    def _adapter_gradients(self) -> None:
        """Reduce-scatter per layer and micro-batch; all-reduce over replicas once."""
        plans, work = self.plans, self.work
        width = 4 if work.recipe.precision.reduce == "float32" else 2
        dense, shard = dense_group(plans, self.cluster), shard_group(plans, self.cluster)
        seconds = np.zeros(len(plans))
        for layer in work.layers:
            one = self._gather_s(
                width * layer.adapters.dense_parameters / plans.tp,
                width * layer.adapters.expert_parameters / (plans.ep * plans.expert_tp),
                dense,
                shard,
            )
            seconds = seconds + layer.count * self.stage * one
        seconds = seconds * self.m
        local = adapter_shard(work, plans, self.stage)
        seconds = seconds + self.network.all_reduce_s(width * local, replica_group(plans, self.cluster))
        overlapped = self.cluster.backend == "nccl"
        self.add(
            "adapter_gradients",
            seconds,
            "hidden_communication" if overlapped else "exposed_communication",
            "reduce-scatter of each layer's adapter gradients" + (", behind backward" if overlapped else ""),
            self.network.origin("reduce_scatter"),
        )

    def _optimizer(self) -> None:
        local = adapter_shard(self.work, self.plans, self.stage)
        passes = 10 * self.work.adapter_bytes * local
        away = self.plans.offloads("adapter_optimizer")
        hosted = passes / HOST_BYTES_PER_S + 3 * self.work.adapter_bytes * local / PCIE_BYTES_PER_S
        seconds = np.where(away, hosted, self.rates.traffic_s(passes))
        self.launching_s = self.launching_s + self._wait_s(seconds, OPTIMIZER_LAUNCHES)
        self.add("optimizer", seconds, "optimizer", "10 passes over local adapters: clip, moments, update")

    def _stretch(self, compute_s: Array, launches: float) -> Array:
        """How much longer a pass takes than its kernels because launching bounds it."""
        return 1 + self._wait_s(compute_s, launches) / np.maximum(compute_s, 1e-12)

    def _wait_s(self, compute_s: Array, launches: Array | float) -> Array:
        """Launch time of a pass: on an accelerator what its kernels do not cover, on a CPU all of it."""
        seconds = np.asarray(launches * self.rates.launch_s)
        if self.cluster.device.type == "cpu":
            return np.broadcast_to(seconds, np.shape(compute_s))
        return np.maximum(0.0, seconds - compute_s)


def times_of(
    work: Workload, cluster: ClusterSpec, plans: Plans, fused: FusedProviders, calibration: Calibration | None
) -> Times:
    """Every time term of one optimizer step, for every plan."""
    return Step(work, cluster, plans, fused, calibration).run()


def _shared_share(work: Workload, layer: LayerWork) -> float:
    """Share of the shared experts in a routed layer's parameters outside the routed ones."""
    matrices = 3 if work.profile.shape.gated_mlp else 2
    return min(1.0, matrices * work.hidden * layer.mlp_width / max(layer.dense_parameters, 1))
