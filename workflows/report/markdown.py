"""Reports as Markdown."""

from __future__ import annotations

import re

from shardwright.schemas.approval import Approval
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import RunRecord
from shardwright.workflows.report.blocks import Block, Code, Document, Figure, Heading, Table, Text, Tiles
from shardwright.workflows.report.plan_content import plan_report
from shardwright.workflows.report.run_content import run_document


def markdown_report(plan: AdaptationPlan, record: RunRecord, approval: Approval | None = None) -> str:
    """The report of a finished run."""
    return render(run_document(plan, record, approval))


def markdown_plan(plan: AdaptationPlan) -> str:
    """The report of a plan alone; the same plan gives the same bytes."""
    return render(plan_report(plan))


def render(document: Document) -> str:
    parts = [text for block in document if (text := _block(block))]
    return "\n\n".join(parts) + "\n"


def cell(text: str) -> str:
    """Text that cannot break out of a table cell or open an HTML tag; spans of code stay code."""
    return text.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")


def _block(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {cell(block.text)}"
    if isinstance(block, Text):
        return cell(block.text)
    if isinstance(block, Tiles):
        return "\n".join(
            f"- **{cell(t.label)}**: {cell(t.value)}{f' ({cell(t.note)})' if t.note else ''}" for t in block.tiles
        )
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Figure):
        return ""  # its numbers stand in tables
    if isinstance(block, Code):
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block.text)), default=0))
        return f"{fence}{block.language}\n{block.text}\n{fence}"
    raise TypeError(type(block).__name__)


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    rule = ["---:" if i in table.numeric else "---" for i in range(len(table.headers))]
    lines = [
        " | ".join(map(cell, table.headers)),
        " | ".join(rule),
        *(" | ".join(map(cell, row)) for row in table.rows),
    ]
    body = "\n".join(f"| {line} |" for line in lines)
    return f"{cell(table.caption)}:\n\n{body}" if table.caption else body
