"""Measure this machine: matrix products, copies, launch overhead. Medians after warm-up."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime

from shardwright.schemas.cluster import Calibration, CurvePoint
from shardwright.workflows.environment import installed

GEMM_SIZES = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
COPY_BYTES = {"cpu": (1 << 20, 1 << 24, 1 << 27), "cuda": (1 << 24, 1 << 27, 1 << 30)}
REPEATS = 7


def measure(*, quick: bool, progress: Callable[[str], None]) -> Calibration:
    """Run all measurements on the first CUDA device, or on the CPU with one thread a rank.

    Args:
        quick: only the smaller half of the sizes.
        progress: told each figure in words.
    """
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if kind == "cuda" else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    if kind == "cpu":
        torch.set_num_threads(1)
    try:
        sizes: tuple[int, ...] = GEMM_SIZES[kind]
        copies: tuple[int, ...] = COPY_BYTES[kind]
        if quick:
            sizes, copies = sizes[: len(sizes) // 2], copies[:1]
        gemm = {}
        for dtype in ("float32", "bfloat16"):
            points = []
            for size in sizes:
                rate = _gemm_flops(kind, dtype, size)
                progress(f"gemm {dtype} {size}³: {rate / 1e9:,.1f} GFLOP/s")
                points.append(CurvePoint(size=size, rate=rate))
            gemm[dtype] = tuple(points)
        copied = []
        for count in copies:
            rate = _copy_rate(kind, count)
            progress(f"copy {count >> 20} MiB: {rate / 1e9:,.1f} GB/s read and written")
            copied.append(CurvePoint(size=count, rate=rate))
        launch = _launch_seconds(kind)
        progress(f"launch: {launch * 1e6:.1f} µs")
    finally:
        torch.set_num_threads(threads)
    return Calibration(
        device=name,
        versions={"torch": installed("torch")},
        gemm_flops=gemm,
        copy_bytes_per_s=tuple(copied),
        launch_overhead_s=launch,
        date=datetime.now(UTC).date().isoformat(),
    )


def _median_seconds(kind: str, work: Callable[[], object], inner: int = 1) -> float:
    import torch

    times = []
    for attempt in range(REPEATS + 2):
        if kind == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(inner):
            work()
        if kind == "cuda":
            torch.cuda.synchronize()
        if attempt >= 2:
            times.append((time.perf_counter() - began) / inner)
    return statistics.median(times)


def _gemm_flops(kind: str, dtype: str, size: int) -> float:
    """2·n³ flops over the median time of an n×n×n product, FLOP/s."""
    import torch

    a, b = (torch.randn(size, size, device=kind).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * size**3 / _median_seconds(kind, lambda: a @ b)


def _copy_rate(kind: str, count: int) -> float:
    """Bytes read plus written a second while copying ``count`` bytes."""
    import torch

    source = torch.ones(count, dtype=torch.uint8, device=kind)
    target = torch.empty_like(source)
    return 2 * count / _median_seconds(kind, lambda: target.copy_(source))


def _launch_seconds(kind: str) -> float:
    """Median time of adding one number, a hundred times in a row, seconds each."""
    import torch

    value = torch.zeros(1, device=kind)
    return _median_seconds(kind, lambda: value.add_(1), inner=100)
