"""Verification of many operators at once: one part for each suite and dtype, over processes.

Compiling is most of the time, and it is one core's work a process. Parts are answered in the order of the table,
whichever ends first. Checks that need most of the device's memory (far rows) run alone, at the end, and so does
again what found too little memory beside the others.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch
import triton

from shardwright.kernels.registry import OPERATORS, operator
from shardwright.kernels.verify import VerifyResult, verify_bad_input, verify_case, verify_far_rows, verify_repeats
from shardwright.schemas.errors import KernelError

MOST_JOBS = 16
REST, FAR = "repeats and bad input", "far rows"
POLL_S = 1.0
"""How often a verification asks whether it is late while no part ends."""


FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    KernelError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    triton.CompilationError,
    triton.OutOfResources,
)
"""What an operator that does not work may raise: it makes its part wrong, and the others go on."""


@dataclass(frozen=True)
class Part:
    """One piece of work: a dtype's name, ``REST`` or ``FAR``, of one suite of an operator."""

    op: str
    suite: int
    what: str

    def __str__(self) -> str:
        return f"{self.op}[{self.suite}] {self.what}"


def default_jobs(device: str) -> int:
    """As many as there are cores, at most ``MOST_JOBS``, on a CUDA device; else one."""
    return min(os.cpu_count() or 1, MOST_JOBS) if device.startswith("cuda") else 1


def parts(ops: Sequence[str] | None, device: str) -> tuple[Part, ...]:
    """All parts, in the order of the table.

    Raises:
        KernelError: ``unknown-operator``.
    """
    found = []
    for name in ops or tuple(OPERATORS):
        for at, suite in enumerate(operator(name).load_suites()):
            found += [Part(name, at, str(dtype).rpartition(".")[2]) for dtype in suite.dtypes]
            found.append(Part(name, at, REST))
            if device.startswith("cuda") and suite.far_rows is not None:
                found.append(Part(name, at, FAR))
    return tuple(found)


def run_part(part: Part, device: str) -> list[VerifyResult]:
    """One part, in this process.

    Raises:
        KernelError: what an operator's guards refuse.
    """
    suite = operator(part.op).load_suites()[part.suite]
    shapes = suite.small_shapes if device == "cpu" else (*suite.small_shapes, *suite.large_shapes)
    if part.what == FAR:
        assert suite.far_rows is not None
        found = [verify_far_rows(suite, suite.far_rows, suite.dtypes[0], device)]
    elif part.what == REST:
        found = [verify_repeats(suite, shapes[-1], suite.dtypes[0], device), *verify_bad_input(suite, device)]
    else:
        found = [r for shape in shapes for r in verify_case(suite, shape, getattr(torch, part.what), device)]
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return found


def answer(part: Part, device: str) -> list[VerifyResult] | None:
    """A part in a worker: failures are results; ``None`` where the device's memory does not hold it now."""
    try:
        return run_part(part, device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    except FAILURES as error:
        return broken(part, error)


def broken(part: Part, error: BaseException) -> list[VerifyResult]:
    """A part that gave no answer, as a failure."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return [
        VerifyResult(
            op=part.op, case=part.what, value="all", ok=False, error=None, eager_error=0.0, allowed=0.0, detail=text
        )
    ]


Keep = Callable[[Part, list[VerifyResult]], None]


def verify_in_jobs(
    ops: Sequence[str] | None, device: str, jobs: int, report: Callable[[str], None]
) -> dict[Part, list[VerifyResult]]:
    """Verify operators in ``jobs`` processes; with one job, in this one. See ``verify_parts``."""
    return verify_parts(parts(ops, device), device, jobs, report)


def verify_parts(
    work: Sequence[Part],
    device: str,
    jobs: int,
    report: Callable[[str], None],
    *,
    keep: Keep = lambda part, results: None,
    late: Callable[[], bool] = lambda: False,
) -> dict[Part, list[VerifyResult]]:
    """The results of each part, in the order of ``work``.

    A part that fails, or whose process dies, counts as wrong; the other parts go on.

    Args:
        report: called with a line as soon as a part ends.
        keep: called with a part's results as soon as they are known.
        late: asked between parts; once it is true no further part begins, and those that did not are left out.

    Raises:
        KernelError: ``unknown-operator``; with one job also what a guard refuses.
    """
    found: dict[Part, list[VerifyResult]] = {}
    if jobs <= 1:
        for part in work:
            if late():
                break
            found[part] = run_part(part, device)
            report(str(part))
            keep(part, found[part])
        return found
    found = _pool([part for part in work if part.what != FAR], device, jobs, report, keep, late)
    if not late():
        found |= _pool([part for part in work if part not in found], device, 1, report, keep, late)
    return {part: found[part] for part in work if part in found}


def processes(workers: int) -> Executor:
    """Fresh processes: a compiler's state, and what a wrong kernel does to a device, stay in one."""
    return ProcessPoolExecutor(max_workers=workers, mp_context=multiprocessing.get_context("spawn"))


def _pool(
    work: Sequence[Part],
    device: str,
    workers: int,
    report: Callable[[str], None],
    keep: Keep,
    late: Callable[[], bool],
) -> dict[Part, list[VerifyResult]]:
    """Answers of all parts that began; with more than one worker, without those that the device's memory did not
    hold."""
    found: dict[Part, list[VerifyResult]] = {}
    with processes(max(1, min(workers, len(work)))) as pool:
        asked = {pool.submit(answer, part, device): part for part in work}
        pending = set(asked)
        while pending:
            ended, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
            for future in ended:
                part = asked[future]
                results = _results(part, future, alone=workers == 1)
                if results is None:
                    report(f"{part}: too little memory beside the others, again alone")
                    continue
                found[part] = results
                report(str(part))
                keep(part, results)
            if late():
                pending = {future for future in pending if not future.cancel()}
    return found


def _results(part: Part, future: Future[list[VerifyResult] | None], *, alone: bool) -> list[VerifyResult] | None:
    """What a worker answered; ``None`` where memory lacked beside others."""
    try:
        results = future.result()
    except BrokenProcessPool as error:
        return broken(part, error)
    if results is None and alone:
        return broken(part, torch.OutOfMemoryError("alone on the device"))
    return results
