"""A profiler's timeline over gloo: rows of one chunk travel while another's experts compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_exchanges_lie_under_computation(tmp_path: Path) -> None:
    """Waited for where it starts, an exchange is all exposed; in chunks a part of it lies under the products."""
    script = [sys.executable, str(ROOT / "benchmarks" / "overlap.py")]
    sizes = ["--tokens", "2048", "--chunks", "4", "--repeats", "1", "--trace", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        ["timeout", "-k", "5", "200", *script, *sizes], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["rival_value"] > 0.99 > 0.9 > found["ours"] > 0
    events = json.loads((tmp_path / "rank0-chunks4.json").read_text())["traceEvents"]
    moving = [one for one in events if one.get("name", "").startswith("gloo:all_to_all") and "dur" in one]
    assert len(moving) == 1 + 4 * 4, "one exchange of counts; four of rows for each chunk, there and back, twice"
