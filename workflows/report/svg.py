"""Figures as inline SVG. Colours come from the page's CSS variables, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from shardwright.workflows.report.units import share

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 18, 44

Point = tuple[float, float]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that span ``low … high``."""
    if high - low <= max(abs(low), 1e-3) * 1e-9:
        around = max(abs(low), 1e-9) * 0.05
        low, high = low - around, low + around
    raw = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def label(value: float) -> str:
    return f"{value:.6g}"


def loss_curve(train: Sequence[Point], held_out: Sequence[Point]) -> str:
    """Training loss as a line and held-out loss as marked points over optimizer steps.

    Args:
        train: (step, loss) of every step.
        held_out: (step, loss) of every evaluation; step 0 is the base model.
    """
    points = [*train, *held_out]
    if not points:
        return ""
    y_ticks = ticks(min(p[1] for p in points), max(p[1] for p in points))
    x_high = max(max(p[0] for p in points), 1.0)
    x_ticks = [t for t in ticks(0, x_high, 8) if t <= x_high and t == int(t)]
    low, high = y_ticks[0], y_ticks[-1]

    def x(step: float) -> float:
        return LEFT + step / x_high * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [_open(HEIGHT, "Training and held-out loss over optimizer steps")]
    for t in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{label(t)}</text>')
    for t in x_ticks:
        parts.append(
            f'<text class="tick" x="{x(t):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label(t)}</text>'
        )
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">step</text>'
    )
    if train:
        line = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in train)
        parts.append(f'<polyline class="line train" points="{line}"/>')
        parts += [f'<circle class="dot train" cx="{x(s):.1f}" cy="{y(v):.1f}" r="2.5"/>' for s, v in train[:200]]
    if held_out:
        line = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in held_out)
        parts.append(f'<polyline class="line held" points="{line}"/>')
        for step, loss in held_out:
            cx, cy = x(step), y(loss)
            parts.append(f'<rect class="mark held" x="{cx - 5:.1f}" y="{cy - 5:.1f}" width="10" height="10"/>')
            left = step > x_high / 2
            parts.append(
                f'<text class="value" x="{cx + (-10 if left else 10):.1f}" y="{cy + (20 if left else -9):.1f}" '
                f'text-anchor="{"end" if left else "start"}">{loss:.4g}</text>'
            )
    return "".join([*parts, "</svg>"])


Part = tuple[str, float]
Row = tuple[str, Sequence[Part], str]
BAR_LEFT, BAR_RIGHT, BAR_STEP, BAR_HEIGHT = 110, 150, 40, 26
COLOURS = 8
SMALLEST = 0.001
"""Share of a bar below which a part is not drawn by itself."""


def bars(predicted: Row, measured: Row | None, limit: Part | None, title: str) -> str:
    """A stacked bar of predicted parts, a plain one of what was measured, on one scale, with a legend.

    Args:
        predicted: (name, [(part, value)], text at the end of the bar), largest part first.
        measured: the same with one part.
        limit: (name, value) of a line across the bars; left out where it lies far beyond them.
        title: what a screen reader says.
    """
    total = sum(value for _, value in predicted[1])
    seen = sum(value >= SMALLEST * total for _, value in predicted[1])
    drawn = min(max(seen, 1), COLOURS - 1)
    parts, rest = list(predicted[1][:drawn]), predicted[1][drawn:]
    if rest:
        parts.append((f"{len(rest)} more" if len(rest) > 1 else rest[0][0], sum(value for _, value in rest)))
    longest = max(total, sum(value for _, value in measured[1]) if measured else 0.0)
    if longest <= 0:
        return ""
    shown = limit if limit is not None and limit[1] <= 4 * longest else None
    scale = (WIDTH - BAR_LEFT - BAR_RIGHT) / max(longest, shown[1] if shown else 0.0)
    top = 18 if shown else 4
    legend_top = top + BAR_STEP * (2 if measured else 1) + 6
    height = legend_top + 20 * -(-len(parts) // 3)
    out = [_open(height, title), *_bar(predicted[0], parts, predicted[2], top, scale, "c")]
    if measured:
        out += _bar(measured[0], measured[1], measured[2], top + BAR_STEP, scale, "measured")
    if shown:
        x = BAR_LEFT + shown[1] * scale
        out.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 2}" y2="{legend_top - 10}"/>')
        out.append(f'<text class="tick" x="{x:.1f}" y="{top - 6}" text-anchor="middle">{escape(shown[0])}</text>')
    for index, (name, value) in enumerate(parts):
        x, y = BAR_LEFT + (index % 3) * 200, legend_top + 20 * (index // 3)
        words = f"{name.replace('_', ' ')} {share(value / total)}" if total else name
        out.append(f'<rect class="part c{index}" x="{x}" y="{y}" width="11" height="11"/>')
        out.append(f'<text class="tick" x="{x + 17}" y="{y + 10}">{escape(words)}</text>')
    return "".join([*out, "</svg>"])


def _bar(name: str, parts: Sequence[Part], text: str, top: int, scale: float, colour: str) -> list[str]:
    middle, x = top + BAR_HEIGHT // 2 + 5, float(BAR_LEFT)
    out = [f'<text class="tick" x="{BAR_LEFT - 8}" y="{middle}" text-anchor="end">{escape(name)}</text>']
    for index, (part, value) in enumerate(parts):
        width = value * scale
        kind = f"c{index}" if colour == "c" else colour
        box = f'x="{x:.1f}" y="{top}" width="{max(width, 0.5):.1f}" height="{BAR_HEIGHT}"'
        out.append(f'<rect class="part {kind}" {box}><title>{escape(part)}</title></rect>')
        x += width
    out.append(f'<text class="value" x="{x + 8:.1f}" y="{middle}">{escape(text)}</text>')
    return out


def _open(height: int, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title>"
    )
