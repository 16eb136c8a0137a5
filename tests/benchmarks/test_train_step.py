"""The training-step benchmark: its tiny shape runs on any device, with equal first losses and a whole result line."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from shardwright.schemas.bench import BenchLine

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/train_step.py"


@pytest.fixture
def bench() -> Iterator[Callable[[str], ModuleType]]:
    """Modules beside the script, by name."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(SCRIPT.parent))


@pytest.fixture
def cases(bench: Callable[[str], ModuleType]) -> ModuleType:
    return bench("train_step_cases")


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


@pytest.mark.slow
def test_interpreted(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    file = Path(__file__).parent / "interpreted" / "checks_train_step.py"
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", f"--basetemp={tmp_path / 'inner'}"]
    command = ["timeout", "-k", "5", "400", sys.executable, "-m", "pytest", str(file), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_case_recomputes_all_but_its_whole_layers(cases: ModuleType) -> None:
    for case in cases.CASES.values():
        layers, strategy = case.config["num_hidden_layers"], case.strategy()
        assert strategy.micro_batch_sequences == case.batch
        if case.whole:
            assert strategy.checkpointed_layers == tuple(range(layers - case.whole))
        else:
            assert strategy.checkpointing == "full"
        assert case.with_layers(4).strategy().checkpointing == "full"
        assert replace(case, whole=layers).strategy().checkpointing == "none"


def test_the_rival_is_recorded_for_every_case(cases: ModuleType) -> None:
    known = json.loads((SCRIPT.parent / "train_step_rivals.json").read_text())
    assert set(known) == {"measured", *cases.CASES}
    for name in cases.CASES:
        assert known[name]["peak_bytes"] > known[name]["weights_bytes"] > 0 and known[name]["step_s"] > 0


def test_device_time_is_told_by_kernel(bench: Callable[[str], ModuleType]) -> None:
    """Calls are counted, and no time is lost between the list and what is left of it."""
    import torch

    x = torch.randn(64, 64)
    found = bench("train_step_trace").by_kernel(lambda times: [x @ x for _ in range(times)], 3)
    listed = {one["name"]: one for one in found["kernels"]}
    assert listed["aten::mm"]["calls"] == 3
    assert 0 < found["busy_ms"] <= found["span_ms"]
    assert sum(one["ms"] for one in found["kernels"]) + found["others"]["ms"] >= found["busy_ms"]
