"""Where a measurement is made: the device, versions, source revision and day that stand beside every time."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from shardwright.kernels.timing import copy_bytes_per_second


@dataclass(frozen=True)
class Where:
    """The device and day of a run, and what a copy reaches there."""

    device: str
    versions: Mapping[str, str]
    date: str
    copy_bytes_per_s: float

    @staticmethod
    def here() -> Where:
        """The current CUDA device, today."""
        return Where(torch.cuda.get_device_name(), environment(), today(), copy_bytes_per_second())


def environment() -> dict[str, str]:
    """Versions that a time depends on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": driver_version(),
    }


def driver_version() -> str:
    """The display driver's version, or ``unknown`` where nvidia-smi is missing."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def commit(sha: str) -> str:
    """The source revision: ``SHARDWRIGHT_COMMIT``, else git's, else the operator's own source hash."""
    if stated := os.environ.get("SHARDWRIGHT_COMMIT"):
        return stated
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"source-{sha[:12]}"


def today() -> str:
    """Date of measurement, UTC: it names results and enters no hash."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()
