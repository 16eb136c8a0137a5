"""Measure this machine: products, grouped products, attention, copies, launches; collectives under torchrun.

Medians after warm-up; microbenchmarks only, nothing is fitted to training runs.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from shardwright.schemas.cluster import Calibration, CurvePoint
from shardwright.workflows.calibration_host import beside_slowdown, exchange_seconds, host_launch_seconds, unit_seconds
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
        sustained = _sustained_flops(progress) if kind == "cuda" else {}
        copied = []
        for count in copies:
            rate = _copy_rate(kind, count)
            progress(f"copy {count >> 20} MiB: {rate / 1e9:,.1f} GB/s read and written")
            copied.append(CurvePoint(size=count, rate=rate))
        grouped = {"bfloat16": tuple(_grouped_points(kind, quick, progress))}
        attention = {"bfloat16": tuple(_attention_points(kind, quick, progress))}
        touch = _first_touch_rate(1 << 26) if kind == "cpu" else None
        if touch:
            progress(f"first touch of fresh memory: {touch / 1e9:,.1f} GB/s")
        with _group(kind):
            collectives = _collective_curves(kind, quick, progress)
            unit, exchange, slowdown = unit_seconds(kind), exchange_seconds(kind), beside_slowdown(kind)
        launch, host = _launch_seconds(kind), host_launch_seconds(kind)
        progress(f"launch: {launch * 1e6:.1f} µs")
        if host is not None:
            progress(f"host time of a kernel in a training pass: {host * 1e6:.1f} µs")
        if unit is not None:
            progress(f"host time of a gather or reduction of an FSDP unit: {unit * 1e6:.0f} µs")
        if exchange is not None:
            there, back = (f"{one * 1e6:.0f}" for one in exchange)
            progress(f"host time of a MoE layer's exchanges: {there} µs forward, {back} µs backward")
        if slowdown is not None:
            progress(f"a gather beside products delays them by {100 * (slowdown - 1):.0f} % of its own time")
    finally:
        torch.set_num_threads(threads)
    return Calibration(
        device=name,
        versions={"torch": installed("torch")},
        gemm_flops=gemm,
        sustained_flops=sustained,
        grouped_gemm_flops=grouped,
        attention_flops=attention,
        copy_bytes_per_s=tuple(copied),
        collectives=collectives,
        first_touch_bytes_per_s=touch,
        launch_overhead_s=launch,
        host_launch_s=host,
        unit_overhead_s=unit,
        exchange_host_s=exchange,
        beside_slowdown=slowdown,
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


SUSTAINED_S, SUSTAINED_CALLS = 0.75, 20
"""Seconds for which products run before and while their rate is taken, and calls between two looks at the clock."""


def _sustained_flops(progress: Callable[[str], None]) -> dict[str, float]:
    """FLOP/s of large bf16 products once a device has run them for most of a second: its power limit then counts."""
    import torch

    size = GEMM_SIZES["cuda"][-1]
    a, b = (torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(2))

    def run_for(seconds: float) -> float:
        torch.cuda.synchronize()
        began, calls = time.perf_counter(), 0
        while (spent := time.perf_counter() - began) < seconds:
            for _ in range(SUSTAINED_CALLS):
                a @ b
            torch.cuda.synchronize()
            calls += SUSTAINED_CALLS
        return 2 * size**3 * calls / spent

    run_for(SUSTAINED_S)
    rate = run_for(SUSTAINED_S)
    progress(f"gemm bfloat16 {size}³ for a while: {rate / 1e9:,.1f} GFLOP/s")
    return {"bfloat16": rate}


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


GROUPED = {"cpu": (4, 128, 256), "cuda": (64, 4096, 1024)}
"""Experts, width of rows and of experts in the grouped products that are measured."""

ROWS_PER_EXPERT = {"cpu": (8, 64, 512), "cuda": (32, 128, 512, 2048)}
ATTENTION_TOKENS = {"cpu": (128, 512), "cuda": (2048, 8192, 32768)}
COLLECTIVE_BYTES = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 17, 1 << 22, 1 << 25, 1 << 28)}


def _grouped_points(kind: str, quick: bool, progress: Callable[[str], None]) -> list[CurvePoint]:
    """One grouped product of equal groups, by rows per expert, FLOP/s."""
    import torch

    experts, width, inner = GROUPED[kind]
    weights = torch.randn(experts, width, inner, device=kind).to(torch.bfloat16)
    points = []
    for rows in ROWS_PER_EXPERT[kind][: 2 if quick else None]:
        x = torch.randn(experts * rows, width, device=kind).to(torch.bfloat16)
        ends = torch.arange(rows, experts * rows + 1, rows, device=kind, dtype=torch.int32)

        def product(x: torch.Tensor = x, ends: torch.Tensor = ends) -> torch.Tensor:
            return torch.nn.functional.grouped_mm(x, weights, offs=ends)

        rate = 2 * experts * rows * width * inner / _median_seconds(kind, product)
        progress(f"grouped product, {rows} rows an expert: {rate / 1e9:,.1f} GFLOP/s")
        points.append(CurvePoint(size=rows, rate=rate))
    return points


def _attention_points(kind: str, quick: bool, progress: Callable[[str], None]) -> list[CurvePoint]:
    """Causal attention of 16 heads of 128, by tokens of a sequence; 2·S²·n·d flops, FLOP/s."""
    import torch

    heads, width = 16, 128
    points = []
    for tokens in ATTENTION_TOKENS[kind][: 1 if quick else None]:
        q = torch.randn(1, heads, tokens, width, device=kind).to(torch.bfloat16)

        def attend(q: torch.Tensor = q) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

        rate = 2 * tokens**2 * heads * width / _median_seconds(kind, attend)
        progress(f"attention, {tokens} tokens: {rate / 1e9:,.1f} GFLOP/s")
        points.append(CurvePoint(size=tokens, rate=rate))
    return points


def _first_touch_rate(count: int) -> float:
    """Bytes a second of filling memory that was taken from the system just now."""
    import torch

    return count / _median_seconds("cpu", lambda: torch.empty(count, dtype=torch.uint8).fill_(1))


@contextmanager
def _group(kind: str) -> Iterator[None]:
    """All ranks of a torchrun, if this process is one of several and they have not met."""
    import torch.distributed as dist

    meet = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if meet:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield
    finally:
        if meet:
            dist.destroy_process_group()


def _collective_curves(kind: str, quick: bool, progress: Callable[[str], None]) -> dict[str, tuple[CurvePoint, ...]]:
    """Bytes per rank → bytes a second, of all ranks of a torchrun; nothing outside one.

    A rate counts what one rank sends to others: ``n − 1`` of ``n`` parts.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() < 2:
        return {}
    ranks, curves = dist.get_world_size(), {}
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        points = []
        for count in COLLECTIVE_BYTES[kind][: 2 if quick else None]:
            whole = torch.ones(count * ranks, dtype=torch.uint8, device=kind)
            part = torch.ones(count, dtype=torch.uint8, device=kind)
            work, moved = _collective(name, whole, part, count, ranks)
            rate = moved / _median_seconds(kind, work)
            progress(f"{name}, {count >> 10} KiB a rank: {rate / 1e9:,.2f} GB/s")
            points.append(CurvePoint(size=count, rate=rate))
        curves[name] = tuple(points)
    return curves


def _collective(name: str, whole: Any, part: Any, count: int, ranks: int) -> tuple[Callable[[], object], float]:
    """The call that is timed, and the bytes it sends."""
    import torch
    import torch.distributed as dist

    if name == "all_gather":
        return (lambda: dist.all_gather_into_tensor(whole, part)), count * (ranks - 1)
    if name == "reduce_scatter":
        full, own = whole.to(torch.float32), part.to(torch.float32)
        return (lambda: dist.reduce_scatter_tensor(own, full)), 4.0 * count * (ranks - 1)
    sent = part[: count // ranks * ranks]
    received = torch.empty_like(sent)
    return (lambda: dist.all_to_all_single(received, sent)), len(sent) * (ranks - 1) / ranks
