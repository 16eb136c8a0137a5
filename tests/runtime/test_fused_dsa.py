"""Sparse attention that a plan installs in families' own models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.runtime import record
from shardwright.runtime.run_log import RunLog
from shardwright.schemas.run import RunRecord, WayTaken

pytest.importorskip("triton", reason="kernels need triton")


@pytest.mark.parametrize("name", ["checks_dsa.py", "checks_dsa_pooled.py", "checks_dsa_k3.py"])
def test_interpreted(name: str, tmp_path: Path) -> None:
    """The interpreter is chosen when kernels are imported, so it needs its own process."""
    if name == "checks_dsa_pooled.py":
        pytest.importorskip("transformers.models.glm5_next", reason="the installed transformers has no glm5_next")
    file = Path(__file__).parent / "interpreted" / name
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", f"--basetemp={tmp_path / 'inner'}"]
    command = ["timeout", "-k", "5", "400", sys.executable, "-m", "pytest", str(file), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_run_keeps_the_ways_that_were_taken(tmp_path: Path) -> None:
    """In its record at once, before the run has ended."""
    nothing: Any = SimpleNamespace(rank=0)
    log = RunLog(nothing, tmp_path, nothing, "cpu")
    log.record = RunRecord(**RECORD)
    way = {"op": "dsa", "path": "sparse", "row_tokens": 4096, "modules": ("a",), "reason": "r", "planned": "p"}
    log.took(())
    assert not (tmp_path / record.FILE).exists()
    log.took((WayTaken(**way),))
    assert record.read(tmp_path).ways == (WayTaken(**way),)


RECORD: dict[str, Any] = {
    "decision_sha256": "ab" * 32,
    "evidence_sha256": "cd" * 32,
    "status": "running",
    "world_size": 1,
    "device": "cpu",
    "versions": {},
}
