"""A cluster from what its own tools print: ``nvidia-smi`` for devices, ``sinfo`` for nodes. Parsing only.

Commands whose output is read:
``nvidia-smi --query-gpu=name,memory.total,compute_cap --format=csv,noheader,nounits`` and
``sinfo -N -h -o "%N %c %m %G"``.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from shardwright.schemas.cluster import ClusterSpec, DeviceSpec
from shardwright.schemas.errors import ClusterError
from shardwright.search_spaces.catalogue import cluster_names, load_cluster

GPU_QUERY = "nvidia-smi --query-gpu=name,memory.total,compute_cap --format=csv,noheader,nounits"
NODE_QUERY = 'sinfo -N -h -o "%N %c %m %G"'
_GRES = re.compile(r"\bgpu:(?:(?P<kind>[\w.-]+):)?(?P<count>\d+)")


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi."""

    name: str
    memory_bytes: int
    compute_capability: str


@dataclass(frozen=True)
class Node:
    """One line of sinfo."""

    name: str
    cores: int
    memory_bytes: int
    gpus: int
    kind: str


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Devices of one node.

    Raises:
        ClusterError: ``unreadable-nvidia-smi``, with the line.
    """
    found = []
    for row in filter(None, map(str.strip, text.splitlines())):
        parts = [part.strip() for part in row.split(",")]
        if len(parts) != 3 or not parts[1].isdigit():
            raise _unreadable("nvidia-smi", row, GPU_QUERY)
        found.append(Gpu(parts[0], int(parts[1]) << 20, parts[2]))
    if not found:
        raise _unreadable("nvidia-smi", "no line", GPU_QUERY)
    return tuple(found)


def parse_sinfo(text: str) -> tuple[Node, ...]:
    """Nodes with GPUs; a node that stands in several partitions counts once.

    Raises:
        ClusterError: ``unreadable-sinfo``, with the line.
    """
    found: dict[str, Node] = {}
    for row in filter(None, map(str.strip, text.splitlines())):
        parts = row.split(maxsplit=3)
        if len(parts) != 4 or not parts[1].isdigit() or not parts[2].rstrip("+").isdigit():
            raise _unreadable("sinfo", row, NODE_QUERY)
        name, cores, memory, gres = parts
        match = _GRES.search(gres)
        if match:
            size = int(memory.rstrip("+")) << 20
            found[name] = Node(name, int(cores), size, int(match["count"]), (match["kind"] or "").lower())
    if not found:
        raise _unreadable("sinfo", "no node with a gpu in its generic resources", NODE_QUERY)
    return tuple(found[name] for name in sorted(found))


def known_device(name: str) -> ClusterSpec | None:
    """The smallest catalogue cluster of a device with this name, for its device and links."""
    word = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    best: tuple[int, int, str] | None = None
    for cluster in cluster_names():
        spec = load_cluster(cluster)
        own = re.sub(r"[^a-z0-9]+", " ", spec.device.name.lower()).split()
        model = next((part for part in own if any(c.isdigit() for c in part)), "")
        if spec.device.type != "cpu" and model and model in word:
            rank = (-len(spec.links), spec.world_size, cluster)
            best = min(best, rank) if best else rank
    return load_cluster(best[2]) if best else None


def cluster_from(gpus: tuple[Gpu, ...], nodes: tuple[Node, ...] = ()) -> ClusterSpec:
    """A cluster of the devices found; its rates come from the catalogue.

    Args:
        gpus: devices of one node.
        nodes: of the whole cluster; none: the one node. Only the most frequent kind of node counts.

    Raises:
        ClusterError: ``mixed-devices``, ``unknown-device`` or ``nodes-disagree``.
    """
    names = Counter(gpu.name for gpu in gpus)
    if len(names) > 1:
        raise ClusterError(
            "mixed-devices",
            f"one node has {', '.join(f'{count} × {name}' for name, count in sorted(names.items()))}",
            where="nvidia-smi",
            next_action="describe the devices that will be used in a cluster file of your own",
        )
    model = known_device(gpus[0].name)
    if model is None:
        raise ClusterError(
            "unknown-device",
            f"{gpus[0].name!r} is not in the catalogue",
            where="nvidia-smi",
            next_action="copy a file of search_spaces/hardware and put this device's figures into it",
        )
    same = _most_alike(nodes)
    per_node = same[0].gpus if same else len(gpus)
    if same and per_node != len(gpus):
        raise ClusterError(
            "nodes-disagree",
            f"nvidia-smi lists {len(gpus)} devices, sinfo {per_node} on {same[0].name}",
            where="nvidia-smi and sinfo",
            next_action="run nvidia-smi on a node of that partition, without CUDA_VISIBLE_DEVICES",
        )
    total = gpus[0].memory_bytes
    usable = min(model.device.usable_memory_bytes, total)
    device = DeviceSpec.model_validate(
        {
            **model.device.model_dump(),
            "name": gpus[0].name,
            "compute_capability": gpus[0].compute_capability,
            "memory_bytes": total,
            "usable_memory_bytes": usable,
            "sources": {**model.device.sources, "memory_bytes": "measured: nvidia-smi, memory.total"},
        }
    )
    host = model.host
    if same:
        host = host.model_copy(update={"memory_bytes": same[0].memory_bytes, "cores": same[0].cores})
    label = re.sub(r"[^a-z0-9]+", "-", gpus[0].name.lower()).strip("-")
    return ClusterSpec.model_validate(
        {
            **model.model_dump(),
            "name": f"{label}-{per_node * max(len(same), 1)}",
            "device": device.model_dump(),
            "devices_per_node": per_node,
            "nodes": max(len(same), 1),
            "host": host.model_dump(),
            "super_node_devices": 0,
        }
    )


def _most_alike(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    if not nodes:
        return ()
    kinds = Counter((node.gpus, node.kind) for node in nodes)
    wanted = min(kinds, key=lambda kind: (-kinds[kind], kind))
    return tuple(node for node in nodes if (node.gpus, node.kind) == wanted)


def _unreadable(tool: str, row: str, command: str) -> ClusterError:
    return ClusterError(
        f"unreadable-{tool}", f"{tool} printed {row!r}", where=tool, next_action=f"give the output of: {command}"
    )
