"""What a rank's host spends in a training pass, and what a collective costs beside computation.

The host's times are taken on work so small that the device always waits: per kernel of adapted linear maps and fused
norms and experts, through the runtime's own modules; per gather or reduction of an FSDP unit of as many parameters as a
decoder layer with adapters has; per MoE layer whose rows travel. Medians of repeated passes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

LAYERS, WIDTH, RANK, EXPERTS, CHOICES = 16, 64, 8, 8, 2
UNIT_PARAMETERS = 32
"""Parameters of one unit; a decoder layer with adapters on attention and experts has 25 to 40."""
ADAPTED = 8
"""Of them, those that learn."""
GATHERED_BYTES = 1 << 27
PRODUCT_WIDTH, PRODUCT_ROWS, PRODUCTS = 2048, 65536, 6
REPEATS = 9


def host_launch_seconds(kind: str) -> float | None:
    """Seconds per kernel, forward and backward; ``None`` on a CPU, whose kernels are the host's own work."""
    if kind == "cpu":
        return None
    import torch
    from torch import Tensor, nn
    from torch.profiler import ProfilerActivity, profile

    from shardwright.kernels.grouped_lora_mlp.op import grouped_lora_mlp
    from shardwright.kernels.rms_norm.op import rms_norm
    from shardwright.runtime.lora.linear import LoraLinear

    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": kind}
    plain = [nn.Linear(WIDTH, WIDTH, bias=False, **bf16).requires_grad_(False) for _ in range(4 * LAYERS)]
    maps = [LoraLinear(one, RANK, 1.0, 0.0, torch.float32) for one in plain]
    for one in maps:
        for value in one.parameters():
            value.data.zero_()
    weight = torch.ones(WIDTH, **bf16)
    up, down = torch.zeros(EXPERTS, 2 * WIDTH, WIDTH, **bf16), torch.zeros(EXPERTS, WIDTH, WIDTH, **bf16)
    counts = torch.full((EXPERTS,), WIDTH // EXPERTS, device=kind)
    x = torch.zeros(WIDTH, WIDTH, requires_grad=True, **bf16)

    def both() -> None:
        y: Tensor = x
        for layer in range(LAYERS):
            y = rms_norm(y, weight, 1e-6)
            for one in maps[4 * layer : 4 * layer + 4]:
                y = one(y)
            y = y + grouped_lora_mlp(rms_norm(y, weight, 1e-6), counts, up, down)
        y.sum().backward()

    seconds = _median(both, torch)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        both()
        torch.cuda.synchronize()
    kernels = sum(str(event.device_type).endswith("CUDA") for event in found.events())
    return seconds / kernels if kernels else None


def exchange_seconds(kind: str) -> tuple[float, float] | None:
    """Seconds of one MoE layer's way there and back over this host's ranks, (forward, backward)."""
    if kind == "cpu" or not _several():
        return None
    import torch
    import torch.distributed as dist

    from shardwright.runtime.experts.dispatch import combine, dispatch, plan_route
    from shardwright.runtime.experts.rows_fused import KernelRows

    ranks, group, by = dist.get_world_size(), dist.group.WORLD, KernelRows()
    hidden = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16, device=kind, requires_grad=True)
    choices = torch.arange(WIDTH * CHOICES, device=kind).view(WIDTH, CHOICES) % (EXPERTS * ranks)
    weights = torch.ones(WIDTH, CHOICES, device=kind, requires_grad=True)

    def forward() -> torch.Tensor:
        out = hidden
        for _ in range(LAYERS):
            route = plan_route(choices, EXPERTS * ranks, ranks, group, by)
            out = combine(dispatch(out, route, group, None, by), route, weights, group, by)
        return out

    alone = _median(forward, torch)
    backward = _median(lambda loss: loss.backward(), torch, lambda: forward().sum())
    return alone / LAYERS, backward / LAYERS


def beside_slowdown(kind: str) -> float | None:
    """1 plus the share of a gather's own time by which it delays the products that run beside it.

    The products are the experts': their kernels stay on all multiprocessors, and a collective needs some.
    """
    if kind == "cpu" or not _several():
        return None
    import torch
    import torch.distributed as dist

    from shardwright.kernels.grouped_lora_mlp.op import grouped_lora_mlp

    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": kind}
    part = torch.zeros(GATHERED_BYTES // 2, **bf16)
    whole = torch.zeros(GATHERED_BYTES // 2 * dist.get_world_size(), **bf16)
    up = torch.zeros(EXPERTS, PRODUCT_WIDTH, PRODUCT_WIDTH, **bf16)
    down = torch.zeros(EXPERTS, PRODUCT_WIDTH, PRODUCT_WIDTH // 2, **bf16)
    rows = torch.zeros(PRODUCT_ROWS, PRODUCT_WIDTH, **bf16)
    counts = torch.full((EXPERTS,), PRODUCT_ROWS // EXPERTS, device=kind)

    def compute() -> None:
        for _ in range(PRODUCTS):
            grouped_lora_mlp(rows, counts, up, down)

    def beside() -> None:
        work = dist.all_gather_into_tensor(whole, part, async_op=True)
        compute()
        work.wait()

    alone = _median(lambda: dist.all_gather_into_tensor(whole, part), torch)
    products, together = _median(compute, torch), _median(beside, torch)
    return 1.0 + min(1.0, max(0.0, together - products) / alone)


def unit_seconds(kind: str) -> float | None:
    """Seconds of one gather or reduction of a unit over this host's ranks; ``None`` on a CPU or for one rank."""
    if kind == "cpu" or not _several():
        return None
    import torch
    from torch import Tensor, nn
    from torch.distributed.fsdp import fully_shard

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.ParameterList(
                nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16, device=kind), at < ADAPTED)
                for at in range(UNIT_PARAMETERS)
            )

        def forward(self, x: Tensor) -> Tensor:
            for value in list(self.values)[:ADAPTED]:
                x = x + value
            return x

    def timed(sharded: bool) -> float:
        units = nn.Sequential(*(Unit() for _ in range(LAYERS)))
        if sharded:
            for unit in units:
                fully_shard(unit)
            fully_shard(units)
        x = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16, device=kind, requires_grad=True)
        return _median(lambda: units(x).sum().backward(), torch)

    passes = 3 * LAYERS
    return max(0.0, timed(True) - timed(False)) / passes


def _several() -> bool:
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_world_size() > 1


def _median(work: Callable[..., object], torch: Any, given: Callable[[], object] | None = None) -> float:
    """Seconds of ``work``, median after warm-up; of what ``given`` makes for it each time, outside the clock."""
    times = []
    for attempt in range(REPEATS + 3):
        made = () if given is None else (given(),)
        torch.cuda.synchronize()
        began = time.perf_counter()
        work(*made)
        torch.cuda.synchronize()
        if attempt >= 3:
            times.append(time.perf_counter() - began)
    return statistics.median(times)
