"""``shardwright review``: read a plan in the browser or the terminal; approve, reject or edit it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.workflows.cli.common import PlanArgument, note, put

if TYPE_CHECKING:
    from shardwright.schemas.policy import Policy
    from shardwright.workflows.review.session import ReviewSession


def register(app: typer.Typer) -> None:
    app.command()(review)


def review(
    plan: PlanArgument,
    cli: Annotated[bool, typer.Option("--cli", help="In the terminal, for example over SSH.")] = False,
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
    answer: Annotated[
        list[str] | None,
        typer.Option("--answer", metavar="QUESTION=CHOICE", help="Answer an open question; needs --reason."),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept in the plan or the approvals log.")] = "",
    actor: Annotated[str | None, typer.Option("--actor", help="Who decides. [default: your user name]")] = None,
    approvals: Annotated[
        Path | None, typer.Option("--approvals", help="Approvals log. [default: approvals.jsonl beside the plan]")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", help="Policy to show and to apply to every edit; it does not decide here."),
    ] = None,
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, show_default=False, help="Port of the page. [default: a free one]"),
    ] = 0,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page even off a terminal, and open no browser.")
    ] = False,
) -> None:
    """Show a plan with its evidence; approve it, turn down fusions, or edit an axis.

    On a terminal it opens a page of this machine in the browser until Ctrl-C, or asks in the terminal with --cli.
    With an action, or off a terminal, it does that, prints the plan, and exits 0 if approved, 3 if not.
    """
    import sys

    from shardwright.schemas.errors import UsageError
    from shardwright.workflows.policy import load_policy
    from shardwright.workflows.review.session import ReviewSession
    from shardwright.workflows.review.terminal import ask_until_decided, plan_text

    if approve and reject_plan:
        raise UsageError(
            "contradiction", "--approve and --reject-plan", where="options", next_action="give one of them"
        )
    rules = load_policy(policy) if policy is not None else None
    session = ReviewSession.open(plan, actor=actor, log=approvals)
    values = _pairs("--edit", "bad-edit", "AXIS=VALUE", "write mesh.ep=2", edit)
    answers = _pairs("--answer", "bad-answer", "QUESTION=CHOICE", "write the question's id, =, and a choice", answer)
    acted = bool(values or answers or reject or approve or reject_plan)
    for question, choice in answers.items():
        note(session.answer(question, choice, reason))
    for proposal in reject or ():
        note(session.reject(proposal, reason))
    if values:
        note(session.edit(values, reason))
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not acted and (serve or (terminal and not cli)):
        _serve(session, rules, policy, port, browser=not serve)
    elif not acted and terminal:
        ask_until_decided(session)
    elif not acted:
        put(plan_text(session.plan))
        if rules is not None:
            put(_findings(session, rules, str(policy)))
    if approve:
        session.approve(reason)
    if reject_plan:
        session.reject_plan(reason)
    status, code = session.status()
    put(status)
    raise typer.Exit(int(code))


def _pairs(option: str, code: str, form: str, advice: str, items: list[str] | None) -> dict[str, str]:
    """``NAME=VALUE`` words of an option.

    Raises:
        UsageError: one of them has another form.
    """
    from shardwright.schemas.errors import UsageError

    found = {}
    for item in items or ():
        name, separator, value = item.partition("=")
        if not separator:
            raise UsageError(code, f"{item!r} is not {form}", where=option, next_action=advice)
        found[name] = value
    return found


def _findings(session: ReviewSession, rules: Policy, name: str) -> str:
    """The policy, rule by rule, on the plan as it stands."""
    from shardwright.workflows.policy import evaluate
    from shardwright.workflows.report.policy_content import policy_document
    from shardwright.workflows.review.terminal import document_text

    return document_text(policy_document([(name, evaluate(session.plan, rules))]))


def _serve(session: ReviewSession, rules: Policy | None, policy: Path | None, port: int, *, browser: bool) -> None:
    """Serve the page until it is interrupted; the session then knows what was decided."""
    import importlib.util
    import webbrowser

    from shardwright.schemas.errors import UsageError

    if missing := [name for name in ("fastapi", "uvicorn", "jinja2") if importlib.util.find_spec(name) is None]:
        raise UsageError(
            "no-page",
            f"the review page needs {', '.join(missing)}",
            where="shardwright review",
            next_action="pip install 'shardwright[review]', or review in the terminal with --cli",
        )
    from shardwright.workflows.review.serve import serve

    def announce(address: str) -> None:
        note(f"review page, opens once: {address}")
        note("Ctrl-C ends it; what was decided is kept")
        if browser:
            webbrowser.open(address)

    serve(session, policy=rules, policy_name=policy.name if policy is not None else "", port=port, announce=announce)
