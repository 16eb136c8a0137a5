"""Timing on a device: medians by events after warm-up, copy bandwidth, peak memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench

WARMUP_MS, REPEAT_MS = 50, 200
"""Milliseconds of warm-up and of measuring; the second-level cache is flushed between repeats."""


def median_ms(run: Callable[[], object], *, warmup_ms: int = WARMUP_MS, repeat_ms: int = REPEAT_MS) -> float:
    """Median device time of one call, ms."""
    return float(do_bench(run, warmup=warmup_ms, rep=repeat_ms, return_mode="median"))


def copy_bytes_per_second() -> float:
    """Bandwidth of a 2 GiB device-to-device copy, bytes read plus written: the ceiling of row kernels."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / (median_ms(lambda: target.copy_(source)) * 1e-3)


@cache
def product_flops_per_second(dtype: str) -> float:
    """Rate of an 8192³ matrix product of the vendor's library: the ceiling of products on this device."""
    n = 8192
    a, b = (torch.randn((n, n), device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / (median_ms(lambda: torch.mm(a, b, out=out)) * 1e-3)


def launches(run: Callable[[], object]) -> int:
    """Kernels and copies that one call starts on the device."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        run()
        torch.cuda.synchronize()
    return sum(1 for event in trace.events() if event.device_type == DeviceType.CUDA)


def peak_bytes(run: Callable[[], object]) -> int:
    """Device memory that one call needs beyond what lives before it."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def device_ms(run: Callable[[], object], *, calls: int = 10) -> float:
    """Mean time that the device itself is busy in one call, ms: kernels and copies, no host in it.

    Where this is well under the median of whole calls, the calls are bound by the host.
    """
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    busy = sum(e.device_time_total for e in trace.events() if e.device_type == DeviceType.CUDA)
    return busy / calls / 1e3
