"""Kimi K3's own code on 128 ranks that do not exist: what rank 0 holds, against closed forms of its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "k3_simulate.py"
HIDDEN, VOCABULARY, RANKS = 7168, 163_840, 128


@pytest.mark.slow
def test_rank_zero_holds_its_shards_and_the_first_units(tmp_path: Path) -> None:
    """Shards and peak as the cost model says; the fullest moment is the first layer's gather: embedding and head whole
    and as gathered, layer 0 the same, and what is kept."""
    words = [sys.executable, str(SCRIPT), "--tokens", "1024"]
    done = subprocess.run(["timeout", "-k", "5", "300", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])["metrics"]
    assert abs(found["static_error_pct"]) < 0.5 and abs(found["peak_error_pct"]) < 3
    root = 2 * (2 * VOCABULARY * HIDDEN + 3 * HIDDEN)
    layer = 2 * (443_740_416 + 3 * 33_792 * HIDDEN + 6 * HIDDEN)
    assert found["peak_bytes"] == pytest.approx(2 * root + 2 * layer + found["static_bytes"], rel=0.01)
