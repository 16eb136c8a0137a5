"""A request to stop (SIGTERM from a scheduler, from ``cancel``, from torchrun) that all ranks honour after one step.

The request may reach one rank or all of them, at different steps: ranks agree after every step, so they save the same
state and leave together.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shardwright.runtime.device import Device
from shardwright.runtime.mesh import Ranks
from shardwright.schemas.errors import RunInterrupted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""SIGUSR1 is what schedulers are asked to send some time before the end."""


class StopRequest:
    """Catches the signals while it is entered; outside the main thread Python allows none, so it catches nothing."""

    def __init__(self, ranks: Ranks, device: Device) -> None:
        self.ranks, self.device = ranks, device
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; the same answer everywhere. Every rank calls this after every step."""
        if self.ranks.world == 1:
            return self.requested
        asked = torch.tensor(int(self.requested), device=self.device.torch_device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)


def interrupted(step: int, total: int, run_dir: str) -> RunInterrupted:
    """The error that ends an interrupted run after its save."""
    return RunInterrupted(
        "saved",
        f"asked to stop after step {step} of {total}; the save of that step is whole",
        where=run_dir,
        next_action="`shardwright resume` goes on from it",
    )
