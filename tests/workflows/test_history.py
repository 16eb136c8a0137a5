"""Runs listed, their course shown, and forked at a node."""

from __future__ import annotations

import json

import pytest
import workflow_fakes as fakes

from shardwright.schemas.errors import ApprovalError, RunError, UsageError
from shardwright.schemas.plan import load_plan
from shardwright.workflows.adapt import NODES
from shardwright.workflows.drive import drive
from shardwright.workflows.history import fork, runs_in, visits


def test_the_course_of_a_run_names_every_node_and_a_failure(tmp_path, request_of, approving) -> None:
    run = tmp_path / "run"
    with pytest.raises(RunError):
        drive(request_of(), run, stages=fakes.fake_stages(launch=lambda *a: 1), policy=approving)
    drive(request_of(), run, stages=fakes.fake_stages(), policy=approving)
    course = visits(run)
    assert sorted(v.node for v in course if v.end in ("finished", "unchanged")) == sorted(NODES)
    assert [v.end for v in course if v.node == "execute"] == ["failed: run/workers-failed", "finished"]
    assert all(v.seconds is not None and v.seconds >= 0 for v in course)


def test_a_fork_runs_its_node_and_what_follows_and_nothing_before(tmp_path, finished, request_of, approving) -> None:
    run = finished.run_dir
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    calls: list[str] = []

    def search(*arguments, **named):
        calls.append("search")
        return fakes.searched()

    def structure(*arguments):
        raise AssertionError("structure ran again")

    target = fork(run, "search", tmp_path / "fork")
    stages = fakes.fake_stages(search=search, structure=structure)
    done = drive(request_of(), target, stages=stages, policy=approving)
    assert done.status == "finished" and calls == ["search"]
    assert fakes.effects(target) == ["launch", "export"]
    assert load_plan(target / "plan.json").hashes == load_plan(run / "plan.json").hashes
    assert {path: path.read_bytes() for path in before} == before, "the first run is not touched"


def test_a_fork_at_review_asks_again_and_at_execute_does_not(tmp_path, finished, request_of) -> None:
    with pytest.raises(ApprovalError):
        drive(request_of(), fork(finished.run_dir, "review", tmp_path / "a"), stages=fakes.fake_stages())
    done = drive(request_of(), fork(finished.run_dir, "execute", tmp_path / "b"), stages=fakes.fake_stages())
    assert done.status == "finished" and fakes.effects(tmp_path / "b") == ["launch", "export"]


def test_a_fork_that_cannot_be_is_refused(tmp_path, request_of, finished) -> None:
    for at, code in (("nowhere", "unknown-node"), ("report", "unknown-node"), ("../x", "unknown-node")):
        with pytest.raises(UsageError, match=code):
            fork(finished.run_dir, at, tmp_path / "f")
    with pytest.raises(UsageError, match="exists"):
        fork(finished.run_dir, "search", finished.run_dir)
    paused = tmp_path / "paused"
    with pytest.raises(ApprovalError):
        drive(request_of(), paused, stages=fakes.fake_stages())
    with pytest.raises(RunError, match="not-reached"):
        fork(paused, "execute", tmp_path / "f")


def test_the_commands(cli, finished, tmp_path, monkeypatch) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "request.json").write_text("{")
    listed = json.loads(cli("runs", "--root", tmp_path, "--output", "json").out)
    assert [(item["state"]) for item in listed] == ["run/damaged-request", "finished"]
    assert "finished" in cli("runs", "--root", tmp_path).out
    assert "execute" in cli("runs", "show", finished.run_dir).out
    done = cli("runs", "fork", finished.run_dir, "--at", "search", "--to", tmp_path / "fork")
    assert done.code == 0 and "shardwright resume" in done.err
    assert cli("runs", "fork", finished.run_dir, "--at", "nowhere", "--to", tmp_path / "g").code == 2
    assert cli("runs", "show", tmp_path / "absent").code == 1
    assert len(runs_in(tmp_path)) == 3
    for root, code in ((tmp_path / "none", "usage/no-folder"), (finished.run_dir, "usage/is-a-run")):
        done = cli("runs", "--root", root)
        assert done.code == 2 and f"error: [{code}]" in done.err and str(root) in done.err
    monkeypatch.chdir(tmp_path)
    fresh = cli("runs")
    assert fresh.code == 0 and "no run in runs" in fresh.err, "nothing has run here yet: no fault"
