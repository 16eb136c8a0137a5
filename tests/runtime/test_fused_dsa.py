"""Sparse attention that a plan installs in families' own models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels need triton")


def test_interpreted(tmp_path: Path) -> None:
    """The interpreter is chosen when kernels are imported, so it needs its own process."""
    file = Path(__file__).parent / "interpreted" / "checks_dsa.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", f"--basetemp={tmp_path / 'inner'}"]
    command = ["timeout", "-k", "5", "280", sys.executable, "-m", "pytest", str(file), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
