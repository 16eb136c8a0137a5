"""What happens at review: an earlier verdict, a policy, or a person settles the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwright.schemas.approval import Approval, verify_approval
from shardwright.schemas.canonical import pretty_bytes
from shardwright.schemas.errors import ApprovalError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.policy import Policy
from shardwright.workflows.approvals import (
    demand_other_approver,
    demand_signature,
    latest_verdict,
    plan_under_review,
    record_verdict,
)
from shardwright.workflows.context import Context
from shardwright.workflows.policy import denied, evaluate
from shardwright.workflows.whole_log import demand_whole_log, head_seen

Reviewer = Callable[[Path], None]
"""Given the plan file: shows it and lets a person decide; verdicts go to the log beside it."""


def settle(context: Context, planned: AdaptationPlan, policy: Policy | None, reviewer: Reviewer | None) -> Approval:
    """Return a valid approval of the plan in the run folder, or raise.

    Raises:
        ApprovalError: ``needs-approval`` or ``rejected``.
        PolicyDenied: the policy is broken.
    """
    plan = plan_under_review(context, planned)
    verdict = latest_verdict(context.approvals, plan)
    if policy is not None and (verdict is None or verdict.actor_kind == "policy"):
        verdict = _by_policy(context, plan, policy, verdict)
    if verdict is None and reviewer is not None:
        reviewer(context.plan_file)
        plan = plan_under_review(context, planned)
        verdict = latest_verdict(context.approvals, plan)
    if verdict is None:
        raise ApprovalError(
            "needs-approval",
            f"plan {plan.hashes.decision[:16]}… waits for a verdict",
            where=str(context.plan_file),
            next_action=f"`shardwright review {context.plan_file}`, then start the same command again",
        )
    verify_approval(plan, verdict)
    demand_signature(verdict)
    demand_whole_log(context.approvals, head_seen(context.run_dir, plan))
    if policy is not None and policy.approver_is_not_author:
        demand_other_approver(context.approvals, plan)
    context.keep_plan(plan)
    return verdict


def _by_policy(context: Context, plan: AdaptationPlan, policy: Policy, earlier: Approval | None) -> Approval | None:
    result = evaluate(plan, policy)
    write_atomic(context.run_dir / "policy_result.json", pretty_bytes(result))
    if result.violations:
        raise denied(result, where=str(context.plan_file))
    if not result.approves:
        return None
    if earlier is not None and earlier.policy_sha256 == result.policy_sha256:
        return earlier
    return record_verdict(
        context.approvals,
        plan,
        verdict="approve",
        actor="policy",
        actor_kind="policy",
        reason=f"{len(result.findings)} rules passed",
        policy_sha256=result.policy_sha256,
    )
