"""The fused operators on this machine: verified on a device or in Triton's interpreter, timed and tuned on a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.kernels.called import Called
    from shardwright.kernels.verify import VerifyResult
    from shardwright.schemas.bench import BenchLine
    from shardwright.schemas.tuned import TunedFile


def verify_operators(ops: list[str] | None) -> list[VerifyResult]:
    """All comparisons of the named operators (all where ``None``).

    Raises:
        KernelError: ``unknown-operator``, or what keeps the interpreter from running here.
    """
    import torch

    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        from shardwright.kernels.interpreter import install

        install()
    from shardwright.kernels.verify import verify_all

    return verify_all(ops, "cuda" if cuda else "cpu")


def bench_operators(
    ops: list[str] | None, out: Path, evidence: Path | None, cases: Sequence[str], say: Callable[[str], None]
) -> tuple[list[BenchLine], tuple[str, ...]]:
    """Time operators on this machine's CUDA device; the lines, and the operators that are wrong here.

    A plan runs what the evidence says is faster. So where evidence is asked for, each operator is verified on the
    device first, and one with anything wrong is not timed.

    Args:
        evidence: the store that the times are added to; ``None``: they are only shown and kept as result lines.
        cases: beginnings of the names of the cases to time.
        say: told what is being verified.

    Raises:
        KernelError: ``no-device``, ``unknown-operator`` or ``no-case``.
    """
    import torch

    from shardwright.kernels.bench import bench_all
    from shardwright.kernels.registry import OPERATORS, operator
    from shardwright.kernels.suite import progress

    chosen: Sequence[str] | None = ops
    wrong: tuple[str, ...] = ()
    if evidence is not None and torch.cuda.is_available():
        timed = [
            name
            for name in ops or tuple(OPERATORS)
            for suite in operator(name).load_suites()
            if any(case.case.startswith(tuple(cases)) for case in suite.bench)
        ]
        wrong = _wrong(timed, say)
        chosen = [name for name in dict.fromkeys(timed) if name not in wrong] if timed else ops
    if chosen is not None and not chosen:
        return [], wrong
    return bench_all(chosen, out, evidence, cases=cases, report=progress), wrong


def _wrong(ops: Sequence[str], say: Callable[[str], None]) -> tuple[str, ...]:
    """Those of some operators that are wrong on this machine's CUDA device."""
    from shardwright.kernels.verify_jobs import default_jobs, verify_in_jobs

    found = verify_in_jobs(tuple(dict.fromkeys(ops)), "cuda", default_jobs("cuda"), say) if ops else {}
    return tuple(dict.fromkeys(r.op for results in found.values() for r in results if not r.ok))


def bench_called(
    calls: Sequence[Called], device: str, out: Path, evidence: Path | None, say: Callable[[str], None]
) -> tuple[list[BenchLine], tuple[str, ...]]:
    """Time calls of operators, such as a plan's, on this machine's CUDA device; otherwise as ``bench_operators``.

    Args:
        device: name of the one that the times are for; on another they would be evidence of nothing.

    Raises:
        KernelError: ``no-device``.
        UsageError: ``other-device``.
    """
    import torch

    from shardwright.kernels.bench import bench_chosen, demand_device
    from shardwright.kernels.suite import progress
    from shardwright.schemas.errors import UsageError

    demand_device()
    if (here := torch.cuda.get_device_name()) != device:
        raise UsageError(
            "other-device",
            f"the plan is for {device}; this machine has {here}",
            where="--plan",
            next_action=f"time it there; if this is that device, name it {here!r} in the cluster file and plan again",
        )
    chosen = [pair for called in calls for pair in called.pair]
    wrong = _wrong([suite.op for suite, _ in chosen], say) if evidence is not None else ()
    right = [(suite, case) for suite, case in chosen if suite.op not in wrong]
    return (bench_chosen(right, out, evidence, report=progress) if right else []), wrong


def tune_operators(ops: list[str] | None, out: Path | None, report: Callable[[str], None]) -> TunedFile:
    """Choose launch configurations on this machine's CUDA device and write its file.

    Raises:
        KernelError: ``no-device``, ``unknown-operator`` or ``default-wrong``.
    """
    from shardwright.kernels.tune import tune

    return tune(ops, out, report)
