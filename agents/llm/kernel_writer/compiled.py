"""torch.compile of a region: what is tried before a kernel is written, and what a written one is measured against.

Errors are in fp64 terms on a size that no cache has seen; times are medians of forward and backward on inputs that
change between calls.

Legend: T tokens a sequence (batch of 2).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardwright.agents.llm.kernel_writer.judge import EAGER_ERRORS, ROUNDING
from shardwright.agents.llm.kernel_writer.task import SizedRegion, Task, sizes_of

CHECKED_TOKENS = 65
SEEDS = (1, 2)
CALLS, WARM_CALLS = 20, 5


@dataclass(frozen=True)
class Compiled:
    """What was seen of one region under torch.compile."""

    error: float
    """Largest error of an output or gradient, relative to the largest magnitude."""
    over_eager: float
    """The same over eager's own error, or over one rounding where that is larger."""
    ms: float
    eager_ms: float
    floor_bytes: int
    """Inputs and outputs of forward, gradients of both in backward, each moved once."""

    @property
    def right(self) -> bool:
        """Whether it is as exact as a written kernel has to be."""
        return self.over_eager <= EAGER_ERRORS


def compile_region(task: Task, device: str, tokens: int) -> Compiled:
    """Compile a region, compare it, time it beside eager.

    Args:
        device: ``cpu`` or ``cuda``.
        tokens: T of the timed size.
    """
    seen = [_compared(task, device, seed) for seed in SEEDS]
    region = SizedRegion(task.region, sizes_of(tokens))
    values = [v.to(device).requires_grad_(r in task.trained) for r, v in task.draw(tokens, 3).items()]
    given = [v.to(device) for v in task.cotangents(tokens, 4).values()]
    ours = _timed(_compiled(region, task, values), values, given, device)
    eager = _timed(lambda *inputs: _call(region, task, inputs), values, given, device)
    trained = [v for v in values if v.requires_grad]
    moved = sum(v.numel() * v.element_size() for v in (*values, *given, *given, *trained))
    return Compiled(max(e for _, e in seen), max(o for o, _ in seen), ours, eager, moved)


def _compiled(
    region: SizedRegion, task: Task, values: Sequence[torch.Tensor]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The region's operations in a row, at the sizes of ``values``, compiled as one graph.

    The region itself walks over traced nodes, which the compiler would leave to Python, operation by operation.
    """
    straight = make_fx(lambda *inputs: _call(region, task, inputs), tracing_mode="fake")(*(v.detach() for v in values))
    return cast(Callable[..., tuple[torch.Tensor, ...]], torch.compile(straight, dynamic=False, fullgraph=True))


def _call(region: SizedRegion, task: Task, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    results = region(dict(zip(task.inputs, values, strict=True)))
    return tuple(results[role] for role in task.outputs)


def _compared(task: Task, device: str, seed: int) -> tuple[float, float]:
    """Largest error of the compiled region over eager's (at least one rounding), and that error itself."""
    values, given = task.draw(CHECKED_TOKENS, seed), task.cotangents(CHECKED_TOKENS, seed)
    truth = task.truth(values, given, CHECKED_TOKENS)
    region = SizedRegion(task.region, sizes_of(CHECKED_TOKENS))
    worst, largest = 0.0, 0.0
    on = {r: v.to(device) for r, v in values.items()}, {r: v.to(device) for r, v in given.items()}
    graph = _compiled(region, task, [on[0][r] for r in task.inputs])

    def compiled(leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(task.outputs, graph(*(leaves[r] for r in task.inputs)), strict=True))

    ours, eager = (task.both(way, *on) for way in (compiled, region))
    for part in (0, 1):
        for role, right in truth[part].items():
            scale = float(right.abs().max()) or 1.0
            errors = [float((way[part][role].cpu().double() - right).abs().max()) / scale for way in (ours, eager)]
            least = ROUNDING.get(str(eager[part][role].dtype).removeprefix("torch."), 2**-20)
            worst, largest = max(worst, errors[0] / max(errors[1], least)), max(largest, errors[0])
    return round(worst, 4), largest


def _timed(way: Callable[..., Any], values: list[torch.Tensor], given: list[torch.Tensor], device: str) -> float:
    """Median milliseconds of forward and backward; inputs change between calls."""
    trained = [v for v in values if v.requires_grad]
    found = []
    for at in range(CALLS + WARM_CALLS):
        with torch.no_grad():
            for value in trained:
                value.mul_(1.0009765625)
        _wait(device)
        start = time.perf_counter()
        results = way(*values)
        grown = [(r, g) for r, g in zip(results, given, strict=True) if r.requires_grad]
        torch.autograd.grad([r for r, _ in grown], trained, [g for _, g in grown], allow_unused=True)
        _wait(device)
        if at >= WARM_CALLS:
            found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
