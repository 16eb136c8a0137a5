"""One optimizer step as a bar: terms in a row, hatched where the time is communication, dotted where it is launch."""

from __future__ import annotations

from html import escape

from shardwright.schemas.cost import TimeReport
from shardwright.workflows.report.units import duration

WIDTH, BAR, ROW = 760, 34, 24
KINDS = ("compute", "exposed_communication", "launch", "optimizer")


def step_bar(time: TimeReport) -> str:
    """The terms that make the step, grouped by kind, with labels where they fit."""
    shown = sorted(
        (c for c in time.components if c.kind != "hidden_communication" and c.milliseconds > 0),
        key=lambda c: (KINDS.index(c.kind), -c.milliseconds, c.name),
    )
    total = sum(c.milliseconds for c in shown)
    if total <= 0:
        return ""
    hidden = sum(c.milliseconds for c in time.components if c.kind == "hidden_communication")
    entries = [(kind, value) for kind in KINDS if (value := sum(c.milliseconds for c in shown if c.kind == kind))]
    if hidden:
        entries.append(("hidden_communication", hidden))
    height = 52 + ROW * -(-len(entries) // 2)
    parts = [
        f'<svg class="timebar" viewBox="0 0 {WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>One step of {duration(time.step_ms)}, bound by {escape(time.bound_by)}</title>{_PATTERNS}"
    ]
    x = 0.0
    for part in shown:
        width = part.milliseconds / total * WIDTH
        words = f"{part.name.replace('_', ' ')} {duration(part.milliseconds)}"
        parts.append(
            f'<rect class="{part.kind}" x="{x:.1f}" y="4" width="{max(width - 1, 0.6):.1f}" height="{BAR}"/>'
            f'<rect class="fill-{part.kind}" x="{x:.1f}" y="4" width="{max(width - 1, 0.6):.1f}" height="{BAR}">'
            f"<title>{escape(words)}</title></rect>"
        )
        if width > 7 * len(part.name) + 8:
            name = escape(part.name.replace("_", " "))
            parts.append(f'<text class="on" x="{x + width / 2:.1f}" y="{4 + BAR / 2 + 4}">{name}</text>')
        x += width
    for index, (kind, value) in enumerate(entries):
        left, top = index % 2 * 380, 52 + index // 2 * ROW
        share = f", {value / total:.0%}" if kind != "hidden_communication" else ", beside the step"
        words = f"{kind.replace('_', ' ')} {duration(value)}{share}"
        parts.append(
            f'<rect class="{kind}" x="{left}" y="{top}" width="14" height="14"/>'
            f'<rect class="fill-{kind}" x="{left}" y="{top}" width="14" height="14"/>'
            f'<text class="tick" x="{left + 21}" y="{top + 11}">{words}</text>'
        )
    return "".join([*parts, "</svg>"])


_PATTERNS = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="stroke" x1="0" y1="0" x2="0" y2="6"/></pattern>'
    '<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse"><circle class="dot" cx="3" cy="3" r="1.2"/>'
    "</pattern></defs>"
)
