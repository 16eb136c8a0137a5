"""A rank that stops is named with its place by those that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shardwright.runtime.failure import clear_failure, read_silence, record_silence
from shardwright.runtime.launch import local
from shardwright.runtime.whereabouts import Whereabouts
from shardwright.schemas.errors import RunError


def ranks_of(run_dir: Path, count: int, **options: Any) -> list[Whereabouts]:
    store = dist.HashStore()
    return [
        Whereabouts(SimpleNamespace(world=count, rank=rank), run_dir, store=store, **options) for rank in range(count)
    ]


def test_those_behind_are_named_with_their_places(tmp_path: Path) -> None:
    first, second, _ = ranks_of(tmp_path, 3)
    for one in (first, second):
        one.at("step 4, forward and backward")
    first.at("step 4, the optimizer")
    found = first.behind(61.0)
    assert found.startswith("rank 0 has been at step 4, the optimizer for 61 s")
    assert "rank 1 is at step 4, forward and backward" in found and "rank 2 is at the start" in found
    second.at("step 4, the optimizer")
    second.at("the save of step 4")
    assert "rank 1" not in first.behind(61.0)


def test_a_long_stay_ends_the_process_with_a_note_and_moving_does_not(tmp_path: Path) -> None:
    ended = threading.Event()
    one, _ = ranks_of(tmp_path, 2, limit_s=1.0, end=lambda code: ended.set())
    with one:
        for step in range(8):
            one.at(f"step {step}")
            assert not ended.wait(0.2)
        assert ended.wait(20)
    assert "rank 0 has been at step 7" in read_silence(tmp_path) and "rank 1 is at the start" in read_silence(tmp_path)
    clear_failure(tmp_path)
    assert read_silence(tmp_path) == ""


def test_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    alone = Whereabouts(SimpleNamespace(world=1, rank=0), tmp_path, limit_s=0.01)
    with alone:
        alone.at("step 1")
        assert alone.thread is None


def test_the_launcher_tells_it(tiny: Any, make_job: Any, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tiny, strategy())

    def dies(*arguments: Any) -> int:
        record_silence(job.run_dir, "rank 0 has been at step 3 for 1500 s; rank 2 is at step 2")
        return 1

    monkeypatch.setattr(local, "_watch", dies)
    monkeypatch.delenv("RANK", raising=False)
    launch: Callable[..., int] = local.launch
    with pytest.raises(RunError, match="rank-silent") as caught:
        launch(job.plan_path, tiny.checkpoint, tiny.data, job.approvals, job.run_dir)
    assert "rank 2 is at step 2" in caught.value.what
