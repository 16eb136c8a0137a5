"""A timeline in the cost model's terms."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.runtime import profile
from shardwright.schemas.errors import RunError

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=8)


def event(name: str, start: float, stop: float, cat: str) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start, "dur": stop - start, "cat": cat}


STEP = event(profile.STEP, 0, 100_000, "user_annotation")


def test_a_devices_kernels_collectives_and_gaps() -> None:
    events = [
        STEP,
        event("gemm", 10_000, 40_000, "kernel"),
        event("gemm", 30_000, 50_000, "kernel"),
        event("ncclDevKernel_SendRecv", 45_000, 70_000, "kernel"),
        event("Optimizer.step#AdamW.step", 80_000, 95_000, "gpu_user_annotation"),
        event("adam", 82_000, 90_000, "kernel"),
        event("aten::mm", 0, 100_000, "cpu_op"),
    ]
    assert profile.terms_of(events) == pytest.approx(
        {
            "compute": 40.0,
            "optimizer": 8.0,
            "exposed_communication": 20.0,
            "hidden_communication": 5.0,
            "launch": 32.0,
            "step": 100.0,
        }
    )


def test_a_timeline_without_a_step_is_refused(tmp_path: Any) -> None:
    with pytest.raises(RunError, match="no-profile"):
        profile.terms_of([])
    with pytest.raises(RunError, match="no-profile"):
        profile.terms(tmp_path)


@pytest.mark.parametrize("asked", ["x", "0", "9", "-1", "²"])
def test_a_step_that_the_run_does_not_have_is_refused(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, and not by keeping nothing."""
    monkeypatch.setenv(profile.VARIABLE, asked)
    with pytest.raises(RunError, match=f"'{asked}'; the recipe has steps 1 to 8"):
        profile.asked_step(8)


@pytest.mark.parametrize(("asked", "step"), [("", None), ("8", 8)])
def test_the_step_that_is_asked_for(asked: str, step: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(profile.VARIABLE, asked)
    assert profile.asked_step(8) == step


@given(SPANS, SPANS)
def test_spans_as_sets_of_moments(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    first, second = ({moment for a, n in part for moment in range(a, a + n)} for part in (left, right))
    one, two = (profile.union((a, a + n) for a, n in part) for part in (left, right))
    assert profile.length(one) == len(first)
    assert profile.overlap(one, two) == len(first & second)
    assert profile.length(profile.inside(one, (5, 20))) == len(first & set(range(5, 20)))


def test_a_run_keeps_the_step_it_was_asked_for(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(profile.VARIABLE, "2")
    job = make_job(tiny, strategy(), recipe={"schedule": {"steps": 2}})
    assert single_rank(job) == 0
    assert [path.name for path in (job.run_dir / profile.FOLDER).iterdir()] == ["step-2.json"]
    found = profile.terms(job.run_dir)
    assert found["compute"] > 0 and found["optimizer"] > 0 and found["exposed_communication"] == 0
    parts = sum(found[kind] for kind in ("compute", "optimizer", "exposed_communication", "launch"))
    assert parts == pytest.approx(found["step"])
    assert found["step"] / 1e3 == pytest.approx(job.record.steps[1].seconds, rel=0.3)
