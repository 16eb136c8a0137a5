"""The training-step benchmark: its tiny shape runs on any device, with equal first losses and a whole result line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.schemas.bench import BenchLine

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/train_step.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["timeout", "-k", "5", "300", sys.executable, str(SCRIPT), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_tiny_shape_is_measured_on_both_sides() -> None:
    done = run("--self-test", "--steps", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    line = BenchLine.model_validate_json(done.stdout)
    assert line.case == "train-step/self-test" and line.unit == "tok/s"
    assert line.ours and line.rival_value and line.ratio == pytest.approx(line.ours / line.rival_value, rel=1e-3)
    assert line.metrics["trainable"] == line.metrics["rival_trainable"] > 0
    assert line.metrics["first_loss_difference"] <= 1e-5


def test_an_unknown_case_is_a_usage_error() -> None:
    done = run("no-such-case")
    assert done.returncode == 2 and "qwen3-30b-experts" in done.stderr
