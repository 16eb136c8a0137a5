"""Step time over memory of the plan and its rivals; the front is a line, every point can be followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shardwright.workflows.report.svg import ticks
from shardwright.workflows.report.units import duration, size

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 320, 84, 24, 20, 50


@dataclass(frozen=True)
class Point:
    """One strategy."""

    number: str
    """Its row in the table; the chosen one is ``0``."""
    step_ms: float
    reserved_bytes: int
    text: str
    pareto: bool
    feasible: bool
    chosen: bool = False
    href: str = ""


def pareto_front(points: Sequence[Point], budget_bytes: int) -> str:
    """The picture; points are links where they have an address."""
    if not points:
        return ""
    gib = 2.0**30 if max(p.reserved_bytes for p in points) >= 2**30 else 2.0**20
    unit = "GiB" if gib == 2.0**30 else "MiB"
    xs, ys = [p.reserved_bytes / gib for p in points], [p.step_ms for p in points]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))

    def x(value: float) -> float:
        return LEFT + (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg class="front" viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-label="Step time over memory of '
        f'{len(points)} strategies" xmlns="http://www.w3.org/2000/svg">'
    ]
    for t in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{duration(t)}</text>')
    for t in x_ticks:
        words = f"{t:.6g} {unit}"
        parts.append(
            f'<text class="tick" x="{x(t):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{words}</text>'
        )
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">memory a rank →</text>')
    parts.append(f'<text class="tick" x="{LEFT}" y="12">↑ step time</text>')
    if x_ticks[0] <= budget_bytes / gib <= x_ticks[-1]:
        at = x(budget_bytes / gib)
        parts.append(f'<line class="budget" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    line = sorted((p for p in points if p.pareto and p.feasible), key=lambda p: p.reserved_bytes)
    if len(line) > 1:
        path = " ".join(f"{x(p.reserved_bytes / gib):.1f},{y(p.step_ms):.1f}" for p in line)
        parts.append(f'<polyline class="frontline" points="{path}"/>')
    for point in sorted(points, key=lambda p: p.chosen):
        parts.append(_mark(point, x(point.reserved_bytes / gib), y(point.step_ms)))
    return "".join([*parts, "</svg>"])


def _mark(point: Point, x: float, y: float) -> str:
    words = f"{point.number}: {point.text}, {duration(point.step_ms)}, {size(point.reserved_bytes)}"
    if point.chosen:
        shape = f'<path class="chosen" d="M{x:.1f} {y - 11:.1f}l11 11l-11 11l-11 -11z"/>'
        words = f"chosen {words}"
    elif not point.feasible:
        shape = f'<path class="misfit" d="M{x - 7:.1f} {y - 7:.1f}l14 14m0 -14l-14 14"/>'
        words = f"{words}, does not fit"
    elif point.pareto:
        shape = f'<circle class="efficient" cx="{x:.1f}" cy="{y:.1f}" r="10"/>'
    else:
        shape = f'<rect class="beaten" x="{x - 8:.1f}" y="{y - 8:.1f}" width="16" height="16" rx="2"/>'
    label = "" if point.chosen else f'<text class="number" x="{x:.1f}" y="{y + 4:.1f}">{escape(point.number)}</text>'
    inner = f"<title>{escape(words)}</title>{shape}{label}"
    if not point.href:
        return f"<g>{inner}</g>"
    address = escape(point.href)
    return (
        f'<a href="{address}" hx-get="{address}" hx-target="#edit" hx-swap="outerHTML" '
        f'aria-label="{escape(words)}">{inner}</a>'
    )
