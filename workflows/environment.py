"""Versions that a plan pins for its workers and names in its provenance. Nothing is imported to learn them."""

from __future__ import annotations

import platform
from importlib import metadata

from shardwright import __version__
from shardwright.schemas.cluster import ClusterSpec

WORKER_PACKAGES = ("torch", "transformers")
TOOL_PACKAGES = ("langgraph", "optuna", "peft", "pydantic", "torch", "transformers")


def installed(package: str) -> str:
    """The installed version, or ``absent``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def worker_environment(cluster: ClusterSpec) -> dict[str, str]:
    """What workers must have: this machine's versions, or those the cluster file states for its workers.

    A local build label (``+cpu``, ``+cu130``) is left out: the same release plans for CPU and GPU workers.
    """
    here = {name: installed(name).split("+")[0] for name in WORKER_PACKAGES}
    here["python"] = ".".join(platform.python_version_tuple()[:2])
    here["shardwright"] = __version__
    return {**here, **{k: v for k, v in cluster.software.items() if k in here}}


def tool_versions() -> dict[str, str]:
    """What made the plan."""
    return {name: installed(name) for name in TOOL_PACKAGES}
