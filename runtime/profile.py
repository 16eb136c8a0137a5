"""A step's timeline, and what it says in the cost model's own terms.

``SHARDWRIGHT_PROFILE_STEP=N`` makes rank 0 keep the timeline of step N in ``profile/step-N.json`` of the run directory
(chrome://tracing reads it). The step runs slower under the profiler; its time stays in the record like any other's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from shardwright.runtime.device import Device
from shardwright.schemas.errors import RunError

FOLDER, VARIABLE, STEP = "profile", "SHARDWRIGHT_PROFILE_STEP", "shardwright:step"
COLLECTIVES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")
OPTIMIZER = "Optimizer.step"
Span = tuple[float, float]


def asked_step(steps: int) -> int | None:
    """The step whose timeline the environment asks for, of a run of so many steps.

    Raises:
        RunError: ``bad-variable`` where what was asked for is none of them.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return None
    if not (asked.isascii() and asked.isdigit() and 1 <= int(asked) <= steps):
        raise RunError(
            "bad-variable",
            f"{VARIABLE} is {asked!r}; the recipe has steps 1 to {steps}",
            where="environment",
            next_action=f"set {VARIABLE} to one of these steps, or unset it",
        )
    return int(asked)


@contextmanager
def recording(run_dir: Path, step: int, rank: int, device: Device) -> Iterator[None]:
    """Keep the timeline of the block where this step of rank 0 was asked for."""
    if rank != 0 or os.environ.get(VARIABLE) != str(step):
        yield
        return
    activities = [ProfilerActivity.CPU, *((ProfilerActivity.CUDA,) if device.kind == "cuda" else ())]
    with profile(activities=activities) as profiler:
        with record_function(STEP):
            yield
        device.synchronize()
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    working = folder / f".step-{step}.json.tmp"
    profiler.export_chrome_trace(str(working))
    os.replace(working, folder / f"step-{step}.json")


def terms(run_dir: Path) -> dict[str, float]:
    """Milliseconds of the newest timeline of a run by the kinds of :class:`schemas.cost.TimeComponent`.

    ``compute`` and ``optimizer`` are times in which the device (on a CPU: an operator) worked,
    ``exposed_communication`` those in which only a collective ran, ``hidden_communication`` collectives under work,
    ``launch`` what is left of the step: nothing ran. All but the hidden ones add up to ``step``.

    Raises:
        RunError: ``no-profile``.
    """
    found = sorted((run_dir / FOLDER).glob("step-*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise RunError(
            "no-profile",
            f"no timeline in {FOLDER}/",
            where=str(run_dir),
            next_action=f"run with {VARIABLE}=N in the environment for the step to keep",
        )
    return terms_of(json.loads(found[-1].read_text())["traceEvents"])


def terms_of(events: list[dict[str, Any]]) -> dict[str, float]:
    """The same from a timeline's events; times in them are microseconds.

    Raises:
        RunError: ``no-profile`` where the timeline holds no step.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    steps = [_span(event) for event in whole if event["name"] == STEP and event.get("cat") != "gpu_user_annotation"]
    if not steps:
        raise RunError(
            "no-profile",
            "the timeline holds no step",
            where=FOLDER,
            next_action=f"run with {VARIABLE}=N in the environment",
        )
    step = steps[0]
    on_device = any(event.get("cat") == "kernel" for event in whole)
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if on_device else ("cpu_op",)
    moving = [event for event in whole if str(event["name"]).startswith(COLLECTIVES)]
    if on_device:
        moving = [event for event in moving if event.get("cat") == "kernel"]
    work = [
        event
        for event in whole
        if event.get("cat") in kinds and not str(event["name"]).startswith((*COLLECTIVES, "c10d::"))
    ]
    if on_device:
        step = (step[0], max([step[1], *(_span(event)[1] for event in work)]))
    optimizer = union(_span(event) for event in whole if str(event["name"]).startswith(OPTIMIZER))
    working, collective = (inside(union(map(_span, part)), step) for part in (work, moving))
    updating = inside(optimizer, step)
    hidden = overlap(working, collective)
    update = overlap(working, updating)
    busy = union([*working, *collective])
    return {
        "compute": (length(working) - update) / 1e3,
        "optimizer": update / 1e3,
        "exposed_communication": (length(collective) - hidden) / 1e3,
        "hidden_communication": hidden / 1e3,
        "launch": (step[1] - step[0] - length(busy)) / 1e3,
        "step": (step[1] - step[0]) / 1e3,
    }


def union(spans: Any) -> list[Span]:
    """Disjoint spans that cover the same time, ascending."""
    out: list[Span] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def inside(spans: list[Span], bounds: Span) -> list[Span]:
    """The parts of spans within bounds."""
    cut = [(max(start, bounds[0]), min(stop, bounds[1])) for start, stop in spans]
    return [(start, stop) for start, stop in cut if start < stop]


def overlap(left: list[Span], right: list[Span]) -> float:
    """Time that lies in both of two disjoint, ascending lists."""
    total, place = 0.0, 0
    for start, stop in left:
        while place < len(right) and right[place][1] <= start:
            place += 1
        ahead = place
        while ahead < len(right) and right[ahead][0] < stop:
            total += min(stop, right[ahead][1]) - max(start, right[ahead][0])
            ahead += 1
    return total


def length(spans: list[Span]) -> float:
    """Time that disjoint spans cover."""
    return sum(stop - start for start, stop in spans)


def _span(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))
