"""The whole graph on fake stages: order, pause, approval, idempotence, locks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import workflow_fakes as fakes

from shardwright.schemas.approval import read_log, verify_approval
from shardwright.schemas.errors import (
    ApprovalError,
    CheckFailed,
    ExitCode,
    PlanError,
    PolicyDenied,
    RunError,
    UsageError,
)
from shardwright.schemas.files import write_atomic
from shardwright.schemas.plan import load_plan
from shardwright.schemas.policy import Policy
from shardwright.schemas.run import CheckResult
from shardwright.workflows.adapt import AFTER, NODES, nodes_for
from shardwright.workflows.drive import drive
from shardwright.workflows.events import read_events
from shardwright.workflows.lock import RunLock, holder
from shardwright.workflows.report.markdown import markdown_plan
from shardwright.workflows.request import differences
from shardwright.workflows.review.session import ReviewSession


def test_nodes_stand_in_the_published_order() -> None:
    names = "ingest structure propose search join review execute check export report"
    assert " ".join(NODES) == names
    assert nodes_for("plan") == ("ingest", "structure", "propose", "search", "join")
    assert nodes_for("apply") == ("execute", "check", "export", "report")


def test_headless_run_reaches_a_report(finished) -> None:
    run = finished.run_dir
    assert finished.status == "finished"
    assert fakes.effects(run) == ["launch", "export"]
    ends = [event["node"] for event in read_events(run) if event["kind"] == "finished"]
    assert sorted(ends) == sorted(NODES)
    assert all(ends.index(one) < ends.index(node) for node, before in AFTER.items() for one in before)
    record = json.loads((run / "run.json").read_bytes())
    assert record["status"] == "exported" and record["adapter"]["tensors"] == 2
    (approval,) = read_log(run / "approvals.jsonl")
    assert approval.actor_kind == "policy" and approval.policy_sha256
    verify_approval(load_plan(run / "plan.json"), approval)


def test_same_command_again_does_nothing(finished, request_of, approving) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished.run_dir.rglob("*") if p.is_file() and p.name != "lock"}
    again = drive(request_of(), finished.run_dir, stages=fakes.fake_stages(), policy=approving)
    assert again.status == "finished" and fakes.effects(finished.run_dir) == ["launch", "export"]
    changed = [p.name for p, t in before.items() if p.stat().st_mtime_ns != t and "sqlite" not in p.name]
    assert changed == []


def test_state_holds_only_text(finished) -> None:
    assert all(isinstance(value, str) for value in finished.state.values())
    assert all(len(value) == 64 for value in finished.state.values())


def test_without_policy_it_pauses_and_goes_on_after_a_review(tmp_path, request_of) -> None:
    run = tmp_path / "run"
    with pytest.raises(ApprovalError) as caught:
        drive(request_of(), run, stages=fakes.fake_stages())
    assert caught.value.code == "approval/needs-approval" and caught.value.exit_code == ExitCode.NEEDS_APPROVAL
    assert fakes.effects(run) == []
    ReviewSession.open(run / "plan.json", actor="ada", stages=fakes.fake_stages()).approve()
    outcome = drive(request_of(), run, stages=fakes.fake_stages())
    assert outcome.status == "finished" and fakes.effects(run) == ["launch", "export"]


def test_an_edited_child_is_what_runs(tmp_path, request_of) -> None:
    run, stages = tmp_path / "run", fakes.fake_stages()
    with pytest.raises(ApprovalError):
        drive(request_of(), run, stages=stages)
    planned = load_plan(run / "plan.json")
    session = ReviewSession.open(run / "plan.json", actor="ada", stages=stages)
    session.edit({"mesh.shard": "1", "mesh.ep": "2"}, "fewer gathers")
    session.reject("norm.good", "not on this machine")
    session.approve()
    outcome = drive(request_of(), run, stages=stages)
    assert outcome.plan.hashes == session.plan.hashes != planned.hashes
    assert outcome.plan.decision.strategy.mesh.ep == 2
    record = json.loads((run / "run.json").read_bytes())
    assert record["decision_sha256"] == session.plan.hashes.decision


def test_a_foreign_plan_in_the_folder_is_refused(tmp_path, request_of) -> None:
    run, stages = tmp_path / "run", fakes.fake_stages()
    with pytest.raises(ApprovalError):
        drive(request_of(), run, stages=stages)
    plan = load_plan(run / "plan.json")
    decision = plan.decision.model_copy(update={"model_type": "other"})
    type(plan).seal(decision, plan.evidence).save(run / "plan.json")
    ReviewSession.open(run / "plan.json", actor="eve", stages=stages).approve()
    with pytest.raises(PlanError) as caught:
        drive(request_of(), run, stages=stages)
    assert caught.value.code == "plan/foreign-plan"
    assert fakes.effects(run) == []


def test_a_hand_edited_plan_in_the_folder_is_refused(tmp_path, request_of) -> None:
    run, stages = tmp_path / "run", fakes.fake_stages()
    with pytest.raises(ApprovalError):
        drive(request_of(), run, stages=stages)
    text = (run / "plan.json").read_text()
    (run / "plan.json").write_text(text.replace('"accumulation_steps": 2', '"accumulation_steps": 1', 1))
    with pytest.raises(PlanError) as caught:
        drive(request_of(), run, stages=stages)
    assert caught.value.code == "plan/decision-edited" and caught.value.exit_code == ExitCode.STALE_PLAN


def test_a_rejected_plan_stays_rejected(tmp_path, request_of) -> None:
    run, stages = tmp_path / "run", fakes.fake_stages()
    with pytest.raises(ApprovalError):
        drive(request_of(), run, stages=stages)
    ReviewSession.open(run / "plan.json", actor="ada", stages=stages).reject_plan("too slow")
    for policy in (None, Policy(approve=True)):
        with pytest.raises(ApprovalError) as caught:
            drive(request_of(), run, stages=stages, policy=policy)
        assert caught.value.code == "approval/rejected"


def test_policy_denies_and_a_stricter_policy_overrules_an_older_one(tmp_path, request_of, approving) -> None:
    run = tmp_path / "run"

    def fails(*arguments: object) -> int:
        return 1

    with pytest.raises(RunError):
        drive(request_of(), run, stages=fakes.fake_stages(launch=fails), policy=approving)
    strict_run = tmp_path / "strict"
    with pytest.raises(PolicyDenied) as caught:
        drive(
            request_of(), strict_run, stages=fakes.fake_stages(), policy=Policy(max_memory_fraction=0.1, approve=True)
        )
    assert caught.value.exit_code == ExitCode.POLICY_DENIED and "max_memory_fraction" in caught.value.what
    assert not (strict_run / "approvals.jsonl").exists()


def test_a_policy_without_approve_leaves_it_to_a_person(tmp_path, request_of) -> None:
    with pytest.raises(ApprovalError) as caught:
        drive(request_of(), tmp_path / "run", stages=fakes.fake_stages(), policy=Policy())
    assert caught.value.exit_code == ExitCode.NEEDS_APPROVAL


def test_an_unproved_fusion_is_not_installed(finished) -> None:
    assert [fusion.proposal_id for fusion in finished.plan.decision.fusions] == ["norm.good"]
    refused = next(p for p in finished.plan.evidence.proposals if p.id == "norm.unproved")
    assert refused.chosen is None and "no-randomness: unknown" in refused.reason


@pytest.mark.parametrize("status", [1, 5, 9])
def test_workers_status_becomes_the_exit_code(tmp_path, request_of, approving, status) -> None:
    stages = fakes.fake_stages(launch=lambda *a: status)
    with pytest.raises(Exception) as caught:
        drive(request_of(), tmp_path / "run", stages=stages, policy=approving)
    assert caught.value.exit_code == status  # type: ignore[attr-defined]


def test_a_failed_run_goes_on_when_the_cause_is_gone(tmp_path, request_of, approving) -> None:
    run = tmp_path / "run"
    with pytest.raises(RunError):
        drive(request_of(), run, stages=fakes.fake_stages(launch=lambda *a: 1), policy=approving)
    outcome = drive(request_of(), run, stages=fakes.fake_stages(), policy=approving)
    assert outcome.status == "finished" and len(read_log(run / "approvals.jsonl")) == 1


def test_a_failed_export_check_ends_with_9_and_no_report(tmp_path, request_of, approving) -> None:
    bad = (CheckResult(stage="export", name="logits-equal", passed=False, evidence="0.5 beside 0"),)
    with pytest.raises(CheckFailed) as caught:
        drive(request_of(), tmp_path / "run", stages=fakes.fake_stages(check_adapter=lambda *a: bad), policy=approving)
    assert caught.value.exit_code == ExitCode.CHECK_FAILED and "0.5 beside 0" in caught.value.what
    assert not (tmp_path / "run" / "report.md").exists()


def test_training_without_checks_is_not_accepted(tmp_path, request_of, approving, monkeypatch) -> None:
    monkeypatch.setattr(fakes, "PASSED", fakes.PASSED[:1])
    with pytest.raises(CheckFailed) as caught:
        drive(request_of(), tmp_path / "run", stages=fakes.fake_stages(), policy=approving)
    assert caught.value.code == "check/absent"


def test_two_processes_do_not_share_a_folder(tmp_path, request_of) -> None:
    with RunLock(tmp_path / "run"):
        assert holder(tmp_path / "run") is not None
        with pytest.raises(RunError) as caught:
            drive(request_of(), tmp_path / "run", stages=fakes.fake_stages())
    assert caught.value.code == "run/locked"
    assert holder(tmp_path / "run") is None


def test_a_folder_belongs_to_one_request(tmp_path, request_of, finished) -> None:
    other = replace_request(request_of())
    with pytest.raises(UsageError) as caught:
        drive(other, finished.run_dir, stages=fakes.fake_stages())
    assert caught.value.code == "usage/other-request" and "trials: 4 → 5" in caught.value.what


def test_what_two_requests_differ_in_is_named_field_by_field() -> None:
    pin = {"path": "/own/times.jsonl", "sha256": "ab" * 32}
    before = {"trials": 4, "search": None, "evidence": [pin], "llm": {"mode": "off", "replay": ""}}
    now = {
        "trials": 4,
        "search": {"calibration": "/own/curves.json", "explore": False},
        "evidence": [{**pin, "sha256": "cd" * 32}, {**pin, "path": "/more.jsonl"}],
        "llm": {"mode": "off", "replay": None},
    }
    assert list(differences(before, now)) == [
        "search.calibration: none → /own/curves.json",
        "evidence[0].sha256: abababababab… → cdcdcdcdcdcd…",
        "evidence[1].path: none → /more.jsonl",
        "evidence[1].sha256: none → abababababab…",
    ]
    assert list(differences(before, before)) == []


def replace_request(request):
    return request.model_copy(update={"trials": 5})


def test_a_damaged_artifact_is_noticed(tmp_path, request_of) -> None:
    run, stages = tmp_path / "run", fakes.fake_stages()
    with pytest.raises(ApprovalError):
        drive(request_of(), run, stages=stages)
    for path in (run / "artifacts").iterdir():
        path.write_bytes(path.read_bytes().replace(b'"model_type"', b'"model_typo"'))
    with pytest.raises(RunError) as caught:
        drive(request_of(), run, stages=stages, policy=Policy(approve=True))
    assert caught.value.code == "run/damaged-artifact"


def test_stages_are_replaced_one_by_one() -> None:
    stages = fakes.fake_stages()
    assert replace(stages, launch=fakes.launch).export is stages.export


def test_the_workers_own_error_comes_through(tmp_path, request_of, approving) -> None:
    def launch(plan, checkpoint, data_root, approvals, run_dir) -> int:
        error = CheckFailed("not-finite", "model.norm.weight holds NaN", where="shard 2", next_action="restore it")
        write_atomic(run_dir / "failure.json", json.dumps({**error.as_dict(), "rank": 0}).encode())
        return 9

    with pytest.raises(CheckFailed) as caught:
        drive(request_of(), tmp_path / "run", stages=fakes.fake_stages(launch=launch), policy=approving)
    assert (caught.value.code, caught.value.where) == ("check/not-finite", "shard 2")


def test_two_headless_runs_give_the_same_bytes(tmp_path, request_of, approving) -> None:
    made = []
    for name in ("a", "b"):
        run = tmp_path / name
        outcome = drive(request_of(), run, stages=fakes.fake_stages(), policy=approving)
        report = (run / "report.md").read_text().replace(str(run), "RUN")
        made.append(((run / "plan.json").read_bytes(), markdown_plan(outcome.plan), report))
    assert made[0] == made[1]
