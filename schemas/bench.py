"""One line of a benchmark result file."""

from __future__ import annotations

from typing import Literal

from shardwright.schemas.base import CountInt, Identifier, Model, NonNegative


class BenchLine(Model):
    """Ours beside the rival, in one process, medians after warm-up.

    ``ratio`` is more-is-better: rival ÷ ours for times, ours ÷ rival for rates.
    """

    schema_version: Literal[1] = 1
    bench: Identifier
    case: Identifier
    passes: str = ""
    """For example ``fwd`` or ``fwd+bwd``; empty where passes have no meaning."""
    unit: str = "ms"
    ours: float | None = None
    rival: str | None = None
    rival_value: float | None = None
    ratio: float | None = None
    floor: NonNegative | None = None
    peak_bytes: CountInt | None = None
    device: str
    versions: dict[str, str]
    commit: str
    date: str
    metrics: dict[str, float] = {}
