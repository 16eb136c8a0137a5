"""Clusters by name from the shipped catalogue, or from a user's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.cluster import ClusterRef, ClusterSpec
from shardwright.schemas.errors import ClusterError
from shardwright.schemas.validation import explain

HARDWARE = Path(__file__).resolve().parent / "hardware"


def cluster_names() -> tuple[str, ...]:
    """Clusters that ship with the package."""
    return tuple(sorted(path.stem for path in HARDWARE.glob("*.yaml")))


def device_names() -> tuple[str, ...]:
    """Devices that a cluster file may name instead of describing one."""
    return tuple(sorted(path.stem for path in (HARDWARE / "devices").glob("*.yaml")))


def load_cluster(name_or_path: str) -> ClusterSpec:
    """Read a cluster by catalogue name or by path.

    ``device`` in the file is either a whole description or the name of a catalogue device.

    Raises:
        ClusterError: ``unknown-cluster``, ``unreadable``, ``unknown-device`` or ``invalid``; every
            wrong field is named.
    """
    shipped = HARDWARE / f"{name_or_path}.yaml"
    path = shipped if name_or_path in cluster_names() else Path(name_or_path)
    if not path.is_file():
        raise ClusterError(
            "unknown-cluster",
            f"{name_or_path!r} is neither a catalogue name nor a file",
            where=name_or_path,
            next_action=f"use one of {', '.join(cluster_names())}, or the path of a cluster file",
        )
    raw = _read_mapping(path)
    if isinstance(raw.get("device"), str):
        raw = {**raw, "device": _catalogue_device(raw["device"], path)}
    try:
        return ClusterSpec.model_validate(raw)
    except ValidationError as problem:
        raise ClusterError(
            "invalid", explain(problem), where=str(path), next_action="correct these fields; sizes are bytes, rates SI"
        ) from problem


def cluster_digest(cluster: ClusterSpec) -> str:
    """The hash that plans and calibrations name a cluster by."""
    return sha256_of(cluster)


def cluster_ref(cluster: ClusterSpec) -> ClusterRef:
    """What workers must find, for the decision section of a plan."""
    return ClusterRef(
        name=cluster.name,
        digest=cluster_digest(cluster),
        device_type=cluster.device.type,
        device_name=cluster.device.name,
        world_size=cluster.world_size,
        devices_per_node=cluster.devices_per_node,
        backend=cluster.backend,
        super_node_devices=cluster.super_node_devices,
    )


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise ClusterError(
            "unreadable", f"not a YAML document: {problem}", where=str(path), next_action="correct the file's syntax"
        ) from problem
    if not isinstance(raw, dict):
        raise ClusterError(
            "invalid",
            f"expected a mapping of keys, found {type(raw).__name__}",
            where=str(path),
            next_action="start from a catalogue file: name, device, devices_per_node, nodes, links, host",
        )
    return raw


def _catalogue_device(name: str, path: Path) -> dict[str, Any]:
    if name not in device_names():
        raise ClusterError(
            "unknown-device",
            f"device {name!r} is not in the catalogue",
            where=str(path),
            next_action=f"use one of {', '.join(device_names())}, or describe the device in the file",
        )
    return _read_mapping(HARDWARE / "devices" / f"{name}.yaml")
