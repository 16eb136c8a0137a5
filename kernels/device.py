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


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """CUDA capability of the tensor's device; (0, 0) on another. Launches on meta tensors are recorded for sm_90."""
    if tensor.device.type != "cuda":
        return (9, 0) if tensor.is_meta else (0, 0)
    index = tensor.device.index
    return _capability(torch.cuda.current_device() if index is None else index)


def current(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one: Triton launches there."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
