"""Time of collectives on a two-level network.

Legend: n ranks in a group, n_i of them inside one node, n_o nodes, X bytes of the full tensor,
V bytes one rank sends, α latency per hop, β bandwidth per rank and direction. Seconds.
Mesh order, outermost first: replicate, shard, ep; so an EP group is a run of neighbouring ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from shardwright.schemas.cluster import Calibration, ClusterSpec, LinkSpec
from shardwright.schemas.ops import EvidenceOrigin
from shardwright.schemas.strategy import Mesh
from shardwright.search_spaces.calibration import rate_at

RING_RAMP = ((128e3, 0.1), (4e6, 0.55), (32e6, 1.0))
"""Bytes per rank → share of bandwidth that a multi-node ring reaches; published NCCL fits."""

NVLINK_GATHER = 0.85
"""Share of the datasheet link rate that gathers reach inside a node: 394 of 450 GB/s at 8 ranks."""

ALL_TO_ALL = 0.6
"""Share of the link rate that a plain all-to-all reaches: fit published for 8 × B200."""


@dataclass(frozen=True)
class Group:
    """Ranks that take part in one collective."""

    size: int
    inner: int
    """Of them inside one node."""

    @property
    def outer(self) -> int:
        return -(-self.size // self.inner)


def group(size: int, stride: int, devices_per_node: int) -> Group:
    """A group of ``size`` ranks that stand ``stride`` apart."""
    return Group(size, min(size, max(1, devices_per_node // stride)))


def dense_group(mesh: Mesh, cluster: ClusterSpec) -> Group:
    """Ranks over which non-expert weights are sharded."""
    return group(mesh.shard * mesh.ep, 1, cluster.devices_per_node)


def shard_group(mesh: Mesh, cluster: ClusterSpec) -> Group:
    """Ranks over which one EP rank's experts are sharded."""
    return group(mesh.shard, mesh.ep, cluster.devices_per_node)


def expert_group(mesh: Mesh, cluster: ClusterSpec) -> Group:
    """Ranks that exchange routed rows."""
    return group(mesh.ep, 1, cluster.devices_per_node)


def replica_group(mesh: Mesh, cluster: ClusterSpec) -> Group:
    """Ranks that hold the same shard."""
    return group(mesh.replicate, mesh.shard * mesh.ep, cluster.devices_per_node)


@dataclass(frozen=True)
class Network:
    """Collectives of one cluster."""

    cluster: ClusterSpec
    calibration: Calibration | None = None

    def link(self, name: str) -> LinkSpec:
        return next(link for link in self.cluster.links if link.name == name)

    def origin(self, collective: str) -> EvidenceOrigin:
        """``measured`` where the calibration has the curve, else ``modelled``."""
        measured = self.calibration is not None and bool(self.calibration.collectives.get(collective))
        return "measured" if measured else "modelled"

    def all_gather_s(self, full_bytes: float, ranks: Group) -> float:
        """Ring: ``n·α + max(X·(n−1)/(n·β_i), X·(n_o−1)/(n_o·n_i·β_o·ρ))``; reduce-scatter is alike."""
        n = ranks.size
        if n == 1 or full_bytes <= 0:
            return 0.0
        if rate := self._measured("all_gather", full_bytes / n):
            return full_bytes * (n - 1) / n / rate
        seconds = 0.0
        if ranks.inner > 1:
            seconds = full_bytes * (n - 1) / n / self._intra_gather()
        if ranks.outer > 1:
            beyond = full_bytes * (ranks.outer - 1) / (ranks.outer * ranks.inner)
            seconds = max(seconds, beyond / self.link("inter_node").bandwidth_bytes_per_s / ramp(full_bytes / n))
        return n * self._latency(ranks) + seconds

    def all_reduce_s(self, full_bytes: float, ranks: Group) -> float:
        """A reduce-scatter and an all-gather."""
        return 2 * self.all_gather_s(full_bytes, ranks)

    def all_to_all_s(self, sent_bytes: float, ranks: Group) -> float:
        """Plain exchange of V bytes per rank: intra and inter shares run side by side.

        ``n·α + max(V·(n_i−1)/(n·β_i), V·(n−n_i)/(n·β_o))``, no deduplication.
        """
        n = ranks.size
        if n == 1 or sent_bytes <= 0:
            return 0.0
        if rate := self._measured("all_to_all", sent_bytes):
            return sent_bytes * (n - 1) / n / rate
        share = 1.0 if self.cluster.backend == "gloo" else ALL_TO_ALL
        seconds = 0.0
        if ranks.inner > 1:
            intra = self.link("intra_node").bandwidth_bytes_per_s * share
            seconds = sent_bytes * (ranks.inner - 1) / n / intra
        if ranks.outer > 1:
            inter = self.link("inter_node").bandwidth_bytes_per_s * share
            seconds = max(seconds, sent_bytes * (n - ranks.inner) / n / inter)
        return n * self._latency(ranks) + seconds

    def _intra_gather(self) -> float:
        rate = self.link("intra_node").bandwidth_bytes_per_s
        return rate if self.cluster.backend == "gloo" else rate * NVLINK_GATHER

    def _latency(self, ranks: Group) -> float:
        return self.link("inter_node" if ranks.outer > 1 else "intra_node").latency_s

    def _measured(self, collective: str, size: float) -> float | None:
        curves = self.calibration.collectives if self.calibration else {}
        return rate_at(curves.get(collective, ()), size)


def ramp(bytes_per_rank: float) -> float:
    """Share of inter-node bandwidth at a message size: linear in log size between measured points."""
    if bytes_per_rank <= RING_RAMP[0][0]:
        return RING_RAMP[0][1]
    for (low, low_share), (high, high_share) in pairwise(RING_RAMP):
        if bytes_per_rank <= high:
            position = math.log(bytes_per_rank / low) / math.log(high / low)
            return low_share + position * (high_share - low_share)
    return 1.0
