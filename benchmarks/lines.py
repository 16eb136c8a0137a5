"""Write result lines of one schema: what every benchmark script ends with.

A script fills ``BenchLine`` fields of its own (bench, case, ours, rival, ...); this adds device, versions,
commit and date, and appends to one file a bench and day, whole or not at all.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardwright.schemas.bench import BenchLine
from shardwright.schemas.files import write_atomic

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "transformers", "peft", "numpy")


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Python's version and those of the named packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """``SHARDWRIGHT_COMMIT``, else git's revision (``-dirty`` where files differ), else ``unversioned``."""
    if stated := os.environ.get("SHARDWRIGHT_COMMIT"):
        return stated
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unversioned"


def device() -> str:
    """The CUDA device's name, or the processor's architecture and core count."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU {platform.machine()} x{os.cpu_count()}"


def line(fields: Mapping[str, Any]) -> BenchLine:
    """A line from a script's own fields and this machine's facts. ``ratio`` is filled for times.

    Raises:
        pydantic.ValidationError: a field outside the schema.
    """
    facts: dict[str, Any] = {
        "device": device(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }
    merged = {**facts, **fields}
    ours, rival = merged.get("ours"), merged.get("rival_value")
    if merged.get("ratio") is None and merged.get("unit", "ms") in ("ms", "s") and ours and rival:
        merged["ratio"] = round(rival / ours, 4)
    return BenchLine.model_validate(merged)


def append(lines: Iterable[BenchLine], folder: Path = RESULTS) -> Path:
    """Append lines to ``BENCH-DEVICE-DATE.jsonl``; the file is replaced whole.

    Raises:
        ValueError: lines of several benches, devices or dates, or none.
    """
    given = list(lines)
    names = {f"{at.bench}-{at.device.lower().replace(' ', '-')}-{at.date}.jsonl" for at in given}
    if len(names) != 1:
        raise ValueError(f"expected lines of one bench, device and date, got {sorted(names)}")
    path = folder / names.pop()
    before = path.read_bytes() if path.exists() else b""
    write_atomic(path, before + b"".join(at.model_dump_json().encode() + b"\n" for at in given))
    return path
