"""Faults that only the data shows, found without making the host wait for the device.

Kernels count them in two numbers: rows that met a NaN score, and indices out of range; bounds of packed sequences
on a device are judged the same way. On the CPU the counts are read at once and the error is raised by the call
itself. On a device they are copied to pinned host memory behind the kernel, and the typed error is raised by the
next call that finds the copy finished, or by ``raise_pending(wait=True)``. Meanwhile every output is defined: NaN
ranks highest, an index out of range counts as -1, bounds out of order give each query a sequence that ends at
itself. Inside a CUDA graph capture only that holds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels import guards
from shardwright.kernels.dsa.indexer.contract import NAME
from shardwright.schemas.errors import KernelError

FAULTS = 3
NAN_ROWS, OUT_OF_RANGE, BAD_BOUNDS = range(FAULTS)
MOST_PENDING = 256
"""Older checks are waited for beyond this many, so that host memory stays bounded."""


@dataclass(frozen=True)
class Pending:
    """Counts under way to the host."""

    counts: Tensor
    arrived: torch.cuda.Event
    name: str


_pending: deque[Pending] = deque()


def fresh(like: Tensor) -> Tensor:
    """Zeroed counts on a tensor's device."""
    return torch.zeros(FAULTS, dtype=torch.int32, device=like.device)


def fault(counts: list[int], name: str) -> KernelError | None:
    """The error for counts that show a fault; ``None`` where there is none."""
    if counts[BAD_BOUNDS]:
        what = "cu_seqlens does not begin with 0, falls, or does not end with the number of keys"
        return guards.refuse(name, "bad-cu-seqlens", what, "pass cumulative lengths, sorted, from 0 to S")
    if counts[OUT_OF_RANGE]:
        what = f"{counts[OUT_OF_RANGE]} indices are below -1 or not below the number of keys"
        return guards.refuse(name, "index-out-of-range", what, "pass the indices that this indexer chose, -1 as filler")
    if counts[NAN_ROWS]:
        what = f"{counts[NAN_ROWS]} rows of scores hold NaN"
        return guards.refuse(name, "nan-scores", what, "look for NaN or infinity in q, k and weights")
    return None


def watch(counts: Tensor, name: str = NAME) -> None:
    """Check the counts of one call: now on the CPU, later and without waiting on a device.

    Raises:
        KernelError: ``nan-scores``, ``index-out-of-range`` or ``bad-cu-seqlens``, on the CPU for this call, on a
            device for an earlier one.
    """
    if counts.is_meta:
        return
    if counts.device.type != "cuda":
        found = fault(counts.tolist(), name)
        if found is not None:
            raise found
        return
    if torch.cuda.is_current_stream_capturing():
        return
    raise_pending()
    host = torch.empty(FAULTS, dtype=torch.int32, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(counts.device))
    _pending.append(Pending(host, arrived, name))


def raise_pending(*, wait: bool = False) -> None:
    """Raise for any earlier call whose counts are known to show a fault.

    Args:
        wait: also wait for the device to finish the checks that are under way.

    Raises:
        KernelError: as ``watch``. The check that raised, and all older ones, are forgotten.
    """
    while _pending:
        oldest = _pending[0]
        if wait or len(_pending) > MOST_PENDING:
            oldest.arrived.synchronize()
        elif not oldest.arrived.query():
            return
        _pending.popleft()
        found = fault(oldest.counts.tolist(), oldest.name)
        if found is not None:
            raise found
