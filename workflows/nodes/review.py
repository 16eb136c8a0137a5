"""review: the pause. The approvals log decides; langgraph's resume value only wakes this node up."""

from __future__ import annotations

from langgraph.types import interrupt

from shardwright.schemas.approval import find_approval, verify_approval
from shardwright.workflows.approvals import plan_under_review
from shardwright.workflows.context import AdaptState, Context, Output

NODE = "review"


def run(context: Context, state: AdaptState) -> Output:
    """Wait until the plan in the run folder, or a child of it, is approved.

    Raises:
        ApprovalError: woken up without a valid approval.
        PlanError: the plan file was edited by hand.
    """
    interrupt({"plan": state["plan"]})
    plan = plan_under_review(context, context.plan(state["plan"]))
    approval = find_approval(context.approvals, plan)
    verify_approval(plan, approval)
    return {"plan": context.keep_plan(plan), "approval": approval.sha256}
