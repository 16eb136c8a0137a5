"""Faults in data that kernels found on the device and copied to the host behind them.

An operator raises what an earlier call of its own found, so that it never waits. Nobody calls after the last: a step
asks once more, where the host has just waited for the device, so that asking costs nothing.
"""

from __future__ import annotations

import sys

WATCHED = (
    "shardwright.kernels.dsa.attention.selection",
    "shardwright.kernels.dsa.indexer.alarms",
    "shardwright.kernels.linear_cross_entropy.labels",
)
"""Modules of operators that find faults late; only those that are in use."""


def raise_late_faults() -> None:
    """Raise the oldest fault that no call has raised yet.

    Raises:
        KernelError: ``nan-scores``, ``index-out-of-range``, ``index-duplicated``, ``index-not-visible``,
            ``bad-cu-seqlens``, and what the loss says of labels.
    """
    for name in WATCHED:
        module = sys.modules.get(name)
        if module is not None:
            module.raise_pending(wait=True)
