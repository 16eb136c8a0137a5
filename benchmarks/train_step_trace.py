"""Where a step's device time goes: one profiled step, by kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from shardwright.runtime.profile import union

ANNOTATIONS = ("Optimizer.", "ProfilerStep")
"""Ranges around kernels, not kernels."""
SHOWN = 60
"""Kernels listed by name; the rest are one entry."""


def by_kernel(step: Callable[..., Any], *given: Any) -> dict[str, Any]:
    """Milliseconds of one step: from the first kernel to the end of the last, busy, and of each kernel with its calls.

    The step runs slower under the profiler where the host is what it waits for; kernels' own times stay.
    """
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        step(*given)
        if cuda:
            torch.cuda.synchronize()
    where = DeviceType.CUDA if cuda else DeviceType.CPU
    events = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == where and not event.name().startswith(ANNOTATIONS)
    ]
    spans = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in events if event.duration_ns() > 0]
    busy = union(spans)
    times: dict[str, list[float]] = {}
    for event in events:
        seen = times.setdefault(event.name(), [0.0, 0])
        seen[0] += event.duration_ns() / 1e6
        seen[1] += 1
    ordered = sorted(times.items(), key=lambda pair: -pair[1][0])
    rest = ordered[SHOWN:]
    return {
        "span_ms": (busy[-1][1] - busy[0][0]) / 1e6 if busy else 0.0,
        "busy_ms": sum(stop - start for start, stop in busy) / 1e6,
        "launches": len(spans),
        "kernels": [{"name": name, "ms": ms, "calls": calls} for name, (ms, calls) in ordered[:SHOWN]],
        "others": {"ms": sum(ms for _, (ms, _) in rest), "calls": sum(calls for _, (_, calls) in rest)},
    }
