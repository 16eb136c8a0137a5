"""A profiler's timeline over gloo: rows travel while another chunk's experts, or the shared expert, compute."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def spans(trace: Path) -> list[tuple[float, float, str]]:
    """(start, end, name) of a timeline, by start."""
    events = [one for one in json.loads(trace.read_text())["traceEvents"] if one.get("ph") == "X"]
    return sorted((one["ts"], one["ts"] + one["dur"], one["name"]) for one in events)


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
    moving = [one for one in spans(tmp_path / "rank0-chunks4.json") if one[2].startswith("gloo:all_to_all")]
    assert len(moving) == 1 + 4 * 4, "one exchange of counts; four of rows for each chunk, there and back, twice"


def test_the_shared_expert_lies_under_the_dispatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward: between the start of the dispatch and its wait. Backward: between start and wait of its gradient."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    overlap: Any = importlib.import_module("overlap")
    overlap.measure(1024, 1, "under", 1, tmp_path)
    for rank in (0, 1):
        timeline = spans(tmp_path / f"rank{rank}-chunks1under.json")
        starts, waits = ([one for one in timeline if one[2] == name] for name in ("_Start", "experts:wait"))
        (shared,) = [one for one in timeline if one[2] == "experts:shared"]
        assert starts[0][1] <= shared[0] < shared[1] <= waits[0][0]
        moving = [one for one in timeline if one[2].startswith("gloo:all_to_all")]
        assert len(moving) == 1 + 4 and moving[1][0] < shared[1], "the dispatch began before the shared expert ended"
        leaves = [one for one in timeline if one[2] == "_FinishBackward"][-1]
        arrives = [one for one in timeline if one[2] == "_StartBackward"][-1]
        between = [one for one in timeline if leaves[1] <= one[0] and one[1] <= arrives[0] and one[2] == "MmBackward0"]
        assert len(between) == 2, "both products of the shared expert run backward while the gradient travels"


FORWARD = {"_Start": "S", "experts:wait": "W", "experts:compute": "C", "experts:shared": "E"}
BACKWARD = {"_FinishBackward": "F", "_StartBackward": "S", "GroupedLoraLinearBackward": "G", "MmBackward0": "M"}


def order(timeline: list[tuple[float, float, str]], letters: dict[str, str]) -> str:
    """The named events by start, a letter each."""
    return "".join(letters[name] for _, _, name in timeline if name in letters)


def test_chunks_travel_under_each_others_experts_and_the_shared_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chunks: all dispatches leave, the shared expert runs, then each chunk is waited for, computed, sent home.

    Backward mirrors it: the gradients of all three combines leave first, and the shared expert's two products run while
    the gradients of all three dispatches travel.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    overlap: Any = importlib.import_module("overlap")
    assert overlap.measure(1024, 3, "under", 1, tmp_path)["exposed"] < 0.95
    for rank in (0, 1):
        timeline = spans(tmp_path / f"rank{rank}-chunks3under.json")
        turn = next(start for start, _, name in timeline if name == "_FinishBackward")
        assert order([one for one in timeline if one[0] < turn], FORWARD) == "SSS" + "E" + "WCS" * 3 + "WWW"
        assert order(timeline, BACKWARD) == "FFF" + "SGGF" * 3 + "MM" + "SSS"
        moving = [one for one in timeline if one[2].startswith("gloo:all_to_all")]
        (shared,) = [one for one in timeline if one[2] == "experts:shared"]
        assert len(moving) == 1 + 3 * 4 and moving[1][0] < shared[1], "a dispatch began before the shared expert ended"
