"""One verdict on one plan's two hashes, and its pure verification.

This is all that the runtime needs to know about approval: no workflow, no policy engine.
"""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from shardwright.schemas.base import Identifier, Model, PositiveInt, Sha256, added
from shardwright.schemas.canonical import canonical_bytes, sha256_of
from shardwright.schemas.errors import ApprovalError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.log_head import LogHead, demand_held, head_path, read_head, signature_of, write_head
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.validation import explain


class ProposalVerdict(Model):
    """The decision on one fusion proposal; a rejection lives in the child plan it makes."""

    proposal_id: Identifier
    verdict: Literal["approve"] = "approve"


class Approval(Model):
    """A verdict in the append-only log. ``sha256`` covers every other field but the signature."""

    schema_version: Literal[1] = 1
    decision_sha256: Sha256
    evidence_sha256: Sha256
    verdict: Literal["approve", "reject"]
    proposals: tuple[ProposalVerdict, ...] = ()
    actor: str
    actor_kind: Literal["person", "policy"]
    policy_sha256: Sha256 | None = None
    reason: str = ""
    time: str
    previous_sha256: Sha256 | None = None
    number: PositiveInt | None = added(None)
    """Its line in the log. A log with a numbered line has a head beside it; ``None`` in logs from before heads."""
    sha256: Sha256
    hmac_sha256: Sha256 | None = added(None)
    """HMAC-SHA-256 of ``sha256`` under a key that reviewers share; ``None`` where unsigned."""

    @classmethod
    def seal(cls, *, key: bytes | None = None, **fields: object) -> Approval:
        """Build an approval and compute its own hash; sign it where a key is given."""
        unsealed = cls.model_validate({**fields, "sha256": "0" * 64})
        sha256 = unsealed.recomputed()
        signature = signature_of(sha256, key) if key is not None else None
        return unsealed.model_copy(update={"sha256": sha256, "hmac_sha256": signature})

    def recomputed(self) -> str:
        return sha256_of(self.model_dump(mode="json", exclude={"sha256", "hmac_sha256"}))


def verify_signature(approval: Approval, key: bytes) -> None:
    """Check that an approval was signed with this key.

    Raises:
        ApprovalError: ``unsigned`` or ``wrong-signature``.
    """
    where = f"approval by {approval.actor!r} of {approval.time}"
    if approval.hmac_sha256 is None:
        raise ApprovalError(
            "unsigned",
            "a signing key is set here, the approval has no signature",
            where=where,
            next_action="approve the plan again with the key set",
        )
    if not hmac.compare_digest(approval.hmac_sha256, signature_of(approval.sha256, key)):
        raise ApprovalError(
            "wrong-signature",
            "the approval was signed with another key, or altered after it was signed",
            where=where,
            next_action="approve the plan again with the key that is set here",
        )


def proposals_to_decide(plan: AdaptationPlan) -> tuple[str, ...]:
    """Ids of fusions in the decision, rejected ones included: each needs a verdict."""
    return tuple(fusion.proposal_id for fusion in plan.decision.fusions)


def open_questions(plan: AdaptationPlan) -> tuple[str, ...]:
    return tuple(question.id for question in plan.decision.questions if question.answer is None)


def verify_approval(plan: AdaptationPlan, approval: Approval) -> None:
    """Check that this approval allows exactly this plan to run.

    Raises:
        ApprovalError: ``tampered``, ``other-plan``, ``rejected``, ``open-question`` or
            ``undecided-proposal``.
    """
    where = f"approval by {approval.actor!r} of {approval.time}"
    if approval.recomputed() != approval.sha256:
        raise ApprovalError(
            "tampered",
            f"the approval's fields hash to {approval.recomputed()[:16]}…, it records {approval.sha256[:16]}…",
            where=where,
            next_action="approve the plan again with `shardwright review`",
        )
    for section in ("decision", "evidence"):
        approved, actual = getattr(approval, f"{section}_sha256"), getattr(plan.hashes, section)
        if approved != actual:
            raise ApprovalError(
                "other-plan",
                f"the approval is for {section} {approved[:16]}…, this plan's {section} is {actual[:16]}…",
                where=where,
                next_action="review this plan: an approval never carries over to an edited plan",
            )
    if approval.verdict != "approve":
        raise ApprovalError(
            "rejected",
            f"the plan was rejected: {approval.reason or 'no reason given'}",
            where=where,
            next_action="edit the plan in `shardwright review` and approve the child plan",
        )
    if missing := open_questions(plan):
        raise ApprovalError(
            "open-question",
            f"questions without an answer: {', '.join(missing)}",
            where=where,
            next_action="answer them in `shardwright review`",
        )
    decided = {verdict.proposal_id for verdict in approval.proposals}
    if undecided := [pid for pid in proposals_to_decide(plan) if pid not in decided]:
        raise ApprovalError(
            "undecided-proposal",
            f"no verdict on {', '.join(undecided)}",
            where=where,
            next_action="decide every proposal in `shardwright review`",
        )


def append_to_log(log: Path, approval: Approval, key: bytes | None = None) -> None:
    """Add one line to the hash-chained log, then move its head; one writer at a time.

    Args:
        key: signs the head.

    Raises:
        ApprovalError: ``broken-chain`` where the approval does not follow the log's last line; as :func:`read_log`.
    """
    hashes = [line.sha256 for line in read_log(log)]
    last, number = hashes[-1] if hashes else None, len(hashes) + 1
    if approval.previous_sha256 != last or approval.number not in (None, number):
        raise ApprovalError(
            "broken-chain",
            f"the log ends at line {len(hashes)}, {last and last[:16]}; the approval is for line {approval.number} "
            f"after {approval.previous_sha256}",
            where=str(log),
            next_action="read the log again: another reviewer decided first",
        )
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as stream:
        stream.write(canonical_bytes(approval) + b"\n")
        stream.flush()
        os.fsync(stream.fileno())  # a head never tells of a line that a power failure can take back
    write_head(log, LogHead.of([*hashes, approval.sha256], key))


def copy_log(log: Path, target: Path) -> None:
    """Verify a log and write it elsewhere, with its head, in place of what was there.

    Raises:
        ApprovalError: as :func:`read_log`.
    """
    head, lines = read_head(log), read_log(log)
    head_path(target).unlink(missing_ok=True)
    write_atomic(target, b"".join(canonical_bytes(line) + b"\n" for line in lines))
    if head is not None:
        write_head(target, head)


def read_log(log: Path) -> tuple[Approval, ...]:
    """All verdicts of a log, verified line by line and against its head; none where there is no log.

    Raises:
        ApprovalError: ``unreadable``, ``tampered`` or ``broken-chain`` with the line number; ``cut-log``, ``no-head``.
    """
    head = read_head(log)  # before the lines: a reviewer who decides meanwhile makes the log longer than its head
    lines = _lines(log) if log.exists() else ()
    if head is not None:
        demand_held([line.sha256 for line in lines], head, log, f"its head, {head_path(log).name},")
    elif any(line.number is not None for line in lines):
        raise ApprovalError(
            "no-head",
            "the log was written with a head beside it, which is not there: lines cut off its end would not be seen",
            where=str(head_path(log)),
            next_action="copy the head together with the log, or restore it from its backup",
        )
    return lines


def _lines(log: Path) -> tuple[Approval, ...]:
    approvals: list[Approval] = []
    for number, line in enumerate(log.read_bytes().splitlines(), start=1):
        where = f"{log}:{number}"
        try:
            approval = Approval.model_validate(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError, ValidationError) as error:
            detail = explain(error) if isinstance(error, ValidationError) else str(error)
            raise ApprovalError(
                "unreadable", detail, where=where, next_action="restore the log from its backup"
            ) from error
        if approval.recomputed() != approval.sha256:
            raise ApprovalError(
                "tampered", "the line was changed after it was written", where=where, next_action="restore the log"
            )
        expected = approvals[-1].sha256 if approvals else None
        if approval.previous_sha256 != expected or approval.number not in (None, number):
            raise ApprovalError(
                "broken-chain",
                "a line before this one was removed or reordered",
                where=where,
                next_action="restore the log",
            )
        approvals.append(approval)
    return tuple(approvals)


def find_approval(log: Path, plan: AdaptationPlan) -> Approval:
    """The last verdict on this plan in the log.

    Raises:
        ApprovalError: ``needs-approval`` where there is none.
    """
    for approval in reversed(read_log(log)):
        if approval.decision_sha256 == plan.hashes.decision and approval.evidence_sha256 == plan.hashes.evidence:
            return approval
    raise ApprovalError(
        "needs-approval",
        f"plan {plan.hashes.decision[:16]}… has no verdict",
        where=str(log),
        next_action="run `shardwright review`, or `--headless --policy FILE`",
    )
