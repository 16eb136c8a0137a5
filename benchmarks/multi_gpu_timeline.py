"""How much of a profiled step's expert exchanges no computation covers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

EXCHANGES = ("sendrecv", "alltoall", "all_to_all")
"""Parts of names of NCCL kernels and of c10d operations that exchange rows."""

Span = tuple[float, float]


def exposed_share(events: Iterable[Any], kind: str) -> tuple[float, float]:
    """(milliseconds of exchanges, those without any computation beside them).

    On CUDA kernels of the device count, exchanges against all kernels that are no collective; on a CPU the host's
    operations, where nothing runs beside them.
    """
    exchanges: list[Span] = []
    computing: list[Span] = []
    for event in events:
        on_device = "cuda" in str(event.device_type).lower()
        if on_device != (kind == "cuda"):
            continue
        span = (float(event.time_range.start), float(event.time_range.end))
        name = event.name.lower()
        if any(part in name for part in EXCHANGES):
            exchanges.append(span)
        elif kind == "cuda" and "nccl" not in name:
            computing.append(span)
    merged = union(exchanges)
    whole = sum(end - start for start, end in merged)
    return whole / 1e3, (whole - overlap_of(merged, union(computing))) / 1e3


def union(spans: Sequence[Span]) -> list[Span]:
    """Disjoint spans in order that cover the same time."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def overlap_of(left: Sequence[Span], right: Sequence[Span]) -> float:
    """Length of what two lists of disjoint ordered spans share."""
    shared, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        shared += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared
