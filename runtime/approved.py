"""What a worker asks of a plan's approval before anything else, and what it keeps of the log."""

from __future__ import annotations

from pathlib import Path

from shardwright.runtime import record
from shardwright.schemas.approval import find_approval, read_log, verify_approval
from shardwright.schemas.log_head import LogHead, demand_held, read_head
from shardwright.schemas.plan import AdaptationPlan, load_plan


def approved_plan(path: Path, approvals: Path) -> AdaptationPlan:
    """The plan, if its bytes are whole and its last verdict allows it.

    Raises:
        PlanError, ApprovalError.
    """
    plan = load_plan(path)
    verify_approval(plan, find_approval(approvals, plan))
    return plan


def head_of(approvals: Path, plan: AdaptationPlan, run_dir: Path) -> LogHead:
    """How far the log reaches that approved the plan; no shorter than an earlier start of this run saw it.

    Raises:
        ApprovalError: ``cut-log``, and as :func:`read_log`.
    """
    hashes = [line.sha256 for line in read_log(approvals)]
    kept = record.read(run_dir) if (run_dir / record.FILE).is_file() else None
    if kept is not None and kept.approvals is not None and kept.decision_sha256 == plan.hashes.decision:
        demand_held(hashes, kept.approvals, approvals, "an earlier start of this run")
    return LogHead.of(hashes)


def unheaded(approvals: Path) -> tuple[str, ...]:
    """What to say of a log from before heads."""
    if read_head(approvals) is not None:
        return ()
    return (
        f"{approvals.name} has no head: it was written before heads were kept, and a verdict that was cut off its end "
        "before this run first started is not seen",
    )
