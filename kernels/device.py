"""The device that a kernel runs on: multiprocessors, current device, interpreter or not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton

INTERPRETED_MULTIPROCESSORS = 2
"""What the CPU interpreter pretends to have, so that persistent loops really loop in small tests."""


def interpreted() -> bool:
    """Whether kernels run in Triton's CPU interpreter (``TRITON_INTERPRET=1`` before the import)."""
    return bool(triton.knobs.runtime.interpret)


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def multiprocessors(tensor: torch.Tensor) -> int:
    """Streaming multiprocessors of the tensor's device."""
    if tensor.device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    index = tensor.device.index
    return _multiprocessors(torch.cuda.current_device() if index is None else index)


def current(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one: Triton launches there."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
