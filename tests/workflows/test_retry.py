"""A node is tried again for causes that pass by themselves, and for no others."""

from __future__ import annotations

import errno

import pytest
import workflow_fakes as fakes

from shardwright.schemas.errors import CheckpointError, RunError
from shardwright.workflows import retry
from shardwright.workflows.drive import drive
from shardwright.workflows.events import read_events


def failing(times: int, error: BaseException, calls: list[int]):
    def search(*arguments, **named):
        calls.append(1)
        if len(calls) <= times:
            raise error
        return fakes.searched()

    return search


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "stale"), ConnectionResetError("reset"), TimeoutError("slow")])
def test_a_cause_that_passes_is_tried_again_and_told(tmp_path, request_of, approving, monkeypatch, error) -> None:
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.001)
    calls: list[int] = []
    stages = fakes.fake_stages(search=failing(2, error, calls))
    done = drive(request_of(), tmp_path / "run", stages=stages, policy=approving)
    assert done.status == "finished" and len(calls) == 3
    notes = [event["detail"] for event in read_events(tmp_path / "run") if event["node"] == "search"]
    assert sum("again in" in note for note in notes) == 2


def test_the_third_failure_is_final(tmp_path, request_of, approving, monkeypatch) -> None:
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.001)
    calls: list[int] = []
    stages = fakes.fake_stages(search=failing(9, OSError(errno.EIO, "read"), calls))
    with pytest.raises(RunError, match=r"kept-failing.*OSError: .* 3 times"):
        drive(request_of(), tmp_path / "run", stages=stages, policy=approving)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("gone"),
        PermissionError("no"),
        OSError(errno.ENOSPC, "full"),
        ValueError("bug"),
        CheckpointError("truncated-shard", "short", where="x", next_action="y"),
    ],
)
def test_other_causes_are_not(tmp_path, request_of, approving, error) -> None:
    calls: list[int] = []
    with pytest.raises(type(error)):
        drive(
            request_of(), tmp_path / "run", stages=fakes.fake_stages(search=failing(9, error, calls)), policy=approving
        )
    assert len(calls) == 1
