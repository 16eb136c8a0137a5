"""Time of one optimizer step on the slowest rank, by term.

Legend: m micro-batches per step, T tokens of one on a rank, H hidden, V vocabulary, U gathered layer.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.cost import TimeComponent, TimeReport
from shardwright.schemas.ops import EvidenceOrigin
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.cost.communication import (
    Network,
    dense_group,
    expert_group,
    replica_group,
    shard_group,
)
from shardwright.search_spaces.cost.compute import Rates
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.layer_time import LayerTime, layer_time
from shardwright.search_spaces.cost.memory import (
    adapter_shard,
    gathered_layer_bytes,
    gathered_root_bytes,
    rows_of,
)
from shardwright.search_spaces.cost.overlap import split_s
from shardwright.search_spaces.cost.workload import Workload

Kind = Literal["compute", "exposed_communication", "hidden_communication", "launch", "optimizer"]

FORMULAS = {
    "dense_linears": "m·L·4·T·N_dense flops (forward and input gradient), or weights and activations moved",
    "attention": "m·L·2·S·T·n·d flops causal, backward 2.5×",
    "norms": "bytes of two norms per layer by the chosen provider",
    "residual_and_rotary": "bytes of residual adds, rotary and dense SwiGLU",
    "adapters": "2·r·(in + out) per token or row, backward 2×; larger of flops and bytes",
    "experts": "12·R·H·I flops plus weights and rows moved, R of the fullest rank",
    "expert_rows": "sort, gather, activation, weighting, combine: 24 + 12 passes over R·H when eager",
}

OPTIMIZER_LAUNCHES = 40
"""Kernels of clipping and one foreach update; assumed."""

PCIE_BYTES_PER_S = 25e9
"""Host to device copies per rank; assumed."""


class Step:
    """Collects the time terms of one optimizer step."""

    def __init__(
        self,
        work: Workload,
        cluster: ClusterSpec,
        strategy: ParallelStrategy,
        fused: FusedProviders,
        calibration: Calibration | None,
    ) -> None:
        self.work, self.cluster, self.strategy, self.fused = work, cluster, strategy, fused
        self.rates = Rates.of(cluster, work.dtype, calibration)
        self.network = Network(cluster, calibration)
        self.tokens = strategy.micro_batch_sequences * work.recipe.batch.sequence_tokens
        self.rows = rows_of(work, strategy, self.tokens)
        self.micro_batches = strategy.accumulation_steps
        self.components: list[TimeComponent] = []
        self.launching_s = 0.0

    def add(self, name: str, seconds: float, kind: Kind, formula: str, origin: EvidenceOrigin = "modelled") -> None:
        if seconds > 0:
            self.components.append(
                TimeComponent(name=name, milliseconds=1e3 * seconds, kind=kind, formula=formula, origin=origin)
            )

    def report(self) -> TimeReport:
        layers = [
            layer_time(self.work, layer, self.strategy, self.rates, self.fused, self.tokens, self.rows)
            for layer in self.work.layers
        ]
        self._compute(layers)
        self._head()
        self._gathers(layers)
        self._dispatch()
        self._adapter_gradients()
        self._optimizer()
        self.add("launch", self.launching_s, "launch", "operators × launch time, beyond what computing covers")
        spent = [c for c in self.components if c.kind != "hidden_communication"]
        step_ms = sum(c.milliseconds for c in spent)
        return TimeReport(
            components=tuple(self.components),
            step_ms=step_ms,
            tokens_per_s=self.work.recipe.batch.tokens_per_step / step_ms * 1e3,
            bound_by=max(spent, key=lambda c: c.milliseconds).name,
        )

    def _compute(self, layers: list[LayerTime]) -> None:
        m, recompute, forwards = self.micro_batches, 0.0, 2 if self.strategy.checkpointing == "full" else 1
        sums: dict[str, float] = defaultdict(float)
        for layer, one in zip(self.work.layers, layers, strict=True):
            for name, (forward, backward) in one.terms.items():
                sums[name] += m * layer.count * (forward + backward)
            recompute += m * layer.count * one.forward
            waits = forwards * self._wait_s(one.forward, one.launches[0]) + self._wait_s(one.backward, one.launches[1])
            self.launching_s += m * layer.count * waits
        for name, seconds in sums.items():
            curve = {"experts": "grouped_gemm_flops", "dense_linears": "gemm_flops", "attention": "attention_flops"}
            self.add(name, seconds, "compute", FORMULAS[name], self.rates.origin(curve.get(name, "copy_bytes_per_s")))
        if forwards == 2:
            self.add("recompute", recompute, "compute", "every layer's forward again")

    def _head(self) -> None:
        cost = self.fused.cost(
            "linear_cross_entropy",
            {"T": self.tokens, "H": self.work.hidden, "V": self.work.vocabulary},
            self.work.dtype,
        )
        seconds = 0.0
        for one in (cost.forward, cost.backward):
            if one is not None:
                moved = one.bytes_read + one.bytes_written
                spent = self.rates.gemm_s(one.flops, 0.0, self.tokens) + self.rates.traffic_s(moved)
                self.launching_s += self.micro_batches * self._wait_s(spent, one.launches)
                seconds += spent
        formula = "4·T·H·V flops and the logits' passes through memory"
        self.add("head_and_loss", self.micro_batches * seconds, "compute", formula)

    def _gathers(self, layers: list[LayerTime]) -> None:
        mesh, m = self.strategy.mesh, self.micro_batches
        dense, shard = dense_group(mesh, self.cluster), shard_group(mesh, self.cluster)
        exposed = hidden = 0.0
        first = 0.0
        for layer, one in zip(self.work.layers, layers, strict=True):
            dense_bytes, expert_bytes = gathered_layer_bytes(self.work, layer, self.strategy)
            gather = self.network.all_gather_s(dense_bytes, dense) + self.network.all_gather_s(expert_bytes, shard)
            first = first or gather
            forward = one.forward + self._wait_s(one.forward, one.launches[0])
            behind = [forward]
            if self.strategy.reshard_after_forward:
                backward = one.backward + self._wait_s(one.backward, one.launches[1])
                behind.append(backward + (forward if self.strategy.checkpointing == "full" else 0.0))
            for compute in behind:
                shown, covered = split_s(gather, compute, self.cluster, self.strategy.prefetch_depth)
                exposed += m * layer.count * shown
                hidden += m * layer.count * covered
        root = self.network.all_gather_s(gathered_root_bytes(self.work, self.strategy), dense)
        passes = 2 if self.strategy.reshard_after_forward else 1
        if hidden:
            exposed += m * first * passes
        origin = self.network.origin("all_gather")
        times = f"{passes}·m gathers of each layer, m of the root"
        self.add("weight_gathers", exposed + m * root, "exposed_communication", f"{times}; the part not hidden", origin)
        self.add("weight_gathers_hidden", hidden, "hidden_communication", f"{times}; behind computation", origin)

    def _dispatch(self) -> None:
        routed = sum(layer.count for layer in self.work.layers if layer.routed)
        ep = expert_group(self.strategy.mesh, self.cluster)
        if ep.size == 1 or not routed:
            return
        exchanges = 6 if self.strategy.checkpointing == "full" else 4
        one = self.network.all_to_all_s(self.rows * self.work.hidden * self.work.base_bytes, ep)
        self.add(
            "expert_all_to_all",
            self.micro_batches * routed * exchanges * one,
            "exposed_communication",
            f"{exchanges} exchanges of R·H·b bytes per MoE layer and micro-batch",
            self.network.origin("all_to_all"),
        )

    def _adapter_gradients(self) -> None:
        """Reduce-scatter per layer and micro-batch; all-reduce over replicas once."""
        mesh, work = self.strategy.mesh, self.work
        width = 4 if work.recipe.precision.reduce == "float32" else 2
        dense, shard = dense_group(mesh, self.cluster), shard_group(mesh, self.cluster)
        seconds = sum(
            layer.count
            * (
                self.network.all_gather_s(width * layer.adapters.dense_parameters, dense)
                + self.network.all_gather_s(width * layer.adapters.expert_parameters / mesh.ep, shard)
            )
            for layer in work.layers
        )
        seconds *= self.micro_batches
        seconds += self.network.all_reduce_s(
            width * adapter_shard(work, self.strategy), replica_group(mesh, self.cluster)
        )
        overlapped = self.cluster.backend == "nccl"
        self.add(
            "adapter_gradients",
            seconds,
            "hidden_communication" if overlapped else "exposed_communication",
            "reduce-scatter of each layer's adapter gradients" + (", behind backward" if overlapped else ""),
            self.network.origin("reduce_scatter"),
        )

    def _optimizer(self) -> None:
        local = adapter_shard(self.work, self.strategy)
        seconds = self.rates.traffic_s(10 * self.work.adapter_bytes * local)
        if self.strategy.offload == "adapter_optimizer":
            seconds += 4 * self.work.adapter_bytes * local / PCIE_BYTES_PER_S
        self.launching_s += self._wait_s(seconds, OPTIMIZER_LAUNCHES)
        self.add("optimizer", seconds, "optimizer", "10 passes over local adapters: clip, moments, update")

    def _wait_s(self, compute_s: float, launches: float) -> float:
        """Launch time of a pass: on an accelerator what its kernels do not cover, on a CPU all of it."""
        seconds = launches * self.rates.launch_s
        return seconds if self.cluster.device.type == "cpu" else max(0.0, seconds - compute_s)


def step_report(
    work: Workload,
    cluster: ClusterSpec,
    strategy: ParallelStrategy,
    fused: FusedProviders,
    calibration: Calibration | None,
) -> TimeReport:
    """Every time term of one optimizer step."""
    return Step(work, cluster, strategy, fused, calibration).report()
