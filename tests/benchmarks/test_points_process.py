"""Points in a process of their own: one that dies, hangs or fails costs itself alone, whatever comes after it."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
points_process = importlib.import_module("points_process")

WORKER = """
import json, os, sys, time
cases = next(word for word in sys.argv if word.startswith("--worker=")).partition("=")[2].split(",")
sys.stdout.write("a library greets\\n")
for case in cases:
    if case == "dies":
        os._exit(9)
    if case == "hangs":
        time.sleep(60)
    metric = {"fails": "failed", "full": "out_of_memory"}.get(case, "step_ms")
    sys.stdout.write(json.dumps({"case": case, "metrics": {metric: 1.0}}) + "\\n")
    sys.stdout.flush()
    if case == "last":
        break
"""


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script, said = tmp_path / "worker.py", []
    script.write_text(WORKER)
    monkeypatch.setattr(points_process, "START_SECONDS", 2.0)
    return points_process.Supervised([sys.executable, str(script)], 0.0, said.append), said


def cases(lines: list[str]) -> dict[str, str]:
    return {one["case"]: next(iter(one["metrics"])) for one in map(json.loads, lines)}


def test_others_go_on_behind_one_that_dies_hangs_or_fails(supervised) -> None:
    beside, said = supervised
    found = cases(list(beside.lines(["a", "dies", "b", "fails", "full", "hangs", "c"], 60.0)))
    assert found == {"a": "step_ms", "b": "step_ms", "full": "out_of_memory", "c": "step_ms"}
    assert sum("dies" in text for text in said) == sum("hangs" in text for text in said) == 1


def test_lines_come_as_points_end(supervised) -> None:
    beside, _ = supervised
    lines = beside.lines(["a", "hangs"], 60.0)
    assert json.loads(next(lines))["case"] == "a"
    lines.close()


def test_a_worker_that_stops_at_its_limit_is_not_started_again(supervised) -> None:
    beside, said = supervised
    assert cases(list(beside.lines(["a", "last", "b"], 60.0))) == {"a": "step_ms", "last": "step_ms"}
    assert said == []
    assert list(beside.lines(["a"], 0.0)) == [] and "not begun" in said[0]


def test_workers_get_the_environment_that_they_are_given(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "print(json.dumps({'case': 'a', 'metrics': {os.environ.get('PYTORCH_CUDA_ALLOC_CONF', 'none'): 1.0}}))\n"
    )
    told = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    beside = points_process.Supervised([sys.executable, str(script)], 10.0, print, told)
    assert cases(list(beside.lines(["a"], 60.0))) == {"a": "expandable_segments:True"}
