"""Approvals: one verdict on two hashes, verified purely, in a hash-chained log."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest

from shardwright.schemas.approval import (
    Approval,
    ProposalVerdict,
    append_to_log,
    find_approval,
    proposals_to_decide,
    read_log,
    verify_approval,
    verify_signature,
)
from shardwright.schemas.errors import ApprovalError, ExitCode
from shardwright.schemas.plan import AdaptationPlan, Question


def approve(plan: AdaptationPlan, **changes: object) -> Approval:
    fields: dict[str, object] = {
        "decision_sha256": plan.hashes.decision,
        "evidence_sha256": plan.hashes.evidence,
        "verdict": "approve",
        "proposals": tuple(ProposalVerdict(proposal_id=pid) for pid in proposals_to_decide(plan)),
        "actor": "reviewer",
        "actor_kind": "person",
        "time": "2026-01-01T00:00:00Z",
    }
    return Approval.seal(**{**fields, **changes})


def refusal(plan: AdaptationPlan, approval: Approval) -> str:
    with pytest.raises(ApprovalError) as caught:
        verify_approval(plan, approval)
    assert caught.value.exit_code == ExitCode.NEEDS_APPROVAL
    return caught.value.code


def test_a_whole_approval_passes(plan: AdaptationPlan) -> None:
    verify_approval(plan, approve(plan))


def test_refusals(plan: AdaptationPlan) -> None:
    assert refusal(plan, approve(plan, decision_sha256="0" * 64)) == "approval/other-plan"
    assert refusal(plan, approve(plan, evidence_sha256="0" * 64)) == "approval/other-plan"
    assert refusal(plan, approve(plan, verdict="reject")) == "approval/rejected"
    assert refusal(plan, approve(plan, proposals=())) == "approval/undecided-proposal"
    assert refusal(plan, approve(plan).model_copy(update={"actor": "someone"})) == "approval/tampered"


def test_an_approval_never_carries_over_to_an_edited_plan(plan: AdaptationPlan) -> None:
    strategy = plan.decision.strategy.model_copy(update={"micro_batch_sequences": 2})
    edited = plan.decision.model_copy(update={"strategy": strategy, "parent_hash": plan.hashes.decision})
    child = AdaptationPlan.seal(edited, plan.evidence)
    assert refusal(child, approve(plan)) == "approval/other-plan"


def test_open_questions_block(plan: AdaptationPlan) -> None:
    question = Question(id="layout", text="which orientation?", choices=("out_in", "in_out"))
    asked = AdaptationPlan.seal(plan.decision.model_copy(update={"questions": (question,)}), plan.evidence)
    assert refusal(asked, approve(asked)) == "approval/open-question"
    answered = question.model_copy(update={"answer": "out_in"})
    done = AdaptationPlan.seal(plan.decision.model_copy(update={"questions": (answered,)}), plan.evidence)
    verify_approval(done, approve(done))


def test_log_is_chained_and_tampering_is_seen(plan: AdaptationPlan, tmp_path: Path) -> None:
    log = tmp_path / "approvals.jsonl"
    first = approve(plan, verdict="reject", reason="too slow")
    append_to_log(log, first)
    second = approve(plan, previous_sha256=first.sha256)
    append_to_log(log, second)
    assert find_approval(log, plan) == second
    assert [a.verdict for a in read_log(log)] == ["reject", "approve"]

    with pytest.raises(ApprovalError, match="broken-chain"):
        append_to_log(log, approve(plan, previous_sha256=first.sha256))
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[1])
    with pytest.raises(ApprovalError, match="broken-chain"):
        read_log(log)
    log.write_bytes(lines[0].replace(b"too slow", b"too fast") + lines[1])
    with pytest.raises(ApprovalError, match="tampered"):
        read_log(log)
    log.write_bytes(lines[0] + lines[1][: len(lines[1]) // 2])
    with pytest.raises(ApprovalError, match="unreadable"):
        read_log(log)


def test_no_verdict_needs_approval(plan: AdaptationPlan, tmp_path: Path) -> None:
    with pytest.raises(ApprovalError, match="needs-approval"):
        find_approval(tmp_path / "none.jsonl", plan)


def test_a_signature_is_the_hmac_of_the_hash_under_the_reviewers_key(plan: AdaptationPlan) -> None:
    signed = approve(plan, key=b"reviewers")
    assert signed.hmac_sha256 == hmac.new(b"reviewers", signed.sha256.encode(), hashlib.sha256).hexdigest()
    assert signed.sha256 == approve(plan).sha256
    verify_approval(plan, signed)
    verify_signature(signed, b"reviewers")
    with pytest.raises(ApprovalError) as caught:
        verify_signature(signed, b"others")
    assert caught.value.code == "approval/wrong-signature"
    with pytest.raises(ApprovalError) as caught:
        verify_signature(approve(plan), b"reviewers")
    assert caught.value.code == "approval/unsigned"


def test_an_unreadable_line_of_the_log_is_named_by_its_number(plan: AdaptationPlan, tmp_path: Path) -> None:
    log = tmp_path / "approvals.jsonl"
    append_to_log(log, approve(plan))
    log.write_bytes(log.read_bytes() + b"{\n")
    with pytest.raises(ApprovalError) as caught:
        read_log(log)
    assert caught.value.code == "approval/unreadable" and caught.value.where == f"{log}:2"
