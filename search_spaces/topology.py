"""The cluster as a graph: devices, nodes, rails (network cards), load/store domains and the spine.

Bandwidth of a level follows from the graph: the narrowest edge of a path, shared by the devices whose
paths cross it when all send at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.cluster import ClusterSpec, LinkSpec


@dataclass(frozen=True)
class Level:
    """One level that ranks meet at: how many devices, and what one of them gets while all send."""

    devices: int
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Topology:
    """The two levels that collectives see: inside a load/store domain, and beyond it."""

    inner: Level
    outer: Level


_KNOWN: dict[str, Topology] = {}
_SEEN: dict[int, tuple[ClusterSpec, Topology]] = {}
"""The same by identity: hashing a cluster takes most of a millisecond. Each is kept, so none takes another's place."""

MOST_SEEN = 64


def topology_of(cluster: ClusterSpec) -> Topology:
    """Inner and outer level of a cluster, derived once from its graph."""
    seen = _SEEN.get(id(cluster))
    if seen is None:
        key = sha256_of(cluster)
        if key not in _KNOWN:
            _KNOWN[key] = _derive(cluster)
        if len(_SEEN) >= MOST_SEEN:
            _SEEN.clear()
        _SEEN[id(cluster)] = seen = cluster, _KNOWN[key]
    return seen[1]


def link(cluster: ClusterSpec, name: str) -> LinkSpec | None:
    return next((one for one in cluster.links if one.name == name), None)


def domain_devices(cluster: ClusterSpec) -> int:
    """Devices that reach each other without a network card."""
    return min(max(cluster.super_node_devices, cluster.devices_per_node), cluster.world_size)


def graph_of(cluster: ClusterSpec) -> nx.Graph:
    """Two domains at most (or the one there is): every further one is alike.

    Nodes: ``device d``, ``switch n`` (of node n), ``domain s``, ``rail n.r``, ``spine``. Edges carry
    ``bandwidth`` (bytes/s, one direction) and ``latency`` (s).
    """
    graph = nx.Graph()
    per_node, domain = cluster.devices_per_node, domain_devices(cluster)
    intra, wide, inter = (link(cluster, name) for name in ("intra_node", "super_node", "inter_node"))
    shown = min(cluster.world_size, 2 * domain)
    for device in range(shown):
        node = device // per_node
        if intra:
            _edge(graph, f"device {device}", f"switch {node}", intra.bandwidth_bytes_per_s, intra.latency_s)
        if wide and cluster.super_node_devices:
            _edge(graph, f"switch {node}", f"domain {device // domain}", wide.bandwidth_bytes_per_s * per_node, 0.0)
        if inter:
            rails = cluster.rails_per_node or per_node
            rail = f"rail {node}.{device % per_node * rails // per_node}"
            _edge(graph, f"device {device}", rail, inter.bandwidth_bytes_per_s, 0.0)
            _edge(graph, rail, "spine", inter.bandwidth_bytes_per_s, inter.latency_s)
    return graph


def _edge(graph: nx.Graph, one: str, other: str, bandwidth: float, latency: float) -> None:
    graph.add_edge(one, other, bandwidth=bandwidth, latency=latency)


def path_bandwidth(graph: nx.Graph, sources: list[str], target: str) -> float:
    """Bytes/s that each source gets towards ``target`` while all send: the narrowest shared edge."""
    loads: dict[frozenset[str], int] = {}
    for source in sources:
        path = nx.shortest_path(graph, source, target, weight="latency")
        for one, other in pairwise(path):
            loads[frozenset((one, other))] = loads.get(frozenset((one, other)), 0) + 1
    return float(min(graph.edges[tuple(edge)]["bandwidth"] / count for edge, count in loads.items()))


def _derive(cluster: ClusterSpec) -> Topology:
    graph, domain = graph_of(cluster), domain_devices(cluster)
    intra, wide, inter = (link(cluster, name) for name in ("intra_node", "super_node", "inter_node"))
    inner = outer = Level(1, float("inf"), 0.0)
    first = [f"device {device}" for device in range(min(domain, cluster.world_size))]
    if intra and domain > 1:
        hub = "domain 0" if cluster.super_node_devices else "switch 0"
        latency = max(intra.latency_s, wide.latency_s if wide and cluster.super_node_devices else 0.0)
        inner = Level(domain, path_bandwidth(graph, first, hub), latency)
    if inter and cluster.world_size > domain:
        node = [f"device {device}" for device in range(cluster.devices_per_node)]
        outer = Level(cluster.world_size, path_bandwidth(graph, node, "spine"), inter.latency_s)
    return Topology(inner, outer)
