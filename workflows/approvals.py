"""Who decided what on which plan: writing verdicts, and finding the plan that is under review."""

from __future__ import annotations

import fcntl
import os
import pwd
from datetime import UTC, datetime
from pathlib import Path

from shardwright.schemas.approval import (
    Approval,
    ProposalVerdict,
    append_to_log,
    proposals_to_decide,
    read_log,
    verify_signature,
)
from shardwright.schemas.errors import ApprovalError, PlanError, UsageError
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.workflows.context import Context

KEY_VARIABLE = "SHARDWRIGHT_APPROVAL_KEY_FILE"
"""Names a file with the key that approvals are signed with; where it is set, an unsigned approval counts nothing."""
SHORTEST_KEY = 16


def signing_key() -> bytes | None:
    """The key that this machine's reviewers share, or ``None`` where approvals are not signed here.

    Raises:
        UsageError: ``no-key``: the variable names no readable file, or one that is too short.
    """
    path = os.environ.get(KEY_VARIABLE)
    if not path:
        return None
    key = Path(path).read_bytes().strip() if Path(path).is_file() else b""
    if len(key) < SHORTEST_KEY:
        raise UsageError(
            "no-key",
            f"{KEY_VARIABLE} names no file with at least {SHORTEST_KEY} bytes",
            where=path,
            next_action="write a random key into that file (`openssl rand -hex 32`), or unset the variable",
        )
    return key


def demand_signature(approval: Approval) -> None:
    """Where a key is set, the approval carries its signature.

    Raises:
        ApprovalError: ``unsigned`` or ``wrong-signature``.
    """
    key = signing_key()
    if key is not None:
        verify_signature(approval, key)


def demand_other_approver(log: Path, plan: AdaptationPlan) -> None:
    """Somebody who edited nothing in the plan has approved it, and did not take that back.

    An approval counts where it is of this evidence too, and carries the signature of the key that is set here.

    Raises:
        ApprovalError: ``author-approved``, naming the authors.
    """
    authors = {edit.actor for edit in plan.decision.edits}
    last = {verdict.actor: verdict for verdict in _verdicts_on(log, plan)}
    others = [v for v in last.values() if v.verdict == "approve" and v.actor not in authors and _signed(v)]
    if authors and not others:
        raise ApprovalError(
            "author-approved",
            f"only those who edited the plan have approved it: {', '.join(sorted(authors))}",
            where=str(log),
            next_action="let another person approve it: `shardwright review --approve`",
        )


def log_beside(plan_file: Path) -> Path:
    """The approvals log of a plan file: ``approvals.jsonl`` in the same folder."""
    return plan_file.with_name("approvals.jsonl")


def person() -> str:
    """The name of whoever runs this process, from the system's accounts: the environment may say anything."""
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def record_verdict(
    log: Path,
    plan: AdaptationPlan,
    *,
    verdict: str,
    actor: str,
    actor_kind: str,
    reason: str = "",
    policy_sha256: str | None = None,
) -> Approval:
    """Append one verdict on a plan. An approval decides every proposal of the plan.

    Raises:
        ApprovalError: ``no-reason`` for a rejection without one; ``broken-chain`` where another reviewer was first.
    """
    if verdict == "reject" and not reason.strip():
        raise ApprovalError(
            "no-reason", "a rejection needs a reason", where=str(log), next_action="say why with --reason"
        )
    key = signing_key()
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log.with_name(f".{log.name}.lock"), "a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        return _append(log, plan, verdict, actor, actor_kind, reason, policy_sha256, key)


def _append(
    log: Path,
    plan: AdaptationPlan,
    verdict: str,
    actor: str,
    actor_kind: str,
    reason: str,
    policy_sha256: str | None,
    key: bytes | None,
) -> Approval:
    previous = read_log(log)
    proposals = proposals_to_decide(plan) if verdict == "approve" else ()
    approval = Approval.seal(
        key=key,
        decision_sha256=plan.hashes.decision,
        evidence_sha256=plan.hashes.evidence,
        verdict=verdict,
        proposals=tuple(ProposalVerdict(proposal_id=item) for item in proposals),
        actor=actor,
        actor_kind=actor_kind,
        policy_sha256=policy_sha256,
        reason=reason,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        previous_sha256=previous[-1].sha256 if previous else None,
        number=len(previous) + 1,
    )
    append_to_log(log, approval, key)
    return approval


def latest_verdict(log: Path, plan: AdaptationPlan) -> Approval | None:
    """The last verdict on exactly this plan, or ``None``."""
    mine = _verdicts_on(log, plan)
    return mine[-1] if mine else None


def _verdicts_on(log: Path, plan: AdaptationPlan) -> list[Approval]:
    """All verdicts on exactly this plan, in their order."""
    hashes = plan.hashes
    return [v for v in read_log(log) if (v.decision_sha256, v.evidence_sha256) == (hashes.decision, hashes.evidence)]


def _signed(approval: Approval) -> bool:
    """Whether the approval counts under the key that is set here; always where none is set."""
    try:
        demand_signature(approval)
    except ApprovalError:
        return False
    return True


def plan_under_review(context: Context, planned: AdaptationPlan) -> AdaptationPlan:
    """The plan now in the run folder: the one that was made, or a descendant of it.

    Raises:
        PlanError: ``foreign-plan``: the plan in the folder does not come from this run.
    """
    current = load_plan(context.plan_file)
    ancestors = {planned.hashes.decision}
    known = {plan.hashes.decision: plan for plan in _kept(context.run_dir / "plans")}
    step: AdaptationPlan | None = current
    seen: set[str] = set()
    while step is not None and step.hashes.decision not in seen:
        if step.hashes.decision in ancestors:
            return current
        seen.add(step.hashes.decision)
        parent = step.decision.parent_hash
        if parent in ancestors:
            return current
        step = known.get(parent) if parent is not None else None
    raise PlanError(
        "foreign-plan",
        f"plan {current.hashes.decision[:16]}… is no child of this run's plan {planned.hashes.decision[:16]}…",
        where=str(context.plan_file),
        next_action="put the run's own plan back (the folder `plans` keeps it), or use `shardwright apply`",
    )


def _kept(folder: Path) -> list[AdaptationPlan]:
    return [load_plan(path) for path in sorted(folder.glob("*.json"))]
