"""Who decided what on which plan: writing verdicts, and finding the plan that is under review."""

from __future__ import annotations

import getpass
from datetime import UTC, datetime
from pathlib import Path

from shardwright.schemas.approval import Approval, ProposalVerdict, append_to_log, proposals_to_decide, read_log
from shardwright.schemas.errors import ApprovalError, PlanError
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.workflows.context import Context


def log_beside(plan_file: Path) -> Path:
    """The approvals log of a plan file: ``approvals.jsonl`` in the same folder."""
    return plan_file.with_name("approvals.jsonl")


def person() -> str:
    """The name of whoever runs this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


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
    previous = read_log(log) if log.exists() else ()
    proposals = proposals_to_decide(plan) if verdict == "approve" else ()
    approval = Approval.seal(
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
    )
    append_to_log(log, approval)
    return approval


def latest_verdict(log: Path, plan: AdaptationPlan) -> Approval | None:
    """The last verdict on exactly this plan, or ``None``."""
    verdicts = read_log(log) if log.exists() else ()
    mine = [
        item
        for item in verdicts
        if item.decision_sha256 == plan.hashes.decision and item.evidence_sha256 == plan.hashes.evidence
    ]
    return mine[-1] if mine else None


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
