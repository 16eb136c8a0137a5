"""Numbers as a reader wants them; always with a unit."""

from __future__ import annotations


def size(count: int | None) -> str:
    """Bytes in binary units, three significant digits."""
    if count is None:
        return "not measured"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{count} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    raise AssertionError(count)


def duration(milliseconds: float | None) -> str:
    """Milliseconds, or seconds and minutes where long."""
    if milliseconds is None:
        return "not measured"
    if milliseconds < 1000:
        return f"{milliseconds:.3g} ms"
    seconds = milliseconds / 1000
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.3g} min"


def count(value: int) -> str:
    """A count with thousands separated, or in millions and billions."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= limit:
            return f"{value / limit:.4g} {unit}"
    return f"{value:,}"


def change(before: float, after: float) -> str:
    """``−25.5%``: relative change with its sign."""
    if before == 0:
        return "n/a"
    percent = (after - before) / abs(before) * 100
    return f"{'−' if percent < 0 else '+'}{abs(percent):.1f}%"


def share(fraction: float) -> str:
    """A part of a whole: ``82.6%``; what is there and rounds to nothing is ``under 0.1%``."""
    return "under 0.1%" if 0 < fraction < 0.0005 else f"{fraction:.1%}"


def off_by(predicted: float | None, measured: float | None) -> str:
    """How far a prediction was from the measurement, in percent of the measurement."""
    if predicted is None or not measured:
        return "not measured"
    return change(measured, predicted)


def short(sha256: str) -> str:
    return f"{sha256[:16]}…"
