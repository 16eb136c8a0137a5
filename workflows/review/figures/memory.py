"""Memory of the fullest rank as a waterfall: each term on top of the ones before, up to the budget line."""

from __future__ import annotations

from html import escape
from typing import get_args

from shardwright.schemas.cost import MemoryReport, Moment
from shardwright.workflows.report.units import size

WIDTH, LEFT, RIGHT, ROW, BAR = 760, 190, 96, 26, 16
ORDER = get_args(Moment)
"""Moments as a step passes them."""
OTHER = 12
"""Terms drawn each by itself; the rest stand as one row."""


def waterfall(memory: MemoryReport) -> str:
    """Terms alive at the peak moment, largest first, then slack and communicators; a dashed line is the budget."""
    alive = sorted((c for c in memory.components if memory.peak_moment in c.moments), key=lambda c: (-c.bytes, c.name))
    rows = [(c.name.replace("_", " "), c.bytes, c.origin) for c in alive[:OTHER]]
    if rest := alive[OTHER:]:
        rows.append((f"{len(rest)} smaller terms", sum(c.bytes for c in rest), "modelled"))
    slack = memory.reserved_bytes - sum(value for _, value, _ in rows)
    if slack > 0:
        rows.append(("slack and communicators", slack, "modelled"))
    top = 30
    height = top + ROW * (len(rows) + 1) + 8
    scale = (WIDTH - LEFT - RIGHT) / max(memory.reserved_bytes, memory.budget_bytes)
    parts = [
        f'<svg class="waterfall" viewBox="0 0 {WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(sentence(memory))}</title>"
    ]
    limit = LEFT + memory.budget_bytes * scale
    parts.append(f'<line class="budget" x1="{limit:.1f}" x2="{limit:.1f}" y1="{top - 8}" y2="{height - 6}"/>')
    x = float(LEFT)
    for index, (name, count, origin) in enumerate(rows):
        y, width = top + index * ROW, count * scale
        middle = y + BAR - 3
        parts.append(f'<text class="label" x="{LEFT - 10}" y="{middle}">{escape(name)}</text>')
        if index:
            parts.append(f'<line class="join" x1="{x:.1f}" x2="{x:.1f}" y1="{y - ROW + BAR}" y2="{y + BAR}"/>')
        parts.append(
            f'<rect class="term {escape(origin)}" x="{x:.1f}" y="{y}" width="{max(width, 1.5):.1f}" height="{BAR}"/>'
        )
        x += width
        parts.append(f'<text class="value" x="{min(x, WIDTH - RIGHT) + 6:.1f}" y="{middle}">{size(count)}</text>')
    y = top + len(rows) * ROW
    kind = "over" if not memory.fits else "sum"
    parts.append(f'<text class="label strong" x="{LEFT - 10}" y="{y + BAR - 3}">reserved</text>')
    full = memory.reserved_bytes * scale
    parts.append(f'<rect class="term {kind}" x="{LEFT}" y="{y}" width="{max(full, 1.5):.1f}" height="{BAR}"/>')
    words = f"{size(memory.reserved_bytes)} · {memory.fraction:.1%}"
    inside = LEFT + full > WIDTH - RIGHT - 60
    place = f'x="{LEFT + full - 6:.1f}" text-anchor="end"' if inside else f'x="{LEFT + full + 6:.1f}"'
    parts.append(f'<text class="value strong{" on" if inside else ""}" {place} y="{y + BAR - 3}">{words}</text>')
    parts.append(
        f'<text class="tick" x="{limit:.1f}" y="{top - 13}" text-anchor="end">budget {size(memory.budget_bytes)}</text>'
    )
    return "".join([*parts, "</svg>"])


def sentence(memory: MemoryReport) -> str:
    """What the picture says, for a reader who cannot see it."""
    words = "fits" if memory.fits else "does not fit"
    return (
        f"Memory of the fullest rank at {memory.peak_moment.replace('_', ' ')}: {size(memory.reserved_bytes)} reserved "
        f"of {size(memory.budget_bytes)}, {memory.fraction:.1%}; it {words}"
    )


def moments(memory: MemoryReport) -> str:
    """Allocated bytes at each moment of a step, as small columns."""
    names = [(name, memory.by_moment[name]) for name in ORDER if name in memory.by_moment]
    if not names:
        return ""
    top = max(count for _, count in names) or 1
    parts = [
        '<svg class="moments" viewBox="0 0 760 108" role="img" xmlns="http://www.w3.org/2000/svg">'
        "<title>Allocated memory at each moment of a step</title>"
    ]
    step = (WIDTH - 20) / len(names)
    for index, (name, count) in enumerate(names):
        x, height = 10 + index * step, 52 * count / top
        kind = "sum" if name == memory.peak_moment else "plain"
        words = name.replace("_", " ") + (" · highest" if name == memory.peak_moment else "")
        middle = f'x="{x + step / 2:.1f}" text-anchor="middle"'
        parts.append(
            f'<rect class="term {kind}" x="{x + step * 0.12:.1f}" y="{70 - height:.1f}" width="{step * 0.76:.1f}" '
            f'height="{height:.1f}"/>'
            f'<text class="value" {middle} y="{64 - height:.1f}">{size(count)}</text>'
            f'<text class="tick" {middle} y="88">{words}</text>'
        )
    return "".join([*parts, "</svg>"])
