"""Reports as one self-contained HTML file: no script, no outside request, light and dark, prints well."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from shardwright.schemas.approval import Approval
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import RunRecord
from shardwright.workflows.report.blocks import Block, Code, Document, Figure, Heading, Table, Text, Tiles
from shardwright.workflows.report.plan_content import plan_report
from shardwright.workflows.report.run_content import run_document

STYLE = Path(__file__).with_name("report.css")
_BREAK = re.compile(r"(?<=[:_+])(?=\w)")
"""Where a long name in a narrow column may go on in the next line."""
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Where a class's name in the title may."""


def html_report(plan: AdaptationPlan, record: RunRecord, approval: Approval | None = None) -> str:
    """The report of a finished run."""
    return page(run_document(plan, record, approval))


def html_plan(plan: AdaptationPlan) -> str:
    """The report of a plan alone."""
    return page(plan_report(plan))


def page(document: Document) -> str:
    """A whole HTML page."""
    title = next((block.text for block in document if isinstance(block, Heading)), "Shardwright")
    body = "\n".join(text for block in document if (text := _block(block)))
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def inline(text: str) -> str:
    """Escaped text; spans between backticks become code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _block(block: Block) -> str:
    if isinstance(block, Heading):
        text = inline(block.text)
        return f"<h{block.level}>{_CAMEL.sub('<wbr>', text) if block.level == 1 else text}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{inline(block.text)}</p>"
    if isinstance(block, Tiles):
        return f'<dl class="tiles">{"".join(_tile(t.label, t.value, t.note, t.tone) for t in block.tiles)}</dl>'
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Figure):
        return f"<figure>{block.svg}<figcaption>{inline(block.caption)}</figcaption></figure>" if block.svg else ""
    if isinstance(block, Code):
        return f"<pre><code>{escape(block.text)}</code></pre>"
    raise TypeError(type(block).__name__)


def _tile(label: str, value: str, note: str, tone: str) -> str:
    mark = f' class="{escape(tone)}"' if tone else ""
    extra = f"<small>{inline(note)}</small>" if note else ""
    return f"<div{mark}><dt>{inline(label)}</dt><dd>{inline(value)}{extra}</dd></div>"


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    facts = not any(table.headers)
    columns = [
        f'<th scope="col"{_align(table, i)}>{inline(text)}</th>'
        for i, text in enumerate(table.headers)
        if i != table.prose
    ]
    head = "" if facts else f"<thead><tr>{''.join(columns)}</tr></thead>"
    rows = "".join(_row(table, row, facts) for row in table.rows)
    narrow = len(table.numeric) == len(table.headers) <= 3
    kind = ' class="facts"' if facts else ' class="narrow"' if narrow else ""
    label = escape(table.caption or ", ".join(filter(None, table.headers)) or "facts")
    body = f"<table{kind}>{head}<tbody>{rows}</tbody></table>"
    if not facts:  # may be wider than the page: the keyboard must reach what scrolls
        body = f'<div class="wide" tabindex="0" role="group" aria-label="{label}">{body}</div>'
    if table.folded or table.closed:
        return f"<details><summary>{inline(table.caption)} ({len(table.rows)})</summary>{body}</details>"
    return f"<h3>{inline(table.caption)}</h3>{body}" if table.caption else body


def _row(table: Table, row: tuple[str, ...], facts: bool) -> str:
    cells = []
    for index, text in enumerate(row):
        if facts and index == 0:
            cells.append(f'<th scope="row">{inline(text)}</th>')
        elif index != table.prose:
            shown = inline(text) if facts else _BREAK.sub("<wbr>", inline(text))
            cells.append(f"<td{_align(table, index)}>{shown}</td>")
    if table.prose is None:
        return f"<tr>{''.join(cells)}</tr>"
    note = f'<tr class="prose"><td colspan="{len(cells)}"><div>{inline(row[table.prose])}</div></td></tr>'
    return f'<tr class="above">{"".join(cells)}</tr>{note}'


def _align(table: Table, index: int) -> str:
    return ' class="number"' if index in table.numeric else ""
