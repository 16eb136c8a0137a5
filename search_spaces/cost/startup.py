"""Time to the first finished step, device-hours and money; numbers or columns of numbers."""

from __future__ import annotations

from typing import Any

from shardwright.schemas.cluster import ClusterSpec
from shardwright.search_spaces.cost.plans import Plans
from shardwright.search_spaces.cost.step_compute import PCIE_BYTES_PER_S
from shardwright.search_spaces.cost.workload import Workload

PROCESS_START_S = {"cuda": 20.0, "cpu": 12.0, "npu": 20.0}
"""Interpreter, imports, process groups, building on meta; assumed."""


def time_to_first_step_s(work: Workload, cluster: ClusterSpec, plans: Plans, step_ms: Any) -> Any:
    """Start, storage, host copies and one step.

    Every node reads its ranks' shards: ``replicate · stored bytes / (nodes · read rate)``; an
    accelerator then copies its shard over PCIe.
    """
    stored = work.profile.stored_bytes * plans.replicate
    read = stored / (cluster.nodes * cluster.storage.read_bytes_per_s)
    shard = stored / cluster.world_size
    copied = 0.0 if cluster.device.type == "cpu" else shard / PCIE_BYTES_PER_S
    return PROCESS_START_S[cluster.device.type] + read + copied + step_ms / 1e3


def gpu_hours(work: Workload, cluster: ClusterSpec, first_step_s: Any, step_ms: Any) -> Any:
    """Device-hours of the whole run: all ranks, from start to last step."""
    steps = work.recipe.schedule.steps
    return cluster.world_size * (first_step_s + (steps - 1) * step_ms / 1e3) / 3600


def money(cluster: ClusterSpec, hours: float) -> float | None:
    """Price of these device-hours; ``None`` without a price."""
    return None if cluster.price_per_device_hour is None else hours * cluster.price_per_device_hour
