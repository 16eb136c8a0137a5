"""report: write ``report.md`` and ``report.html`` from the plan and the run record."""

from __future__ import annotations

from shardwright.schemas.approval import find_approval
from shardwright.schemas.canonical import sha256_hex
from shardwright.schemas.files import write_atomic
from shardwright.schemas.run import RunRecord
from shardwright.workflows.context import AdaptState, Context, Output

NODE = "report"


def run(context: Context, state: AdaptState) -> Output:
    """The same plan and record give the same bytes, so writing again changes nothing."""
    from shardwright.workflows.report.html import html_report
    from shardwright.workflows.report.markdown import markdown_report

    plan, record = context.plan(state["plan"]), context.store.get(state["record"], RunRecord)
    approval = find_approval(context.approvals, plan)
    text = markdown_report(plan, record, approval).encode()
    write_atomic(context.run_dir / "report.md", text)
    write_atomic(context.run_dir / "report.html", html_report(plan, record, approval).encode())
    return {"report": sha256_hex(text)}
