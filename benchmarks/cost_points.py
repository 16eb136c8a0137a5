"""Measured points for the cost model, many in one process on one device.

``python benchmarks/cost_points.py [--models M,...] [--executors eager,fused] [--limit-seconds 120]
[--point-seconds 45] [--steps 5] [--calibrate FILE] [--append]``

Every point (``points_shapes.py``) is a few layers at full width with random weights under the runtime's own adapters,
experts, fusions, checkpointing and optimizer. Warm-up steps, then timed steps. A line of bench ``cost-points``:

- ``peak_bytes``: most allocated during the timed steps (moments of AdamW present), ``weights_bytes``: allocated before
  the first step;
- ``reserved_bytes``: most that the allocator held; ``context_bytes``: what the device shows beyond that;
  ``expandable_segments``: 1 where the allocator ran as the runtime's launcher asks of it;
- ``step_ms`` median, ``worst_ms``; rows of the fullest expert over the mean;
- ``out_of_memory`` alone, where the device had too little.

Points run in a process beside this one (``points_process.py``): one that fails, hangs or takes its process down is
named on stderr, and the others go on. No point begins after ``--limit-seconds``; lines come as points end.
``--self-test`` runs miniatures on any device and writes nothing; fused ones too where Triton's interpreter is on
(``TRITON_INTERPRET=1``). ``--replay FILE`` appends lines that another machine printed.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from lines import append, line
from points_model import Recomputed, Side, live_model
from points_process import FAILED, OUT_OF_MEMORY, Supervised
from points_shapes import SHAPES, Point, points, tiny_points
from torch import Tensor

from shardwright.runtime.experts.balance import max_over_mean
from shardwright.runtime.garbage import collected_between_steps
from shardwright.runtime.launch.allocator import EXPANDABLE, allocator_setting, choose_allocator
from shardwright.schemas.bench import BenchLine
from shardwright.schemas.errors import ShardwrightError

WARMUP, STEPS = 2, 5
"""The allocator has its final shape after the second step: AdamW's moments appear at the end of the first."""

PROBLEMS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, ShardwrightError)
"""What may go wrong with one point and says nothing about the next."""


class TooLong(RuntimeError):
    """A point outran its limit."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise :class:`TooLong` in this thread once the time is over."""

    def over(*_: object) -> None:
        raise TooLong(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Meter:
    """Clock and memory of the first CUDA device; on a CPU the clock alone."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()

    def reset(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def allocated(self) -> float:
        return float(torch.cuda.memory_allocated()) if self.cuda else 0.0

    def peaks(self) -> dict[str, float]:
        """Peaks since the last reset, and what the device shows beyond the allocator."""
        if not self.cuda:
            return {"peak_bytes": 0.0}
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_bytes": float(torch.cuda.max_memory_allocated()),
            "reserved_bytes": float(torch.cuda.max_memory_reserved()),
            "context_bytes": float(total - free - torch.cuda.memory_reserved()),
            "expandable_segments": float(EXPANDABLE in allocator_setting(os.environ)),
        }


def measure(side: Side, point: Point, meter: Meter, steps: int = STEPS) -> dict[str, float]:
    """Steps of one point, collections of cycles between them, as a run has it."""
    vocabulary = point.hf_config().vocab_size
    shape = (point.batch, point.tokens)
    ids = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))
    device = next(side.model.parameters()).device
    moved: Tensor = ids.to(device)
    meter.reset()
    weights, times, hottest = meter.allocated(), [], 0.0
    with Recomputed(side, point.how), collected_between_steps() as garbage:
        for number in range(WARMUP + steps):
            if number == WARMUP and meter.cuda:
                torch.cuda.reset_peak_memory_stats()
            began = meter.now()
            loads = side.gradient(moved)
            side.apply()
            times.append(meter.now() - began)
            garbage.step()
            hottest = max(hottest, max_over_mean(loads))
    found = meter.peaks()
    side.optimizer.clear()
    return {
        **found,
        "weights_bytes": weights,
        "step_ms": 1e3 * statistics.median(times[WARMUP:]),
        "worst_ms": 1e3 * max(times[WARMUP:]),
        "first_ms": 1e3 * times[0],
        "hottest_expert": round(hottest, 4),
        **{f"fused_{name}": 1.0 for name in point.fusions},
    }


def forget_moments(side: Side) -> None:
    """AdamW's state belongs to a point, not to the weights of the next one."""
    side.optimizer.inner.state.clear()


def run(
    chosen: Sequence[Point], dtype: torch.dtype, whole_s: float, point_s: float, steps: int = STEPS
) -> Iterator[BenchLine]:
    """Measure points in order; builds a model once for those that share it.

    Yields:
        One line a point that began: its figures, ``out_of_memory`` or ``failed``.
    """
    meter, began = Meter(), time.perf_counter()
    side: Side | None = None
    built: tuple[Any, ...] = ()
    for point in chosen:
        if time.perf_counter() - began > whole_s:
            _say(f"{point.case}: not begun, {whole_s:g} s are over")
            continue
        found: dict[str, float] = {}
        try:
            with limit(point_s):
                if point.built != built:
                    side, built = None, ()
                    meter.reset()
                    side, built = live_model(point, dtype), point.built
                    _say(f"built {point.built} at {time.perf_counter() - began:.1f} s")
                assert side is not None
                found = measure(side, point, meter, steps)
            forget_moments(side)
            _say(f"{point.case}: {found['step_ms']:.1f} ms, {found['peak_bytes'] / 2**30:.2f} GiB")
        except torch.OutOfMemoryError as problem:
            found = {OUT_OF_MEMORY: 1.0}
            _say(f"{point.case}: out of memory: {str(problem)[:200]}")
        except PROBLEMS as problem:
            found = {FAILED: 1.0}
            _say(f"{point.case}: failed, {type(problem).__name__}: {str(problem)[:400]}")
        if "step_ms" not in found:
            side, built = None, ()
            meter.reset()
            meter.now()  # raises where the device itself is lost: this process ends, another goes on behind the point
        yield line({"bench": "cost-points", "case": point.case, "passes": "step", "metrics": found})


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def calibrate(path: Path) -> None:
    """Microbenchmarks of this machine, as ``shardwright calibrate`` makes them."""
    from shardwright.schemas.canonical import pretty_bytes
    from shardwright.schemas.files import write_atomic
    from shardwright.workflows.calibration import measure as microbenchmarks

    write_atomic(path, pretty_bytes(microbenchmarks(quick=False, progress=_say)))


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cost_points.py")
    parser.add_argument("--models", default="", help=f"of {', '.join(SHAPES)}; all unless told")
    parser.add_argument("--executors", default="eager,fused")
    parser.add_argument("--limit-seconds", type=float, default=120.0, help="no point begins later")
    parser.add_argument("--point-seconds", type=float, default=45.0, help="one point, its model's building included")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"timed steps of a point, after {WARMUP}")
    parser.add_argument("--calibrate", type=Path, help="first measure the machine into this file")
    parser.add_argument("--append", action="store_true", help="append to benchmarks/results")
    parser.add_argument("--self-test", action="store_true", help="miniatures on any device; writes nothing")
    parser.add_argument("--replay", type=Path, help="append the lines of this file instead of measuring")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; exit code 2 for an unknown model, 1 where no point could be measured."""
    options = parser_of().parse_args(arguments)
    if options.replay:
        given = options.replay.read_text().splitlines()
        append([BenchLine.model_validate_json(text) for text in given if text.startswith("{")])
        return 0
    models = tuple(name for name in options.models.split(",") if name)
    executors = tuple(options.executors.split(","))
    if unknown := [name for name in models if name not in SHAPES]:
        _say(f"unknown: {', '.join(unknown)}; known: {', '.join(SHAPES)}")
        return 2
    if options.worker == "calibrate":
        calibrate(options.calibrate)
        return 0
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    chosen = tiny_points(interpreted) if options.self_test else points(models, executors)
    if options.worker:
        asked = set(options.worker.split(","))
        own = [point for point in chosen if point.case in asked]
        dtype = torch.float32 if options.self_test else torch.bfloat16
        for found in run(own, dtype, options.limit_seconds, options.point_seconds, options.steps):
            sys.stdout.write(found.model_dump_json() + "\n")
            sys.stdout.flush()
        return 0
    script, env = [sys.executable, str(Path(__file__).resolve())], dict(os.environ)
    choose_allocator(env)
    if options.calibrate:
        beside = [*script, "--worker", "calibrate", "--calibrate", str(options.calibrate)]
        Supervised(beside, options.limit_seconds, _say, env).run_alone()
    common = [f"--models={options.models}", f"--executors={options.executors}", f"--steps={options.steps}"]
    common += [f"--point-seconds={options.point_seconds}"] + ["--self-test"] * options.self_test
    beside = Supervised([*script, *common], options.point_seconds, _say, env)
    measured = 0
    for text in beside.lines([point.case for point in chosen], options.limit_seconds):
        measured += 1
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if options.append and not options.self_test:
            append([BenchLine.model_validate_json(text)])
    return 0 if measured else 1


if __name__ == "__main__":
    raise SystemExit(main())
