"""Time of collectives on a two-level network; numbers or columns of numbers, seconds.

Legend: n ranks in a group, n_i of them inside one load/store domain, n_o domains, X bytes of the full
tensor, V bytes one rank sends, α latency per hop, β bandwidth per rank and direction.
Mesh order, outermost first: pp, replicate, shard, ep, cp, tp; so a TP group is a run of neighbouring ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.ops import EvidenceOrigin
from shardwright.search_spaces.calibration import rate_at
from shardwright.search_spaces.cost.plans import Plans
from shardwright.search_spaces.topology import domain_devices, topology_of

RING_RAMP = ((128e3, 0.1), (4e6, 0.55), (32e6, 1.0))
"""Bytes per rank → share of bandwidth that a multi-node ring reaches; published NCCL fits."""

NVLINK_GATHER = 0.85
"""Share of the datasheet link rate that gathers reach inside a node: 394 of 450 GB/s at 8 ranks."""

ALL_TO_ALL = 0.6
"""Share of the link rate that a plain all-to-all reaches: fit published for 8 × B200."""

GLOO_GATHER = 0.25
"""Share of the link rate that gloo's all-gather reaches: on two CPU ranks under load it moved 3–6 times fewer
bytes a second than an exchange of the same size (1–21 MiB a rank)."""

HIERARCHICAL = 0.9
"""The same for exchanges that send a row to a node once: 43–58 of 50 GB/s published for H800 and CX7."""


@dataclass(frozen=True)
class Group:
    """Ranks that take part in one collective: numbers, or a column each."""

    size: Any
    inner: Any
    """Of them inside one load/store domain."""

    @property
    def outer(self) -> Any:
        return -(-self.size // self.inner)


def group(size: Any, stride: Any, domain: int) -> Group:
    """A group of ``size`` ranks that stand ``stride`` apart."""
    return Group(size, np.minimum(size, np.maximum(1, domain // stride)))


def dense_group(mesh: Any, cluster: ClusterSpec) -> Group:
    """Ranks over which non-expert weights are sharded. ``mesh``: a Mesh or Plans."""
    return group(mesh.shard * mesh.ep * mesh.cp, mesh.tp, domain_devices(cluster))


def shard_group(mesh: Any, cluster: ClusterSpec) -> Group:
    """Ranks over which one EP rank's experts are sharded: tp · cp neighbours, and shard ranks further off."""
    domain, near = domain_devices(cluster), np.maximum(1, mesh.tp * mesh.cp // mesh.expert_tp)
    size = mesh.shard * mesh.tp * mesh.cp // mesh.expert_tp
    inside = np.minimum(near, domain) * np.maximum(1, domain // (mesh.ep * mesh.tp * mesh.cp))
    return Group(size, np.minimum(size, inside))


def expert_group(mesh: Any, cluster: ClusterSpec) -> Group:
    """Ranks that exchange routed rows."""
    return group(mesh.ep, mesh.cp * mesh.tp, domain_devices(cluster))


def replica_group(mesh: Any, cluster: ClusterSpec) -> Group:
    """Ranks that hold the same shard."""
    return group(mesh.replicate, mesh.shard * mesh.ep * mesh.cp * mesh.tp, domain_devices(cluster))


def node_groups(plans: Plans, cluster: ClusterSpec) -> tuple[Group, Group]:
    """The parts of the dense and expert groups inside one domain: where ``node`` reshard gathers."""
    dense, shard = dense_group(plans, cluster), shard_group(plans, cluster)
    return Group(dense.inner, dense.inner), Group(shard.inner, shard.inner)


@dataclass(frozen=True)
class Network:
    """Collectives of one cluster."""

    cluster: ClusterSpec
    calibration: Calibration | None = None

    def origin(self, collective: str) -> EvidenceOrigin:
        """``measured`` where the calibration has the curve, else ``modelled``."""
        measured = self.calibration is not None and bool(self.calibration.collectives.get(collective))
        return "measured" if measured else "modelled"

    def all_gather_s(self, full_bytes: Any, ranks: Group) -> Any:
        """The faster of a ring and a two-level gather; reduce-scatter is alike.

        Ring: ``n·α + max(X·(n−1)/(n·β_i), X·(n_o−1)/(n_o·n_i·β_o·ρ))``. Two levels: each rank gathers
        along its rail, ``n_o·α_o + X·(n_o−1)/(n_o·n_i·β_o·ρ)``, then inside, ``n_i·α_i + X·(n_i−1)/(n_i·β_i)``.
        """
        size = np.asarray(full_bytes, dtype=np.float64)
        n, inner, outer = (np.asarray(v, dtype=np.float64) for v in (ranks.size, ranks.inner, ranks.outer))
        if curve := self._curve("all_gather"):
            seconds = size * (n - 1) / n / rate_at(curve, size / n)
        else:
            top = topology_of(self.cluster)
            within = np.where(inner > 1, size * (inner - 1) / inner / self._gather_rate(), 0.0)
            along = np.where(inner > 1, size * (n - 1) / n / self._gather_rate(), 0.0)
            beyond = size * (outer - 1) / (outer * inner) / top.outer.bandwidth_bytes_per_s / ramp(size / n)
            hop = np.where(outer > 1, top.outer.latency_s, top.inner.latency_s)
            ring = n * hop + np.maximum(along, np.where(outer > 1, beyond, 0.0))
            levels = outer * top.outer.latency_s + beyond + inner * top.inner.latency_s + within
            seconds = np.where(outer > 1, np.minimum(ring, levels), ring)
        return np.where((n > 1) & (size > 0), seconds, 0.0)[()]

    def all_reduce_s(self, full_bytes: Any, ranks: Group) -> Any:
        """The faster of ring (a reduce-scatter and an all-gather) and tree: ``2·log2(n)·α + 2·X/β``."""
        size = np.asarray(full_bytes, dtype=np.float64)
        n, outer = np.asarray(ranks.size, dtype=np.float64), np.asarray(ranks.outer)
        top = topology_of(self.cluster)
        hop = np.where(outer > 1, top.outer.latency_s, top.inner.latency_s)
        rate = np.where(outer > 1, top.outer.bandwidth_bytes_per_s, self._gather_rate())
        tree = 2 * np.ceil(np.log2(np.maximum(n, 1))) * hop + 2 * size / rate
        return np.where((n > 1) & (size > 0), np.minimum(2 * self.all_gather_s(full_bytes, ranks), tree), 0.0)[()]

    def all_to_all_s(self, sent_bytes: Any, ranks: Group) -> Any:
        """Plain exchange of V bytes per rank: inner and outer shares run side by side.

        ``n·α + max(V·(n_i−1)/(n·β_i), V·(n−n_i)/(n·β_o))``, no deduplication.
        """
        sent = np.asarray(sent_bytes, dtype=np.float64)
        n, inner, outer = (np.asarray(v, dtype=np.float64) for v in (ranks.size, ranks.inner, ranks.outer))
        if curve := self._curve("all_to_all"):
            seconds = sent * (n - 1) / n / rate_at(curve, sent)
        else:
            top, share = topology_of(self.cluster), 1.0 if self.cluster.backend == "gloo" else ALL_TO_ALL
            within = sent * (inner - 1) / n / (top.inner.bandwidth_bytes_per_s * share)
            beyond = sent * (n - inner) / n / (top.outer.bandwidth_bytes_per_s * share)
            hop = np.where(outer > 1, top.outer.latency_s, top.inner.latency_s)
            seconds = n * hop + np.maximum(within, np.where(outer > 1, beyond, 0.0))
        return np.where((n > 1) & (sent > 0), seconds, 0.0)[()]

    def hierarchical_exchange_s(self, sent_bytes: Any, ranks: Group, experts: int, experts_per_token: int) -> Any:
        """Exchange that sends a row to each domain once and spreads it inside.

        V = λ·T·K·H·b as for the plain one. Between: ``V/K · (D − D/n_o)`` with D distinct domains per
        token; inside: V·(n_i−1)/n_i. Both run pipelined; ``n_o·α_o + n_i·α_i`` to start. The fullest
        rank receives λ times the mean on both levels.
        """
        sent = np.asarray(sent_bytes, dtype=np.float64)
        inner, outer = (np.asarray(v, dtype=np.float64) for v in (ranks.inner, ranks.outer))
        top, share = topology_of(self.cluster), HIERARCHICAL
        distinct = _distinct(outer, experts, experts_per_token)
        beyond = sent / experts_per_token * (distinct - distinct / outer) / (top.outer.bandwidth_bytes_per_s * share)
        within = sent * (inner - 1) / inner / (top.inner.bandwidth_bytes_per_s * ALL_TO_ALL)
        start = outer * top.outer.latency_s + inner * top.inner.latency_s
        seconds = start + np.maximum(within, beyond)
        return np.where((outer > 1) & (sent > 0), seconds, self.all_to_all_s(sent, ranks))[()]

    def send_s(self, size: Any, apart: Any) -> Any:
        """One message between ranks; ``apart``: whether they stand in different domains."""
        top = topology_of(self.cluster)
        rate = np.where(apart, top.outer.bandwidth_bytes_per_s, top.inner.bandwidth_bytes_per_s)
        return (np.where(apart, top.outer.latency_s, top.inner.latency_s) + size / rate)[()]

    def _gather_rate(self) -> float:
        rate = topology_of(self.cluster).inner.bandwidth_bytes_per_s
        return rate * (GLOO_GATHER if self.cluster.backend == "gloo" else NVLINK_GATHER)

    def _curve(self, collective: str) -> Any:
        return self.calibration.collectives.get(collective, ()) if self.calibration else ()


def distinct_domains(domains: int, experts: int, experts_per_token: int) -> float:
    """Expected domains that one token's K experts lie in, experts spread evenly: N·(1 − C(E−E/N, K)/C(E, K))."""
    if domains <= 1:
        return 1.0
    elsewhere = experts - experts // domains
    if elsewhere < experts_per_token:
        return float(domains)
    none = sum(math.log(elsewhere - i) - math.log(experts - i) for i in range(experts_per_token))
    return domains * (1 - math.exp(none))


def _distinct(outer: Any, experts: int, experts_per_token: int) -> Any:
    unique, inverse = np.unique(outer, return_inverse=True)
    known = np.array([distinct_domains(int(n), experts, experts_per_token) for n in unique])
    return known[inverse.reshape(-1)].reshape(np.shape(outer))


def ramp(bytes_per_rank: Any) -> Any:
    """Share of inter-node bandwidth at a message size: linear in log size between measured points."""
    sizes, shares = zip(*RING_RAMP, strict=True)
    logs = np.log(np.maximum(np.asarray(bytes_per_rank, dtype=np.float64), 1.0))
    return np.interp(logs, np.log(sizes), shares)[()]
