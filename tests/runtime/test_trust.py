"""What was approved is what runs: weights, plan file and environment changed on the way; disks that fill up."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.runtime import evaluate, execute, failure
from shardwright.runtime.metrics import Metrics
from shardwright.runtime.verify import ALTERING, verify_plan_against_world
from shardwright.schemas.errors import RunError, StalePlanError
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.plan import load_plan

Run = Callable[[Any], int]
FULL = OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")


def left(job: Any) -> dict[str, Any]:
    found = failure.read_failure(job.run_dir)
    assert found is not None
    return found


@pytest.fixture
def own(tiny: Any, tmp_path: Path) -> Any:
    """A checkpoint that a test may change."""
    shutil.copytree(tiny.checkpoint, tmp_path / "checkpoint")
    return replace(tiny, checkpoint=tmp_path / "checkpoint")


def test_weights_of_another_revision_are_met_at_resume(
    own: Any, make_job: Any, strategy: Any, single_rank: Run
) -> None:
    """Same names, shapes, types and sizes, other values: nothing that a plan pins has changed."""
    job = make_job(own, strategy(), recipe={"schedule": {"steps": 4, "save_every_steps": 2}})
    assert single_rank(job) == 0
    losses = job.losses
    shutil.rmtree(job.run_dir / "checkpoints" / "step-4")
    shard = next(own.checkpoint.glob("*.safetensors"))
    before, tensors = shard.read_bytes(), load_file(shard)
    name = next(key for key, value in tensors.items() if value.dim() == 2)
    tensors[name][0, 0] += 0.25
    save_file(tensors, shard, metadata={"format": "pt"})
    verify_plan_against_world(job.plan, own.checkpoint, own.data)
    assert single_rank(job) == 9
    assert left(job)["code"] == "check/same-base" and job.record.status == "failed"
    shard.write_bytes(before)
    failure.clear_failure(job.run_dir)
    assert single_rank(job) == 0
    assert not (job.run_dir / failure.ROOM).exists()
    assert job.losses == losses and all(check.passed for check in job.record.checks)


def test_the_verified_plan_is_kept_not_what_its_file_says_later(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tiny, strategy(), recipe={"schedule": {"steps": 1}})
    other = make_job(tiny, strategy(micro_batch_sequences=2), recipe={"schedule": {"steps": 1}})
    verify = execute.verify_plan_against_world

    def then_swapped(*arguments: Any) -> None:
        verify(*arguments)
        shutil.copyfile(other.plan_path, job.plan_path)

    monkeypatch.setattr(execute, "verify_plan_against_world", then_swapped)
    assert single_rank(job) == 0
    assert load_plan(job.run_dir / "plan.json").hashes == job.plan.hashes
    assert job.record.decision_sha256 == job.plan.hashes.decision


@pytest.mark.parametrize("name", sorted(ALTERING))
def test_variables_that_change_the_arithmetic_are_refused(
    name: str, tiny: Any, make_job: Any, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = FusionDecision(
        proposal_id="p",
        pattern="norm",
        variant="v",
        provider="compile",
        op="-",
        modules=("model.norm",),
        roles={},
        tolerance="0.1",
    )
    plain = make_job(tiny, strategy()).plan
    cluster = plain.decision.cluster.model_copy(update={"device_type": "cuda"})
    plan = make_job(tiny, strategy(), fusions=(compiled,), cluster=cluster).plan

    def told() -> str:
        with pytest.raises(StalePlanError) as caught:
            verify_plan_against_world(plan, tiny.checkpoint, tiny.data)
        return str(caught.value.what)

    monkeypatch.setenv(name, "1")
    assert f"environment.{name}: the plan was made with it unset, found 1" in told()
    monkeypatch.setenv(name, "0")
    assert name not in told()
    monkeypatch.setenv(name, "1")
    verify_plan_against_world(plain, tiny.checkpoint, tiny.data)  # on a CPU, nothing compiled: it changes nothing


def test_a_full_disk_ends_a_run_at_once_with_its_cause(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tiny, strategy())

    def full(self: Metrics, metric: Any) -> None:
        raise FULL

    monkeypatch.setattr(Metrics, "step", full)
    assert single_rank(job) == 1
    assert left(job)["code"] == "run/disk-full" and left(job)["where"] == "metrics.jsonl"
    assert job.record.status == "failed" and "No space left" in job.record.failure
    monkeypatch.setattr(execute, "execute", lambda *paths: pytest.fail("it ran again"))
    assert single_rank(job) == 1


def test_the_last_words_use_the_room_that_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes nothing until the room is given back."""
    write = failure.write_atomic

    def on_a_full_disk(path: Path, data: bytes) -> None:
        if (tmp_path / failure.ROOM).exists():
            raise FULL
        write(path, data)

    failure.clear_failure(tmp_path)
    assert (tmp_path / failure.ROOM).stat().st_size == failure.ROOM_BYTES
    monkeypatch.setattr(failure, "write_atomic", on_a_full_disk)
    failure.record_failure(tmp_path, RunError("disk-full", "full", where="here", next_action="free some"))
    found = failure.read_failure(tmp_path)
    assert found is not None and found["code"] == "run/disk-full" and not (tmp_path / failure.ROOM).exists()


def test_a_run_that_could_not_tell_its_end_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise FULL

    monkeypatch.setattr(failure, "write_atomic", full)
    with pytest.raises(RunError, match="disk-full"):
        failure.clear_failure(tmp_path)


def test_only_what_a_restart_meets_again_is_lasting(tmp_path: Path) -> None:
    assert failure.lasting(ConnectionResetError(errno.ECONNRESET, "reset"), tmp_path) is None
    assert failure.lasting(OSError("no number"), tmp_path) is None
    refused = failure.lasting(PermissionError(errno.EACCES, "denied", "x"), tmp_path)
    assert refused is not None and (refused.code, refused.where) == ("run/not-permitted", "x")


def test_a_held_out_loss_that_is_no_number_is_a_failed_check(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tiny, strategy())
    monkeypatch.setattr(evaluate, "summed_loss", lambda model, ids: torch.tensor(float("nan")))
    assert single_rank(job) == 9
    assert left(job)["code"] == "check/held-out-not-finite" and job.record.status == "failed"
