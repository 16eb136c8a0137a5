"""A first start with other weights than the plan was made for ends before anything is loaded."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoints.marker import HEADERS_ONLY
from shardwright.checkpoints.sampled import weights_pin
from shardwright.runtime import execute, failure
from shardwright.runtime.state_adopt import require_same_training
from shardwright.runtime.verify import verify_plan_against_world
from shardwright.schemas.errors import StalePlanError
from shardwright.schemas.profile import WeightsPin


@pytest.fixture
def own(tiny: Any, tmp_path: Path) -> Any:
    """A checkpoint that a test may change."""
    shutil.copytree(tiny.checkpoint, tmp_path / "checkpoint")
    return replace(tiny, checkpoint=tmp_path / "checkpoint")


def other_revision(checkpoint: Path) -> str:
    """The same headers in every file; the last value of one file is another. The file's name."""
    shard = min(checkpoint.glob("*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return shard.name


def test_a_first_start_with_swapped_weights_is_refused_before_they_are_loaded(
    own: Any, make_job: Any, strategy: Any, single_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(own, strategy(), weights=weights_pin(own.checkpoint))
    verify_plan_against_world(job.plan, own.checkpoint, own.data)
    name = other_revision(own.checkpoint)
    monkeypatch.setattr(execute, "build", lambda *arguments: pytest.fail("it was loaded"))
    assert single_rank(job) == 5
    left = failure.read_failure(job.run_dir)
    assert left is not None and left["code"] == "stale/changed"
    assert left["where"] == f"decision.weights.files[{name}]" and "the plan says" in left["what"]


def test_equal_weights_train_and_nothing_is_said(own: Any, make_job: Any, strategy: Any, single_rank: Any) -> None:
    job = make_job(own, strategy(), recipe={"schedule": {"steps": 1}}, weights=weights_pin(own.checkpoint))
    assert single_rank(job) == 0
    assert not any("does not pin" in line for line in job.record.warnings)


@pytest.mark.parametrize(("pin", "why"), [(None, "before values were pinned"), (WeightsPin(), "from headers alone")])
def test_a_plan_without_values_runs_and_the_record_says_so_once(
    pin: WeightsPin | None, why: str, own: Any, make_job: Any, strategy: Any, single_rank: Any
) -> None:
    job = make_job(own, strategy(), recipe={"schedule": {"steps": 4, "save_every_steps": 2}}, weights=pin)
    assert single_rank(job) == 0
    shutil.rmtree(job.run_dir / "checkpoints" / "step-4")
    assert single_rank(job) == 0
    assert job.record.resumed_from_steps == (2,)
    assert sum("does not pin the weights' values" in line and why in line for line in job.record.warnings) == 1


def test_a_plan_from_before_keeps_its_bytes(own: Any, make_job: Any, strategy: Any) -> None:
    assert b'"weights"' not in make_job(own, strategy()).plan.to_bytes()


def test_ranks_of_a_node_share_the_files_out(
    own: Any, make_job: Any, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file has one rank that reads it; a launcher that does not tell how many there are lets each read all."""
    names = [*weights_pin(own.checkpoint).files, *(f"z{number}.safetensors" for number in range(5))]
    made = dict.fromkeys(names, "0" * 64)  # every one is wrong, and whoever reads it says so
    plan = make_job(own, strategy(), weights=WeightsPin(files=made, read_bytes=1)).plan
    told: list[str] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(StalePlanError) as caught:
            verify_plan_against_world(plan, own.checkpoint, own.data)
        told += caught.value.where.split("; ")
    assert sorted(told) == sorted(f"decision.weights.files[{one}]" for one in made)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(StalePlanError) as caught:
        verify_plan_against_world(plan, own.checkpoint, own.data)
    assert sorted(caught.value.where.split("; ")) == sorted(told)


def test_a_folder_of_headers_alone_has_not_the_values(own: Any, make_job: Any, strategy: Any) -> None:
    plan = make_job(own, strategy(), weights=weights_pin(own.checkpoint)).plan
    (own.checkpoint / HEADERS_ONLY).write_text("{}")
    with pytest.raises(StalePlanError, match="found no values"):
        verify_plan_against_world(plan, own.checkpoint, own.data)


def test_a_save_made_on_other_weights_is_not_carried_over(own: Any, make_job: Any, strategy: Any) -> None:
    old = make_job(own, strategy(), weights=weights_pin(own.checkpoint)).plan
    same = make_job(own, strategy(micro_batch_sequences=2), weights=weights_pin(own.checkpoint)).plan
    unpinned = make_job(own, strategy(), weights=WeightsPin()).plan
    other_revision(own.checkpoint)
    other = make_job(own, strategy(), weights=weights_pin(own.checkpoint)).plan
    require_same_training(old, same, "here")
    require_same_training(old, unpinned, "here")
    with pytest.raises(StalePlanError, match="they differ in weights"):
        require_same_training(old, other, "here")
