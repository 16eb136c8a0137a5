"""The review in a terminal: tables by rich, a few words as commands. Works over SSH."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text as RichText

from shardwright.schemas.errors import ShardwrightError
from shardwright.schemas.plan import AdaptationPlan
from shardwright.workflows.report.blocks import Block, Code, Document, Figure, Heading, Table, Text, Tiles
from shardwright.workflows.report.columns import line_up, widths
from shardwright.workflows.report.plan_content import alternatives_section, cost_section, fusion_section, plan_summary
from shardwright.workflows.report.plan_verdict import signed_section
from shardwright.workflows.review.session import ReviewSession

HELP = (
    "approve [REASON] · reject PROPOSAL REASON · edit AXIS=VALUE REASON · answer QUESTION=CHOICE REASON · "
    "explain SUBJECT · show · reject-plan REASON · quit"
)


def plan_text(plan: AdaptationPlan, width: int | None = None) -> str:
    """The plan with its evidence as plain text for a terminal."""
    return document_text(
        (
            *plan_summary(plan),
            *signed_section(plan),
            *fusion_section(plan),
            *cost_section(plan),
            *alternatives_section(plan),
        ),
        width,
    )


def document_text(document: Document, width: int | None = None, *, folded: bool = False) -> str:
    """Render blocks as text; folded tables only where asked for, as `shardwright explain` does."""
    buffer = io.StringIO()
    columns = width or _columns()
    console = Console(file=buffer, width=columns, no_color=True, highlight=False, markup=False)
    for block in document:
        _print(console, block, folded)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).strip("\n") + "\n"


def _columns() -> int:
    """The terminal's width, wide enough that a hash stays on one line; always the same off a terminal."""
    return max(84, min(shutil.get_terminal_size().columns, 160)) if sys.stdout.isatty() else 120


def _print(console: Console, block: Block, folded: bool) -> None:
    if isinstance(block, Heading):
        console.print(f"\n{block.text.upper() if block.level <= 2 else block.text}")
    elif isinstance(block, Text):
        console.print(block.text.replace("`", ""))
    elif isinstance(block, Tiles):
        _print_table(console, Table(("", "", ""), tuple((tile.label, tile.value, tile.note) for tile in block.tiles)))
    elif isinstance(block, Table) and block.rows and (folded or not block.folded):
        _print_table(console, block)
    elif isinstance(block, Code):
        console.print(block.text)
    elif isinstance(block, Figure):
        console.print(block.caption)


def _print_table(console: Console, block: Table) -> None:
    if block.caption:
        console.print(f"\n{block.caption}")
    if block.prose is not None:
        _print_prose_table(console, block, block.prose)
        return
    table = RichTable(show_header=any(block.headers), box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, header in enumerate(block.headers):
        table.add_column(header, justify="right" if index in block.numeric else "left", overflow="fold")
    for row in block.rows:
        table.add_row(*(RichText(cell.replace("`", "")) for cell in row))
    console.print(table)


def _print_prose_table(console: Console, block: Table, prose: int) -> None:
    kept = [i for i in range(len(block.headers)) if i != prose]
    rows = [[row[i].replace("`", "") for i in kept] for row in (block.headers, *block.rows)]
    sizes = widths(rows, console.width)
    right = [place for place, i in enumerate(kept) if i in block.numeric]
    for cells, said in zip(rows, ("", *(row[prose] for row in block.rows)), strict=True):
        console.print(line_up(cells, sizes, right), soft_wrap=True)
        if said:
            console.print(Padding(said.replace("`", ""), (0, 0, 0, 4)))


def review_in_terminal(plan_file: Path) -> None:
    """A reviewer for the workflow: show the plan and ask until it is decided or left."""
    ask_until_decided(ReviewSession.open(plan_file))


def ask_until_decided(
    session: ReviewSession, ask: Callable[[str], str] = input, say: Callable[[str], None] | None = None
) -> None:
    """Read commands until the plan is approved or rejected, or the reviewer leaves.

    Args:
        ask: reads one line after a prompt; ``EOFError`` means leave.
        say: shows text; standard output by default.
    """
    show = say or Console(highlight=False, markup=False).print
    show(plan_text(session.plan))
    show(HELP)
    while True:
        try:
            words = ask("review> ").split(maxsplit=2)
        except EOFError:
            return
        if not words:
            continue
        if words[0] in ("quit", "q"):
            return
        try:
            if _obey(session, words, show):
                return
        except ShardwrightError as error:
            show(error.text())


NEED_REASON = {"reject": "PROPOSAL", "edit": "AXIS=VALUE", "answer": "QUESTION=CHOICE"}


def _obey(session: ReviewSession, words: list[str], show: Callable[[str], None]) -> bool:
    verb, rest = words[0], words[1:]
    if verb in NEED_REASON and len(rest) < 2:
        show(f"why? write the reason in the same line: {verb} {NEED_REASON[verb]} REASON")
        return False
    if verb == "approve":
        session.approve(" ".join(rest))
        show(session.status()[0])
        return True
    if verb == "reject-plan":
        session.reject_plan(" ".join(rest))
        show(session.status()[0])
        return True
    if verb == "show":
        show(plan_text(session.plan))
    elif verb == "reject":
        show(session.reject(*rest))
    elif verb == "edit" and "=" in rest[0]:
        values = dict(item.split("=", 1) for item in rest[0].split(",") if "=" in item)
        show(session.edit(values, rest[1]))
    elif verb == "answer" and "=" in rest[0]:
        question, _, choice = rest[0].partition("=")
        show(session.answer(question, choice, rest[1]))
    elif verb == "explain" and rest:
        from shardwright.workflows.explaining import explanation

        show(document_text(explanation(session.plan, rest[0]), folded=True))
    else:
        show(HELP)
    return False
