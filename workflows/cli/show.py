"""``shardwright show|explain|diff``: plans and runs as text, Markdown or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import (
    PlainOutput,
    PlainOutputOption,
    PlanArgument,
    Words,
    facts,
    put,
    put_json,
)


def register(app: typer.Typer) -> None:
    for command in (show, explain, diff):
        app.command()(command)


def show(
    target: Annotated[
        Path | None, typer.Argument(metavar="PLAN|RUN_DIR", help="A plan file or a run's folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output json.")] = False,
    schema: Annotated[
        str | None, typer.Option("--schema", help="Print the JSON Schema of this thing, e.g. Recipe.")
    ] = None,
    output: PlainOutputOption = PlainOutput.text,
) -> None:
    """Print a plan or a run record, or a JSON Schema."""
    from shardwright.schemas.errors import UsageError
    from shardwright.workflows.review.terminal import plan_text

    if schema is not None:
        put(_schema(schema))
        return
    if target is None:
        raise UsageError(
            "no-target", "nothing to show", where="PLAN|RUN_DIR", next_action="name a plan file or a run folder"
        )
    form = PlainOutput.json if as_json else output
    if target.is_dir():
        _show_run(target, form)
        return
    from shardwright.schemas.plan import load_plan

    plan = load_plan(target)
    if form is PlainOutput.json:
        put(plan.to_bytes().decode())
    elif form is PlainOutput.markdown:
        from shardwright.workflows.report.markdown import markdown_plan

        put(markdown_plan(plan))
    else:
        put(plan_text(plan))


def _show_run(run_dir: Path, form: PlainOutput) -> None:
    from shardwright.schemas.errors import RunError
    from shardwright.schemas.plan import load_plan
    from shardwright.workflows.approvals import latest_verdict
    from shardwright.workflows.cli.finish import result_text
    from shardwright.workflows.report.markdown import markdown_report
    from shardwright.workflows.runs import load_record

    record = load_record(run_dir)
    if record is None:
        raise RunError(
            "no-record", "nothing was trained here yet", where=str(run_dir), next_action="see `shardwright status`"
        )
    if form is PlainOutput.json:
        put_json(record.model_dump(mode="json"))
    elif form is PlainOutput.markdown:
        plan = load_plan(run_dir / "plan.json")
        put(markdown_report(plan, record, latest_verdict(run_dir / "approvals.jsonl", plan)))
    else:
        put(result_text(run_dir, record))


def _schema(name: str) -> str:
    from shardwright.schemas.base import snake
    from shardwright.schemas.errors import UsageError
    from shardwright.schemas.registry import SHIPPED, schema_path

    for model in SHIPPED:
        if name in (model.__name__, snake(model.__name__)):
            return schema_path(model).read_text(encoding="utf-8")
    known = ", ".join(model.__name__ for model in SHIPPED)
    raise UsageError("unknown-schema", f"no schema {name!r}", where="--schema", next_action=f"name one of: {known}")


def explain(
    plan: PlanArgument,
    subject: Annotated[
        str | None, typer.Argument(metavar="SUBJECT", help="A proposal's id, fusions, memory, time, or strategy.")
    ] = None,
    output: Annotated[Words, typer.Option("--output", help="Form of the result on stdout.")] = Words.text,
) -> None:
    """Say why the plan is what it is: the whole of it, or one subject."""
    from shardwright.schemas.plan import load_plan
    from shardwright.workflows.explaining import explanation
    from shardwright.workflows.report.markdown import render
    from shardwright.workflows.review.terminal import document_text

    document = explanation(load_plan(plan), subject)
    put(render(document) if output is Words.markdown else document_text(document, folded=True))


def diff(
    left: Annotated[Path, typer.Argument(metavar="A", help="A plan file.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Another plan file.")],
    output: PlainOutputOption = PlainOutput.text,
) -> None:
    """Compare two plans field by field; the decision (what workers do) stands before the evidence."""
    from shardwright.schemas.plan import load_plan
    from shardwright.workflows.compare import differences

    found = differences(load_plan(left), load_plan(right))
    if output is PlainOutput.json:
        put_json([item.model_dump() for item in found])
    elif output is PlainOutput.markdown:
        from shardwright.workflows.report.blocks import Table, Text
        from shardwright.workflows.report.markdown import render

        rows = tuple((item.section, f"`{item.field}`", item.left, item.right) for item in found)
        put(render((Table(("section", "field", str(left), str(right)), rows) if rows else Text("No difference."),)))
    else:
        put(facts([(f"{i.section}.{i.field}", f"{i.left} → {i.right}") for i in found]) or "no difference")
