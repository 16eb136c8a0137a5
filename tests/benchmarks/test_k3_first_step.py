"""From files to the first step in one command: the files' contents, the timing at tiny width, a run without a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import k3_first_step
from k3_files import SCALE, write_slice, write_texts
from k3_slice import CASES

from shardwright.checkpoints.headers import read_headers
from shardwright.checkpoints.reader import ShardReader


def test_contents_are_what_their_names_promise(tmp_path: Path) -> None:
    """The whole file is written, every kind of tensor with its own contents, and no two matrices are alike."""
    written = write_slice(tmp_path, CASES["k3-slice"].cut(3, tiny=True))
    assert written == (tmp_path / "model.safetensors").stat().st_size
    layer = "language_model.model.layers.1"
    with ShardReader(tmp_path, read_headers(tmp_path)) as reader:
        assert torch.equal(reader.read(f"{layer}.input_layernorm.weight"), torch.ones(128, dtype=torch.bfloat16))
        assert torch.equal(reader.read(f"{layer}.self_attn.o_norm.weight"), torch.ones(16))
        assert not reader.read(f"{layer}.self_attn.A_log").any()
        weights = [reader.read(f"{layer}.self_attn.{part}_proj.weight").float() for part in "qkvo"]
        codes = [reader.read(f"{layer}.block_sparse_moe.experts.{e}.w1.weight_packed") for e in range(8)]
        scale = reader.read(f"{layer}.block_sparse_moe.experts.0.w1.weight_scale")
    assert all(0.018 < float(one.std()) < 0.022 and abs(float(one.mean())) < 0.002 for one in weights)
    assert not torch.equal(weights[0], weights[1])
    assert bool((scale == SCALE).all())
    assert len({one.numpy().tobytes() for one in codes}) == 8
    counts = np.bincount(torch.stack(codes).numpy().reshape(-1), minlength=256)
    assert counts.min() > 0, "every byte occurs"


def test_texts_hold_a_sequence(tmp_path: Path) -> None:
    write_texts(tmp_path, 300)
    for name in ("train", "held_out"):
        (record,) = [json.loads(one) for one in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(record["text"].encode()) > 300


@pytest.mark.slow
def test_the_clock_stops_at_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    """One command at tiny width: planned, approved, loaded, checked, one step; each stage is part of the time."""
    assert k3_first_step.main(["--self-test"]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    metrics = made["metrics"]
    assert made["case"] == "k3/first-step" and made["unit"] == "s"
    assert metrics["plan_s"] + metrics["load_s"] + metrics["step_s"] < made["ours"] < metrics["bar_s"]
    assert metrics["load_bytes"] > 0.9 * metrics["checkpoint_bytes"], "real files were read"
    assert metrics["loss"] > 0 and metrics["grad_norm"] > 0 and metrics["checks"] >= 5


def test_a_command_without_a_step_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that fails gives exit 1 and its own last words, and no line."""
    words = [sys.executable, "-c", "import sys; sys.exit('the world is not as planned')"]
    monkeypatch.setattr(k3_first_step, "command", lambda cluster: words)
    assert k3_first_step.main(["--self-test", "--folder", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "the world is not as planned" in told.err and not told.out


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(k3_first_step, "command", lambda cluster: words)
    with pytest.raises(k3_first_step.FirstStepMissing):
        k3_first_step.first_step(tmp_path, "cpu-1", 0.5, whole=False)
