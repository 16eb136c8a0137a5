"""Render ``benchmarks/results/*.jsonl`` as ``docs/performance.md``: ``python benchmarks/render.py [--check]``.

Deterministic: the same lines give the same bytes. Of several lines for one bench, case, passes and device
the latest date stands (within a date, the later line of the later file name).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from shardwright.schemas.bench import BenchLine
from shardwright.schemas.files import write_atomic

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"

HEAD = """# Performance

Written by `python benchmarks/render.py` from `benchmarks/results/`; do not edit.

Ours and the rival are measured in one process, medians after warm-up. The ratio is more-is-better: rival ÷
ours for times. The floor is the time that the fewest possible bytes or operations need on that device. A
ratio below 1 is a loss and is shown as one.
"""


def read_lines(folder: Path) -> list[BenchLine]:
    """All result lines, files in name order.

    Raises:
        pydantic.ValidationError: a line outside the schema.
    """
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        found += [BenchLine.model_validate_json(text) for text in path.read_text().splitlines() if text.strip()]
    return found


def latest(lines: Iterable[BenchLine]) -> list[BenchLine]:
    """One line for each bench, case, passes and device, sorted."""
    chosen: dict[tuple[str, str, str, str], BenchLine] = {}
    for line in lines:
        key = (line.bench, line.device, line.case, line.passes)
        if key not in chosen or line.date >= chosen[key].date:
            chosen[key] = line
    return [chosen[key] for key in sorted(chosen)]


def number(value: float | None) -> str:
    """Four significant digits, no exponent; a dash for nothing."""
    if value is None:
        return "–"
    text = f"{value:.4g}"
    return f"{float(text):.0f}" if "e" in text and abs(value) >= 1 else text


def memory(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**20:.0f} MiB"


def over_floor(line: BenchLine) -> str:
    return f"{line.ours / line.floor:.2f}×" if line.ours and line.floor else "–"


def table(lines: Sequence[BenchLine]) -> list[str]:
    rows = [
        "| Case | Passes | Ours | Rival | Rival's | Ratio | Floor | Ours ÷ floor | Peak memory | Date |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        ratio = "–" if line.ratio is None else f"{line.ratio:.2f}"
        ours, rival = (f"{number(v)} {line.unit}" if v is not None else "–" for v in (line.ours, line.rival_value))
        rows.append(
            f"| {line.case} | {line.passes or '–'} | {ours} | {line.rival or '–'} | {rival} | {ratio} | "
            f"{number(line.floor)} | {over_floor(line)} | {memory(line.peak_bytes)} | {line.date} |"
        )
    return rows


def metrics(lines: Sequence[BenchLine]) -> list[str]:
    """Further numbers of each line, in one list."""
    rows = []
    for line in lines:
        if line.metrics:
            text = ", ".join(f"{name} {number(value)}" for name, value in sorted(line.metrics.items()))
            rows.append(f"- {line.case} {line.passes}: {text}".replace("  ", " "))
    return rows


def sources(lines: Sequence[BenchLine]) -> list[str]:
    """Versions and revisions behind a table, each once."""
    seen = {
        f"- {', '.join(f'{name} {value}' for name, value in sorted(line.versions.items()))}; revision {line.commit}"
        for line in lines
    }
    return sorted(seen)


def render(lines: Iterable[BenchLine]) -> str:
    """The whole page."""
    chosen = latest(lines)
    parts = [HEAD]
    for bench, device in sorted({(line.bench, line.device) for line in chosen}):
        members = [line for line in chosen if (line.bench, line.device) == (bench, device)]
        parts.append("\n".join([f"## {bench} on {device}", "", *table(members), ""]))
        if further := metrics(members):
            parts.append("\n".join(["Further numbers:", "", *further, ""]))
        parts.append("\n".join(["Measured with:", "", *sources(members), ""]))
    if not chosen:
        parts.append("No results yet.\n")
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    page = render(read_lines(RESULTS)).encode()
    if "--check" in arguments:
        current = PAGE.exists() and PAGE.read_bytes() == page
        if not current:
            sys.stderr.write(f"{PAGE.relative_to(ROOT)} is not current: run python benchmarks/render.py\n")
        return 0 if current else 1
    write_atomic(PAGE, page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
