"""Labels out of range, found without making the host wait for the device.

On the CPU the counts are read at once and a bad label raises before the loss is returned. On a device
reading them would stop the host, so three things happen instead:

1. the loss and the gradient of the bad row are NaN, at once and in every reduction: never a silent number;
2. the counts are copied to pinned host memory behind the kernel that made them;
3. the typed error is raised by the next call of the operator (forward or backward) that finds the copy
   finished, or by ``raise_pending(wait=True)``, which a caller that reads the loss anyway may use.

Inside a CUDA graph capture only the first holds.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels import guards
from shardwright.kernels.linear_cross_entropy.contract import NAME
from shardwright.schemas.errors import KernelError

MOST_PENDING = 256
"""Older checks are waited for beyond this many, so that host memory stays bounded."""


@dataclass(frozen=True)
class Pending:
    """Counts under way to the host: (rows that count, labels out of range, first such row, its label)."""

    counts: Tensor
    arrived: torch.cuda.Event
    vocabulary: int


_pending: deque[Pending] = deque()


def out_of_range(counts: list[int], vocabulary: int) -> KernelError:
    """The error for counts that show a bad label."""
    _, wrong, row, label = counts
    what = f"{wrong} labels lie outside 0..{vocabulary - 1}; the first is {label} in row {row}"
    return guards.refuse(NAME, "label-out-of-range", what, "mask such rows with ignore_index, or fix the data")


def watch(counts: Tensor, vocabulary: int) -> None:
    """Check the counts of one call: now on the CPU, later and without waiting on a device.

    Raises:
        KernelError: ``label-out-of-range``, on the CPU for this call, on a device for an earlier one.
    """
    if counts.device.type != "cuda":
        found = counts.tolist()
        if found[1]:
            raise out_of_range(found, vocabulary)
        return
    if torch.cuda.is_current_stream_capturing():
        return
    raise_pending()
    host = torch.empty(4, dtype=torch.int64, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(counts.device))
    _pending.append(Pending(host, arrived, vocabulary))


def raise_pending(*, wait: bool = False) -> None:
    """Raise for any earlier call whose labels are known to be bad.

    Args:
        wait: also wait for the device to finish the checks that are under way.

    Raises:
        KernelError: ``label-out-of-range``. The check that raised, and all older ones, are forgotten.
    """
    while _pending:
        oldest = _pending[0]
        if wait or len(_pending) > MOST_PENDING:
            oldest.arrived.synchronize()
        elif not oldest.arrived.query():
            return
        _pending.popleft()
        found = oldest.counts.tolist()
        if found[1]:
            raise out_of_range(found, oldest.vocabulary)
