"""``shardwright review``: read a plan in the terminal; approve, reject or edit it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import PlanArgument, note, put


def register(app: typer.Typer) -> None:
    app.command()(review)


def review(
    plan: PlanArgument,
    cli: Annotated[bool, typer.Option("--cli", help="In the terminal (what there is without a browser).")] = False,
    approve: Annotated[bool, typer.Option("--approve", help="Approve the plan and every fusion in it.")] = False,
    reject_plan: Annotated[bool, typer.Option("--reject-plan", help="Reject the whole plan; needs --reason.")] = False,
    reject: Annotated[
        list[str] | None,
        typer.Option("--reject", metavar="PROPOSAL", help="Turn down one fusion: makes a child plan; needs --reason."),
    ] = None,
    edit: Annotated[
        list[str] | None,
        typer.Option("--edit", metavar="AXIS=VALUE", help="Change an axis: makes a child plan; needs --reason."),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept in the plan or the approvals log.")] = "",
    actor: Annotated[str | None, typer.Option("--actor", help="Who decides. [default: your user name]")] = None,
    approvals: Annotated[
        Path | None, typer.Option("--approvals", help="Approvals log. [default: approvals.jsonl beside the plan]")
    ] = None,
) -> None:
    """Show a plan with its evidence; approve it, turn down fusions, or edit an axis.

    Without an action it asks on a terminal; elsewhere it prints the plan and exits 0 if approved, 3 if not.
    """
    import sys

    from shardwright.schemas.errors import UsageError
    from shardwright.workflows.review.session import ReviewSession
    from shardwright.workflows.review.terminal import ask_until_decided, plan_text

    if approve and reject_plan:
        raise UsageError(
            "contradiction", "--approve and --reject-plan", where="options", next_action="give one of them"
        )
    session = ReviewSession.open(plan, actor=actor, log=approvals)
    values = {}
    for item in edit or ():
        axis, separator, value = item.partition("=")
        if not separator:
            raise UsageError("bad-edit", f"{item!r} is not AXIS=VALUE", where="--edit", next_action="write mesh.ep=2")
        values[axis] = value
    acted = bool(values or reject or approve or reject_plan)
    for proposal in reject or ():
        note(session.reject(proposal, reason))
    if values:
        note(session.edit(values, reason))
    if not acted and sys.stdin.isatty() and sys.stdout.isatty():
        ask_until_decided(session)
    elif not acted:
        put(plan_text(session.plan))
    if approve:
        session.approve(reason)
    if reject_plan:
        session.reject_plan(reason)
    status, code = session.status()
    put(status)
    raise typer.Exit(int(code))
