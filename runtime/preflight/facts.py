"""What each rank finds on its own machine, and what is wrong among all ranks' findings."""

from __future__ import annotations

import shutil
import socket
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.runtime import record
from shardwright.runtime.device import Device, available_host_bytes
from shardwright.runtime.preflight.kernels import unbuilt
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import PreflightResult

CLOCK_LIMIT_S = 1.0
"""Between any two ranks; logs and file times stay comparable."""
SAVES_KEPT = 3


@dataclass(frozen=True)
class Facts:
    """One rank's findings."""

    rank: int
    host: str
    versions: dict[str, str]
    device: str
    free_bytes: int
    disk_free_bytes: int
    clock_s: float
    kernels_unbuilt: tuple[str, ...]
    """What does not compile there, with the reason."""


def gather(plan: AdaptationPlan, device: Device, run_dir: Path) -> list[Facts]:
    """Every rank's findings, on every rank."""
    rank = dist.get_rank()
    if dist.get_world_size() > 1:
        dist.barrier()
    clock = time.time()
    mine = Facts(
        rank=rank,
        host=socket.gethostname(),
        versions=record.versions(),
        device=device.name,
        free_bytes=_free_bytes(device),
        disk_free_bytes=shutil.disk_usage(run_dir).free,
        clock_s=clock,
        kernels_unbuilt=unbuilt(plan, device),
    )
    found: list[Facts] = [mine] * dist.get_world_size()
    if dist.get_world_size() > 1:
        dist.all_gather_object(found, mine)
    return found


def _free_bytes(device: Device) -> int:
    if device.kind == "cuda":
        return int(torch.cuda.mem_get_info(device.torch_device)[0])
    return available_host_bytes()


def judge(plan: AdaptationPlan, found: list[Facts], save_bytes: int) -> list[PreflightResult]:
    """One result a rule; the ranks and hosts that break it are named.

    Args:
        plan: what was planned.
        found: all ranks' facts.
        save_bytes: of one save.
    """
    decision = plan.decision
    wanted = decision.environment
    peak = plan.evidence.cost.memory.reserved_bytes
    shared: Counter[str] = Counter(one.host for one in found)
    on_cpu = decision.cluster.device_type == "cpu"
    need_disk = SAVES_KEPT * save_bytes
    clocks = [one.clock_s for one in found]
    skew = max(clocks) - min(clocks)

    def bad(rule: object) -> list[Facts]:
        assert callable(rule)
        return [one for one in found if not rule(one)]

    versions = bad(lambda one: all(one.versions.get(name) == value for name, value in wanted.items()))
    devices = bad(lambda one: one.device == decision.cluster.device_name or on_cpu)
    memory = bad(lambda one: one.free_bytes >= peak * (shared[one.host] if on_cpu else 1))
    disks = bad(lambda one: one.disk_free_bytes >= need_disk)
    kernels = bad(lambda one: not one.kernels_unbuilt)
    late = max(found, key=lambda one: abs(one.clock_s - sorted(clocks)[len(clocks) // 2]))
    return [
        _result("versions", versions, f"wanted {wanted}", lambda one: f"has {_other(one.versions, wanted)}"),
        _result("device", devices, f"wanted {decision.cluster.device_name}", lambda one: f"has {one.device}"),
        _result("memory", memory, f"{peak:,} bytes a rank planned", lambda one: f"{one.free_bytes:,} free on its host"),
        _result("disk", disks, f"{need_disk:,} bytes for saves", lambda one: f"{one.disk_free_bytes:,} free"),
        _result("kernels", kernels, "kernels of the plan", lambda one: "; ".join(one.kernels_unbuilt)),
        PreflightResult(
            name="clocks",
            passed=skew <= CLOCK_LIMIT_S,
            where=f"rank {late.rank} on {late.host}",
            evidence=f"clocks differ by {skew:.3f} s, allowed {CLOCK_LIMIT_S} s",
            value=skew,
            unit="s",
        ),
    ]


def _other(versions: dict[str, str], wanted: dict[str, str]) -> dict[str, str]:
    return {name: versions.get(name, "none") for name, value in wanted.items() if versions.get(name) != value}


def _result(name: str, bad: list[Facts], wanted: str, has: object) -> PreflightResult:
    assert callable(has)
    where = ", ".join(f"rank {one.rank} on {one.host}" for one in bad[:5]) or "all ranks"
    evidence = f"{wanted}; {has(bad[0])}" if bad else f"{wanted}: as found everywhere"
    return PreflightResult(name=name, passed=not bad, where=where, evidence=evidence)
