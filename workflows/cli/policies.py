"""``shardwright policy test``: a policy against saved plans, before it decides anything."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import put, put_json

app = typer.Typer(help="Test a policy against saved plans.", no_args_is_help=True, rich_markup_mode=None)


class Form(StrEnum):
    """Forms of a policy's findings."""

    text = "text"
    json = "json"
    markdown = "markdown"
    junit = "junit"
    sarif = "sarif"


class Expected(StrEnum):
    """What a test of a policy expects of every plan."""

    approve = "approve"
    deny = "deny"


@app.callback()
def policy() -> None:
    """Policies decide about plans where nobody is asked."""


@app.command()
def test(
    policy: Annotated[Path, typer.Argument(metavar="POLICY", help="A policy file.")],
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN", help="Saved plans.")],
    expect: Annotated[
        Expected | None, typer.Option("--expect", help="Exit 0 where every plan ends so, 1 where one does not.")
    ] = None,
    today: Annotated[
        str | None, typer.Option("--today", metavar="DAY", help="Day for waivers, 2026-12-31. [default: today]")
    ] = None,
    output: Annotated[Form, typer.Option("--output", help="Form of the result on stdout.")] = Form.text,
) -> None:
    """Apply every rule to every plan. Exits 0 where all are approved, 3 where one is left to a person, 4 where one is
    denied."""
    from shardwright.schemas.errors import ExitCode
    from shardwright.schemas.plan import load_plan
    from shardwright.workflows.policy import evaluate, load_policy

    rules = load_policy(policy)
    loaded = [(path, load_plan(path)) for path in plans]
    results = [(path, evaluate(plan, rules, today)) for path, plan in loaded]
    if output is Form.json:
        put_json([{"plan": str(path), **result.model_dump(mode="json")} for path, result in results])
    elif output is Form.sarif:
        from shardwright.workflows.report.sarif import sarif

        put(sarif([(str(path), result) for path, result in results], policy_file=str(policy)))
    elif output is Form.junit:
        from shardwright.workflows.report.junit import junit_policies

        put(junit_policies([(str(path), result) for path, result in results]))
    else:
        from shardwright.workflows.report.markdown import render
        from shardwright.workflows.report.policy_content import policy_document
        from shardwright.workflows.review.terminal import document_text

        document = policy_document([(str(path), result) for path, result in results])
        put(render(document) if output is Form.markdown else document_text(document))
    denied = [path for path, result in results if result.violations]
    left = [path for path, result in results if not result.approves]
    if expect is not None:
        wrong = left if expect is Expected.approve else [path for path, result in results if not result.violations]
        raise typer.Exit(int(ExitCode.ERROR if wrong else ExitCode.OK))
    code = ExitCode.POLICY_DENIED if denied else ExitCode.NEEDS_APPROVAL if left else ExitCode.OK
    raise typer.Exit(int(code))
