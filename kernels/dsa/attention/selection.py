# mypy: disable-error-code="no-untyped-def"
"""Selections that break the contract, found without making the host wait for the device.

Wrong are entries below -1 or past the keys, an entry twice in one row, and, where entries are single keys, one that
its query may not see. On the CPU the call itself raises. On a device the findings are copied to pinned memory behind
the kernel that made them, and the next call, forward or backward, that finds the copy finished raises; so does
``raise_pending(wait=True)``. Until then no address outside the keys is touched: entries past the keys count as -1,
an entry that stands twice counts twice.

Legend: T queries, G key heads, K entries, B keys of an entry, S keys.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwright.kernels import device, guards
from shardwright.kernels.dsa.attention import configs
from shardwright.kernels.dsa.attention.contract import NAME
from shardwright.kernels.dsa.attention.problem import Problem
from shardwright.schemas.errors import KernelError

MOST_PENDING = 64
"""Older checks are waited for beyond this many, so that host memory stays bounded."""

NOTHING = 2**31 - 1
KINDS = ("index-out-of-range", "index-duplicated", "index-not-visible")
ACTIONS = (
    "entries are -1 or rows (blocks) of the keys, absolute in the packed sequence",
    "select each key once for a query",
    "select keys of the query's own document that it may see, or pass other bounds",
)


@triton.jit
def examine_kernel(
    index_ptr, bounds_ptr, found_ptr, ENTRIES, RANGE, G, BOUNDED: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """For each kind of fault: how many entries, and the first row that has one. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    entry = tl.load(index_ptr + row * ENTRIES + columns, mask=columns < ENTRIES, other=-1)
    foreign = (entry < -1) | (entry >= RANGE)
    ordered = tl.sort(tl.where(entry < 0, 2147483647, entry))
    after = tl.gather(ordered, tl.minimum(columns + 1, COLUMNS - 1), 0)
    twice = (ordered == after) & (ordered != 2147483647) & (columns < COLUMNS - 1)
    n0, n1 = tl.sum(foreign.to(tl.int32), 0), tl.sum(twice.to(tl.int32), 0)
    at = row.to(tl.int32)
    if n0 > 0:
        tl.atomic_add(found_ptr, n0)
        tl.atomic_min(found_ptr + 1, at)
    if n1 > 0:
        tl.atomic_add(found_ptr + 2, n1)
        tl.atomic_min(found_ptr + 3, at)
    if BOUNDED:
        t = row // G
        first, last = tl.load(bounds_ptr + 2 * t), tl.load(bounds_ptr + 2 * t + 1)
        hidden = (entry >= 0) & (entry < RANGE) & ((entry < first) | (entry >= last))
        n2 = tl.sum(hidden.to(tl.int32), 0)
        if n2 > 0:
            tl.atomic_add(found_ptr + 4, n2)
            tl.atomic_min(found_ptr + 5, at)


@dataclass(frozen=True)
class Pending:
    """Findings under way to the host."""

    found: Tensor
    arrived: torch.cuda.Event
    heads: int


_pending: deque[Pending] = deque()


def fault(found: list[int], heads: int) -> KernelError | None:
    """The error for findings, if they show one."""
    for at, (kind, action) in enumerate(zip(KINDS, ACTIONS, strict=True)):
        count, row = found[2 * at : 2 * at + 2]
        if count:
            what = f"{count} entries; the first in the selection of query {row // heads}, key head {row % heads}"
            return guards.refuse(NAME, kind, what, action)
    return None


def examine(p: Problem) -> Tensor:
    """``[6]`` int32: for each kind of ``KINDS`` a count and the first row ``t · G + g``."""
    found = torch.tensor([0, NOTHING] * len(KINDS), dtype=torch.int32).to(p.indices.device, non_blocking=True)
    rows = p.T * p.G
    if rows and p.K:
        with device.current(p.indices):
            examine_kernel[(rows,)](
                p.indices,
                p.indices if p.bounds is None else p.bounds,
                found,
                p.K,
                -(-p.S // p.block),
                p.G,
                BOUNDED=p.bounds is not None and p.block == 1,
                COLUMNS=configs.power_of_two(p.K),
                num_warps=configs.EXAMINE_WARPS,
            )
    return found


def watch(p: Problem) -> None:
    """Check one call's selection: now on the CPU, later and without waiting on a device.

    Raises:
        KernelError: ``index-out-of-range``, ``index-duplicated`` or ``index-not-visible``: on the CPU for this call,
            on a device for an earlier one.
    """
    if p.indices.is_meta:
        return
    if p.indices.device.type != "cuda":
        if error := fault(examine(p).tolist(), p.G):
            raise error
        return
    if torch.cuda.is_current_stream_capturing():
        return
    raise_pending()
    found = examine(p)
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    host.copy_(found, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(found.device))
    _pending.append(Pending(host, arrived, p.G))


def raise_pending(*, wait: bool = False) -> None:
    """Raise for any earlier call whose selection is known to be bad.

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
        if error := fault(oldest.found.tolist(), oldest.heads):
            raise error
