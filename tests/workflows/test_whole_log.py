"""A verdict that was cut off the log is missed by the head, by the run that saw it, or by whoever kept its hash."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import workflow_fakes as fakes

from shardwright.schemas.approval import read_log
from shardwright.schemas.canonical import pretty_bytes
from shardwright.schemas.errors import ApprovalError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.log_head import LogHead, head_path, read_head
from shardwright.schemas.run import RunRecord
from shardwright.workflows.approvals import KEY_VARIABLE, record_verdict
from shardwright.workflows.drive import drive
from shardwright.workflows.history import fork
from shardwright.workflows.prepare import approved_start
from shardwright.workflows.review.session import ReviewSession
from shardwright.workflows.whole_log import demand_whole_log


@pytest.fixture
def session(finished, tmp_path) -> ReviewSession:
    path = tmp_path / "review" / "plan.json"
    finished.plan.save(path)
    return ReviewSession.open(path, actor="ada", stages=fakes.fake_stages())


@pytest.fixture
def start(session, inputs, tmp_path):
    """``apply`` up to the point where its nodes would run."""

    def begin(head: str | None = None) -> Path:
        run = tmp_path / "apply"
        approved_start(session.file, inputs / "checkpoint", session.log, inputs, run, approvals_head=head)
        return run

    return begin


def verdict(session: ReviewSession, which: str) -> None:
    reason = "too slow" if which == "reject" else ""
    record_verdict(session.log, session.plan, verdict=which, actor="bob", actor_kind="person", reason=reason)


def cut(log: Path, lines: int, key: bytes | None = None) -> None:
    """What somebody who may write both files can do: shorten the log, and write a head that fits it."""
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:lines]))
    head_path(log).unlink()
    hashes = [json.loads(line)["sha256"] for line in log.read_bytes().splitlines()]
    write_atomic(head_path(log), LogHead.of(hashes, key).model_dump_json().encode())


def started(run: Path, session: ReviewSession) -> None:
    """What the workers note when they begin."""
    record = RunRecord(
        decision_sha256=session.plan.hashes.decision,
        evidence_sha256=session.plan.hashes.evidence,
        status="interrupted",
        world_size=2,
        device="CPU",
        versions={},
        approvals=LogHead.of([line.sha256 for line in read_log(session.log)]),
    )
    write_atomic(run / "run.json", pretty_bytes(record))


def test_apply_takes_the_head_along_with_the_log(session, start) -> None:
    session.approve()
    run = start()
    assert (run / "approvals.jsonl").read_bytes() == session.log.read_bytes()
    assert read_head(run / "approvals.jsonl") == read_head(session.log) is not None


def test_apply_refuses_a_log_whose_rejection_was_cut_off(session, start) -> None:
    session.approve()
    verdict(session, "reject")
    with pytest.raises(ApprovalError, match="rejected"):
        start()
    lines = session.log.read_bytes().splitlines(keepends=True)
    session.log.write_bytes(lines[0])
    with pytest.raises(ApprovalError, match="cut-log"):
        start()


def test_a_later_start_misses_what_an_earlier_one_saw(session, start) -> None:
    """Log and head were both put back: the run's record still tells."""
    session.approve()
    verdict(session, "reject")
    verdict(session, "approve")
    run = start()
    started(run, session)
    start()
    verdict(session, "approve")
    start()
    cut(session.log, 1)
    with pytest.raises(ApprovalError, match="an earlier start of this run saw 3 lines"):
        start()
    assert len(read_log(run / "approvals.jsonl")) == 4, "the run's copy is left as it was"


def test_a_head_kept_elsewhere_tells_even_before_the_first_start(session, start) -> None:
    session.approve()
    verdict(session, "approve")
    kept = read_head(session.log)
    assert kept is not None
    start(kept.sha256)
    verdict(session, "approve")
    start(kept.sha256)
    cut(session.log, 1)
    start()
    with pytest.raises(ApprovalError, match=rf"none of the log's 1 lines is the expected {kept.sha256[:16]}"):
        start(kept.sha256)


def test_with_a_key_nobody_else_can_write_a_head(session, start, tmp_path, monkeypatch) -> None:
    (tmp_path / "key").write_text("k" * 32)
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key"))
    session.approve()
    verdict(session, "approve")
    start()
    both = session.log.read_bytes(), head_path(session.log).read_bytes()
    cut(session.log, 1)
    with pytest.raises(ApprovalError, match="the log's head has no signature"):
        start()
    cut(session.log, 1, b"another key of theirs")
    with pytest.raises(ApprovalError, match="wrong-signature"):
        start()
    session.log.write_bytes(both[0])
    head_path(session.log).write_bytes(both[1])
    start()


def test_a_signed_log_from_before_heads_needs_one_more_verdict(session, tmp_path, monkeypatch) -> None:
    (tmp_path / "key").write_text("k" * 32)
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key"))
    with pytest.raises(ApprovalError, match="head is not there"):
        demand_whole_log(session.log, None)
    verdict(session, "approve")
    demand_whole_log(session.log, None)


def test_adapt_asks_too(tmp_path, request_of) -> None:
    run, stages = tmp_path / "adapted", fakes.fake_stages(launch=lambda *a: 1)
    with pytest.raises(ApprovalError):
        drive(request_of(), run, stages=stages)
    session = ReviewSession.open(run / "plan.json", actor="ada", stages=stages)
    session.approve()
    verdict(session, "approve")
    started(run, session)
    cut(run / "approvals.jsonl", 1)
    with pytest.raises(ApprovalError, match="an earlier start of this run saw 2 lines"):
        drive(request_of(), run, stages=stages)


def test_a_fork_takes_the_head_along(finished, tmp_path) -> None:
    target = fork(finished.run_dir, "execute", tmp_path / "fork")
    assert read_head(target / "approvals.jsonl") == read_head(finished.run_dir / "approvals.jsonl") is not None


def test_a_log_copied_without_its_head_says_what_to_copy(finished, tmp_path) -> None:
    shutil.copy(finished.run_dir / "approvals.jsonl", tmp_path / "approvals.jsonl")
    with pytest.raises(ApprovalError) as caught:
        read_log(tmp_path / "approvals.jsonl")
    assert caught.value.code == "approval/no-head" and "copy the head" in caught.value.next_action
