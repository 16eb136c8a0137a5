"""Training steps of real-size models on one device, ours beside transformers + PEFT in the same call.

``python benchmarks/train_step.py [CASE ...] [--layers N] [--steps N] [--fusions moe_layer,router,...] [--recorded]
[--trace FILE] [--append]``

Random weights, LoRA r = 16, activation checkpointing, bf16 base, fp32 adapters and fp32 AdamW on both sides. The rival
recomputes every layer; ours as a plan may, all but ``whole_layers`` of the line (``--whole``). Each case prints one
result line: tokens per second, and ``dynamic_ratio`` = our (peak − weights) ÷ the rival's. ``--check``
copies the rival's weights into ours and compares the first loss (two models in memory: cut the layers).
``--recorded`` runs our side alone, beside what the rival was measured at before (``train_step_rivals.json``).
``--trace`` writes where the device time of one more step of ours went, by kernel.
``--self-test`` runs a tiny shape in fp32 on any device, with that check, without fusions unless named, and writes
nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lines import append, line, versions
from torch import Tensor
from train_step_cases import CASES, SELF_TEST, Case
from train_step_decisions import FUSIONS, WITHOUT, with_beside
from train_step_ours import Ours, build_ours, copy_base
from train_step_rival import build_rival
from train_step_trace import by_kernel

WARMUP = 2
RECORDED = Path(__file__).resolve().parent / "train_step_rivals.json"
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Timed:
    """What some steps took: median seconds, bytes before the first step, and the peak."""

    seconds: float
    weights: int
    peak: int
    losses: tuple[float, ...]
    trainable: int

    @property
    def dynamic(self) -> int:
        return self.peak - self.weights


def recorded(case: Case) -> Timed:
    """The rival as it was measured before.

    Raises:
        SystemExit: it was not, for this case.
    """
    known = json.loads(RECORDED.read_text()).get(case.name)
    if known is None:
        raise SystemExit(f"{case.name}: {RECORDED.name} holds no measurement")
    return Timed(
        known["step_s"], known["weights_bytes"], known["peak_bytes"], (known["last_loss"],) * 2, known["trainable"]
    )


def measure(build: Callable[[], Any], ids: Tensor, steps: int, traced: dict[str, Any] | None = None) -> Timed:
    """Build, step, forget. The peak covers the steps alone, warm-up included.

    Args:
        traced: filled with where the device time of one more step goes.
    """
    side = build()
    weights = _allocated()
    _reset_peak()
    times, losses = [], []
    for _ in range(WARMUP + steps):
        _wait()
        began = time.perf_counter()
        losses.append(side.step(ids))
        _wait()
        times.append(time.perf_counter() - began)
    found = Timed(statistics.median(times[WARMUP:]), weights, _peak(), tuple(losses), side.trainable)
    if traced is not None:
        traced.update(by_kernel(side.step, ids))
    del side
    _free()
    return found


def compare(
    case: Case, ours: Timed, theirs: Timed, fusions: Sequence[str], checked: float | None, before: bool
) -> dict[str, Any]:
    """The fields of a result line."""
    rate, rival_rate = case.tokens / ours.seconds, case.tokens / theirs.seconds
    metrics = {
        "step_s": round(ours.seconds, 5),
        "rival_step_s": round(theirs.seconds, 5),
        "weights_bytes": float(ours.weights),
        "rival_weights_bytes": float(theirs.weights),
        "rival_peak_bytes": float(theirs.peak),
        "trainable": float(ours.trainable),
        "whole_layers": float(case.whole),
        "rival_trainable": float(theirs.trainable),
        "first_loss": round(ours.losses[0], 5),
        "last_loss": round(ours.losses[-1], 5),
        **{f"fused_{name}": 1.0 for name in with_beside(tuple(fusions))},
    }
    if not before:
        metrics["rival_first_loss"] = round(theirs.losses[0], 5)
    if theirs.dynamic > 0:
        metrics["dynamic_ratio"] = round(ours.dynamic / theirs.dynamic, 4)
    if checked is not None:
        metrics["first_loss_difference"] = checked
    known = {"versions": {**versions(), "rival": json.loads(RECORDED.read_text())["measured"]}} if before else {}
    return {
        **known,
        "bench": "train-step",
        "case": case.name,
        "passes": "step",
        "unit": "tok/s",
        "ours": round(rate, 2),
        "rival": "transformers+peft",
        "rival_value": round(rival_rate, 2),
        "ratio": round(rate / rival_rate, 4),
        "peak_bytes": ours.peak,
        "metrics": metrics,
    }


def first_losses_equal(case: Case, fusions: tuple[str, ...], ids: Tensor) -> float:
    """Relative difference of the first loss with the rival's weights in ours.

    Raises:
        SystemExit: where it is more than rounding.
    """
    theirs = build_rival(case)
    ours: Ours = build_ours(case, fusions)
    copy_base(ours.model, theirs.model)
    with torch.no_grad():
        mine, plain = float(ours.loss(ids)), float(theirs.loss(ids))
    del ours, theirs
    _free()
    error = abs(mine - plain) / abs(plain)
    if not error <= LOSS_TOLERANCE[case.dtype]:
        raise SystemExit(f"{case.name}: first loss {mine} against {plain} with the same weights")
    return error


def run_case(
    case: Case, fusions: tuple[str, ...], steps: int, check: bool, before: bool, traced: dict[str, Any] | None
) -> dict[str, Any]:
    """Both sides of a case; the rival first, so that ours meets the used allocator.

    Args:
        before: take the rival's recorded measurement.
        traced: as ``measure``, for our side.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, case.config["vocab_size"], (case.batch, case.sequence), generator=generator).to(device)
    checked = first_losses_equal(case, fusions, ids) if check else None
    theirs = recorded(case) if before else measure(lambda: build_rival(case), ids, steps)
    ours = measure(lambda: build_ours(case, fusions), ids, steps, traced)
    return compare(case, ours, theirs, fusions, checked, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; exit code 2 for an unknown one."""
    parser = argparse.ArgumentParser(prog="train_step.py")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; without the first part too")
    parser.add_argument("--layers", type=int, help="only the first N layers")
    parser.add_argument("--whole", type=int, help="layers of ours that are not recomputed; the case's own unless told")
    parser.add_argument("--steps", type=int, default=5, help="timed steps after two of warm-up")
    parser.add_argument("--fusions", help=f"operators to install, empty for none; {','.join(FUSIONS)} unless told")
    parser.add_argument("--check", action="store_true", help="compare the first loss on the rival's weights")
    parser.add_argument(
        "--recorded", action="store_true", help="our side alone, beside the rival's earlier measurement"
    )
    parser.add_argument("--trace", type=Path, help="file for the device time of one more step of ours, by kernel")
    parser.add_argument("--append", action="store_true", help="append to benchmarks/results")
    parser.add_argument("--self-test", action="store_true", help="a tiny shape on any device; writes nothing")
    options = parser.parse_args(arguments)
    default = "" if options.self_test else ",".join(FUSIONS)
    named = default if options.fusions is None else options.fusions
    fusions = tuple(name for name in named.split(",") if name)
    if options.self_test:
        chosen, check = [SELF_TEST], True
    else:
        names = [name if "/" in name else f"train-step/{name}" for name in options.cases] or list(CASES)[:2]
        if unknown := [name for name in names if name not in CASES]:
            sys.stderr.write(f"unknown: {', '.join(unknown)}; known: {', '.join(CASES)}\n")
            return 2
        chosen, check = [CASES[name] for name in names], options.check
    traces: dict[str, Any] = {}
    for case in chosen:
        cut = case.with_layers(options.layers) if options.layers else case
        cut = cut if options.whole is None else replace(cut, whole=options.whole)
        used = tuple(name for name in fusions if name not in WITHOUT[cut.config_class])
        traced = traces.setdefault(cut.name, {}) if options.trace else None
        found = line(run_case(cut, used, options.steps, check, options.recorded, traced))
        sys.stdout.write(found.model_dump_json() + "\n")
        sys.stdout.flush()
        if options.append and not options.self_test:
            append([found])
        if options.trace:
            options.trace.write_text(json.dumps(traces, indent=1))
    return 0


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _allocated() -> int:
    return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0


def _peak() -> int:
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0


def _reset_peak() -> None:
    _free()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
