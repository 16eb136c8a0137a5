"""A run's account: what a step costs does not grow with the steps before it, and no end of a run loses a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.runtime import record
from shardwright.runtime.metrics import Metrics
from shardwright.runtime.run_log import RunLog
from shardwright.schemas.errors import CheckFailed, RunError, RunInterrupted
from shardwright.schemas.run import CheckResult, EvalMetric, RunRecord, StepMetric

CHECK = CheckResult(stage="step", name="base-unchanged", passed=True, evidence="3 parameters; changed: none")


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    """A run that has begun, on one rank."""
    nothing: Any = SimpleNamespace(rank=0)
    made = RunLog(nothing, tmp_path, nothing, "cpu")
    made.record = RunRecord(
        decision_sha256="ab" * 32,
        evidence_sha256="cd" * 32,
        status="running",
        world_size=1,
        device="cpu",
        versions={},
    )
    record.write(tmp_path, made.record)
    made.metrics = Metrics(tmp_path, 400)
    made.from_the_start()
    return made


def step(number: int) -> StepMetric:
    return StepMetric(
        step=number,
        loss=3.0 - number / 1000,
        grad_norm=0.5,
        learning_rate=1e-4,
        tokens=64,
        seconds=float(number),
        peak_memory_bytes=1000 + number,
    )


def train(log: RunLog, first: int, last: int, every: int = 10) -> None:
    for number in range(first, last + 1):
        log.stepped(step(number))
        if number % every == 0:
            log.evaluated(EvalMetric(step=number, loss=2.5, tokens=64))
            log.checked((CHECK,))


def test_the_records_file_does_not_grow_with_steps(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write for each check, all of one size; before, each of 400 steps wrote all steps before it."""
    written: list[int] = []
    write = record.write_atomic
    monkeypatch.setattr(record, "write_atomic", lambda path, data: (written.append(len(data)), write(path, data)))
    train(log, 1, 400)
    assert len(written) == 40 and len(set(written)) == 1


def test_the_end_writes_every_step_and_what_they_measure(log: RunLog) -> None:
    train(log, 1, 21)
    log.finished(SimpleNamespace(total={}), None)  # type: ignore[arg-type]
    kept = json.loads((log.run_dir / record.FILE).read_bytes())
    assert [one["step"] for one in kept["steps"]] == list(range(1, 22)) and kept["status"] == "trained"
    assert [one["step"] for one in kept["evaluations"]] == [10, 20] and len(kept["checks"]) == 1
    assert kept["measured_step_ms"] == 11_500.0 and kept["measured_peak_bytes"] == 1021  # median of 2 … 21 seconds


def test_a_killed_runs_record_is_read_with_its_steps(log: RunLog) -> None:
    """Nothing but metrics.jsonl tells them then; a line that the kill cut off is none."""
    train(log, 1, 12)
    with open(log.run_dir / "metrics.jsonl", "ab") as stream:
        stream.write(b'{"kind": "step", "step": 13')
    kept = record.read(log.run_dir)
    assert kept.status == "running" and [one.step for one in kept.steps] == list(range(1, 13))
    assert [one.step for one in kept.evaluations] == [10] and kept.measured_peak_bytes == 1012


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunInterrupted("asked", "stopped", where="here", next_action="resume"), "interrupted"),
        (RunError("disk-full", "full", where="here", next_action="free some"), "failed"),
    ],
)
def test_a_run_that_ends_early_writes_its_steps(log: RunLog, error: Exception, status: str) -> None:
    train(log, 1, 5)
    log.failed(error)
    kept = json.loads((log.run_dir / record.FILE).read_bytes())
    assert kept["status"] == status and [one["step"] for one in kept["steps"]] == [1, 2, 3, 4, 5]


def test_a_resumed_run_drops_the_steps_behind_its_save(log: RunLog) -> None:
    train(log, 1, 12)
    log.resumed(8, ())
    train(log, 9, 10)
    kept = record.read(log.run_dir)
    assert [one.step for one in kept.steps] == list(range(1, 11)) and kept.resumed_from_steps == (8,)
    assert [one.step for one in kept.evaluations] == [10]


def test_a_failed_check_is_in_the_file_before_the_run_ends(log: RunLog) -> None:
    with pytest.raises(CheckFailed):
        log.checked((CHECK.model_copy(update={"passed": False}),))
    kept = json.loads((log.run_dir / record.FILE).read_bytes())
    assert [one["passed"] for one in kept["checks"]] == [False]


def test_a_restart_that_fails_at_once_loses_no_step(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after two steps; started again it fails while it loads."""
    from shardwright.runtime import execute, failure

    job = make_job(tiny, strategy(), recipe={"schedule": {"steps": 4, "save_every_steps": 2}})
    stepped = RunLog.stepped

    def then_stopped(self: RunLog, metric: StepMetric) -> None:
        stepped(self, metric)
        if metric.step == 2:
            raise RunInterrupted("asked", "stopped", where="here", next_action="resume")

    monkeypatch.setattr(RunLog, "stepped", then_stopped)
    assert single_rank(job) == 130
    assert [one.step for one in job.record.steps] == [1, 2] and job.record.status == "interrupted"

    def broken(*arguments: Any) -> None:
        raise RunError("lost", "no weights", where="here", next_action="look")

    failure.clear_failure(job.run_dir)
    monkeypatch.setattr(execute, "build", broken)
    assert single_rank(job) == 1
    assert [one.step for one in job.record.steps] == [1, 2] and job.record.status == "failed"


def test_whoever_watches_a_run_reads_its_record_without_torch() -> None:
    script = "import sys, shardwright.runtime.record, shardwright.workflows.runs\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
