"""Signed approvals, a second person, two writers of one log, and plans of another schema."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import workflow_fakes as fakes

from shardwright.schemas.approval import find_approval, read_log, verify_approval
from shardwright.schemas.errors import ApprovalError, PlanError, UsageError
from shardwright.schemas.plan import load_plan
from shardwright.schemas.policy import Policy
from shardwright.workflows.approvals import (
    KEY_VARIABLE,
    demand_other_approver,
    demand_signature,
    person,
    record_verdict,
)
from shardwright.workflows.drive import drive
from shardwright.workflows.review.session import ReviewSession


@pytest.fixture
def session(finished, tmp_path) -> ReviewSession:
    path = tmp_path / "review" / "plan.json"
    finished.plan.save(path)
    return ReviewSession.open(path, actor="ada", stages=fakes.fake_stages())


def key_file(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_signed_approval_counts_only_with_its_key(session, tmp_path, monkeypatch) -> None:
    right, wrong = (key_file(tmp_path, n, n * 8) for n in ("one-key", "other-key"))
    monkeypatch.setenv(KEY_VARIABLE, right)
    session.approve()
    approval = find_approval(session.log, session.plan)
    verify_approval(session.plan, approval)
    demand_signature(approval)
    monkeypatch.setenv(KEY_VARIABLE, wrong)
    with pytest.raises(ApprovalError, match="wrong-signature"):
        demand_signature(approval)
    monkeypatch.delenv(KEY_VARIABLE)
    demand_signature(approval)


def test_an_unsigned_approval_counts_nothing_where_a_key_is_set(tmp_path, request_of, monkeypatch) -> None:
    run = tmp_path / "run"
    with pytest.raises(ApprovalError):
        drive(request_of(), run, stages=fakes.fake_stages())
    ReviewSession.open(run / "plan.json", actor="ada", stages=fakes.fake_stages()).approve()
    monkeypatch.setenv(KEY_VARIABLE, key_file(tmp_path, "key", "k" * 32))
    with pytest.raises(ApprovalError, match="unsigned"):
        drive(request_of(), run, stages=fakes.fake_stages())
    assert fakes.effects(run) == []


def test_a_forged_signature_is_found(session, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key_file(tmp_path, "key", "k" * 32))
    session.approve()
    line = json.loads(session.log.read_text())
    session.log.write_text(json.dumps({**line, "hmac_sha256": "ab" * 32}) + "\n")
    with pytest.raises(ApprovalError, match="wrong-signature"):
        demand_signature(read_log(session.log)[0])


@pytest.mark.parametrize("text", [None, "short"])
def test_a_key_that_is_none_is_said(tmp_path, monkeypatch, session, text) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv(KEY_VARIABLE, str(path))
    with pytest.raises(UsageError, match="no-key"):
        session.approve()
    assert not session.log.exists()


def test_an_author_is_not_the_only_approver(session) -> None:
    session.approve()
    demand_other_approver(session.log, session.plan)  # nobody has edited it
    session.edit({"mesh.ep": "2"}, "fewer gathers")
    session.approve()
    with pytest.raises(ApprovalError, match="author-approved"):
        demand_other_approver(session.log, session.plan)
    record_verdict(session.log, session.plan, verdict="approve", actor="bob", actor_kind="person")
    demand_other_approver(session.log, session.plan)


def test_an_approval_that_was_taken_back_is_none(session) -> None:
    session.edit({"mesh.ep": "2"}, "fewer gathers")
    record_verdict(session.log, session.plan, verdict="approve", actor="bob", actor_kind="person")
    record_verdict(session.log, session.plan, verdict="reject", actor="bob", actor_kind="person", reason="too slow")
    session.approve()
    with pytest.raises(ApprovalError, match="author-approved"):
        demand_other_approver(session.log, session.plan)


def test_the_other_approval_is_signed_too_where_a_key_is_set(session, tmp_path, monkeypatch) -> None:
    session.edit({"mesh.ep": "2"}, "fewer gathers")
    record_verdict(session.log, session.plan, verdict="approve", actor="bob", actor_kind="person")
    monkeypatch.setenv(KEY_VARIABLE, key_file(tmp_path, "key", "k" * 32))
    record_verdict(session.log, session.plan, verdict="approve", actor="ada", actor_kind="person")
    with pytest.raises(ApprovalError, match="author-approved"):
        demand_other_approver(session.log, session.plan)
    record_verdict(session.log, session.plan, verdict="approve", actor="bob", actor_kind="person")
    demand_other_approver(session.log, session.plan)


def test_the_environment_does_not_say_who_approves(monkeypatch) -> None:
    """Else a variable would make an author another person."""
    before = person()
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody-else")
    assert person() == before != "somebody-else"


def test_the_policy_can_ask_for_another_approver(tmp_path, request_of) -> None:
    run, stages = tmp_path / "run", fakes.fake_stages()
    with pytest.raises(ApprovalError):
        drive(request_of(), run, stages=stages)
    session = ReviewSession.open(run / "plan.json", actor="ada", stages=stages)
    session.edit({"mesh.ep": "2"}, "fewer gathers")
    session.approve()
    with pytest.raises(ApprovalError, match="author-approved"):
        drive(request_of(), run, stages=stages, policy=Policy(approver_is_not_author=True))
    record_verdict(run / "approvals.jsonl", session.plan, verdict="approve", actor="bob", actor_kind="person")
    done = drive(request_of(), run, stages=stages, policy=Policy(approver_is_not_author=True))
    assert done.status == "finished"


def test_many_writers_leave_one_unbroken_chain(session) -> None:
    def write(name: str) -> None:
        record_verdict(session.log, session.plan, verdict="approve", actor=name, actor_kind="person")

    threads = [threading.Thread(target=write, args=(f"r{number}",)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {item.actor for item in read_log(session.log)} == {f"r{number}" for number in range(12)}


def test_two_sessions_race_and_exactly_one_approves(session) -> None:
    other = ReviewSession.open(session.file, actor="bob", stages=session.stages)
    told: list[str] = []

    def decide(mine: ReviewSession) -> None:
        try:
            mine.approve()
        except ApprovalError as error:
            told.append(error.code)

    threads = [threading.Thread(target=decide, args=(each,)) for each in (session, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_log(session.log)) == 1 and told == ["approval/decided"]


def test_a_plan_of_a_newer_schema_is_said(session) -> None:
    raw = json.loads(session.file.read_text())
    session.file.write_text(json.dumps({**raw, "schema_version": 99}))
    with pytest.raises(PlanError, match="schema-version"):
        load_plan(session.file)
    with pytest.raises(PlanError, match="schema-version"):
        session.approve()
