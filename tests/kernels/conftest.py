"""What kernel tests share: a run of pytest in a process where triton is an interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).parent / "interpreted"


@pytest.fixture
def interpret(tmp_path: Path) -> Callable[[str], None]:
    """Run one file of ``interpreted/`` under ``TRITON_INTERPRET=1``; fails with that run's own report.

    The variable decides how kernels are defined when they are imported, so it needs its own process.
    """

    def run(name: str) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", f"--basetemp={tmp_path / 'inner'}"]
        command = [sys.executable, "-m", "pytest", str(INTERPRETED / name), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

    return run
