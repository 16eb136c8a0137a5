"""What this machine can run: devices, libraries, back ends, compilers, memory."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from shardwright.schemas.base import Model
from shardwright.schemas.words import plural
from shardwright.workflows.environment import installed
from shardwright.workflows.report.units import size


class Finding(Model):
    """One thing looked for."""

    name: str
    status: Literal["ok", "missing", "limited"]
    found: str
    effect: str
    """What it makes possible, or what cannot be done without it."""


def examine() -> tuple[Finding, ...]:
    """Look for everything; imports torch."""
    checks: tuple[Callable[[], tuple[Finding, ...]], ...] = (
        _python,
        _devices,
        _backends,
        _libraries,
        _compilers,
        _memory,
    )
    return tuple(finding for check in checks for finding in check())


def _python() -> tuple[Finding, ...]:
    version = platform.python_version()
    good = tuple(map(int, platform.python_version_tuple()[:2])) >= (3, 11)
    return (_finding("python", good, version, "runs everything here", "3.11 or newer is needed"),)


def _devices() -> tuple[Finding, ...]:
    import torch

    cpu = Finding(
        name="cpu",
        status="ok",
        found=f"{plural(usable_cores(), 'core')}, {platform.machine()}",
        effect="small models train on gloo ranks; plans for any cluster can be made",
    )
    if not torch.cuda.is_available():
        return cpu, Finding(
            name="cuda",
            status="missing",
            found="no device",
            effect="kernels are only checked in the interpreter and compiled",
        )
    rows = [cpu]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found = f"{properties.name}, {size(properties.total_memory)}, sm_{properties.major}{properties.minor}"
        rows.append(
            Finding(name=f"cuda:{index}", status="ok", found=found, effect="trains with NCCL and fused kernels")
        )
    return tuple(rows)


def _backends() -> tuple[Finding, ...]:
    import torch.distributed as dist

    nccl = dist.is_available() and dist.is_nccl_available()
    gloo = dist.is_available() and dist.is_gloo_available()
    return (
        _finding("gloo", gloo, "in torch", "CPU ranks can talk", "no training on more than one CPU rank"),
        _finding("nccl", nccl, "in torch", "GPU ranks can talk", "no training on more than one GPU"),
    )


LIBRARIES = (
    ("torch", "models and training", "nothing can be captured, trained or checked"),
    ("transformers", "builds models from config.json", "no checkpoint can be built"),
    ("peft", "proves exported adapters", "no adapter can be exported"),
    ("langgraph", "plan and adapt", "only workers run here, from an approved plan"),
    ("optuna", "strategy search", "only workers run here, from an approved plan"),
    ("triton", "fused kernels", "eager and torch.compile are all there is"),
    ("tensorboard", "run metrics for TensorBoard", "metrics are kept as JSON lines only"),
    ("fastapi", "review page in the browser", "plans are reviewed in the terminal; extra `review` brings it"),
    ("psycopg", "workflow state in PostgreSQL", "state lies in the run folder; extra `postgres` brings it"),
    ("ray", "runs through Ray Train", "`--launch ray` is refused; pip install ray[train]"),
    ("opentelemetry-sdk", "metrics to OpenTelemetry", "OTEL_EXPORTER_OTLP_ENDPOINT is not served"),
    ("mlflow", "metrics to MLflow", "MLFLOW_TRACKING_URI is not served"),
    ("wandb", "metrics to Weights & Biases", "WANDB_PROJECT is not served"),
)


def _libraries() -> tuple[Finding, ...]:
    rows = []
    for name, good, bad in LIBRARIES:
        version = installed(name)
        rows.append(_finding(name, version != "absent", version, good, bad))
    return tuple(rows)


def _compilers() -> tuple[Finding, ...]:
    host = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    ptxas = shutil.which("ptxas") or _bundled_ptxas()
    slurm = shutil.which("sbatch")
    return (
        _finding("slurm", slurm is not None, slurm or "", "jobs can be submitted here", "`--launch slurm` is refused"),
        _finding(
            "c++", host is not None, host or "", "torch.compile on CPU works", "torch.compile on CPU is not offered"
        ),
        _finding("ptxas", ptxas is not None, ptxas or "", "kernels can be compiled for sm_90", "no compile gate here"),
    )


def _bundled_ptxas() -> str | None:
    import importlib.util

    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return "with triton" if path.is_file() else None


def _memory() -> tuple[Finding, ...]:
    memory, disk = host_memory_bytes(), shutil.disk_usage(Path.cwd()).free
    return (
        Finding(
            name="memory",
            status="ok" if memory >= 8 << 30 else "limited",
            found=size(memory),
            effect="bounds what CPU ranks can hold; 8 GiB run the examples",
        ),
        Finding(
            name="disk",
            status="ok" if disk >= 5 << 30 else "limited",
            found=f"{size(disk)} free here",
            effect="holds checkpoints of runs; 5 GiB run the examples",
        ),
    )


def host_memory_bytes() -> int:
    """Memory this process may use: the host's, or its control group's limit where that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finding(name: str, good: bool, found: str, effect: str, loss: str) -> Finding:
    return Finding(
        name=name,
        status="ok" if good else "missing",
        found=found if good else "not found",
        effect=effect if good else loss,
    )
