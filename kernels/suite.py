"""Verify, then time, all operators on this machine's device, from source.

``PYTHONPATH=src python3 -m shardwright.kernels.suite [--ops OP ...] [--cases PREFIX ...] [--jobs N] [--out DIR]
[--evidence FILE] [--verify-only | --bench-only]`` needs torch, triton and pydantic. Operators are verified in N
processes, then timed in one alone. Those with anything wrong are not timed, and the exit code is 1. Result lines
are written as they are measured.

With ``--plan NAME`` (``suite_plan``) the work goes in calls of at most ``--limit-s`` seconds, the most important first.
A call writes each piece as it ends and skips what the records in ``--out`` or ``--before`` name as done; its exit code
is 75 while pieces are left: call again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from shardwright.kernels.bench import bench_all, bench_one
from shardwright.kernels.registry import OPERATORS
from shardwright.kernels.suite_calls import Call, Outcome, Records, TimedPass, Tools
from shardwright.kernels.suite_plan import LIMIT_S, plan_of
from shardwright.kernels.verify import VerifyResult
from shardwright.kernels.verify_jobs import default_jobs, verify_in_jobs, verify_parts
from shardwright.kernels.where import Where
from shardwright.schemas.bench import BenchLine
from shardwright.schemas.errors import ShardwrightError


def verify_table(results: Sequence[VerifyResult]) -> str:
    """A line for each operator and dtype, and one for each failure."""
    groups: dict[str, list[VerifyResult]] = {}
    for result in results:
        groups.setdefault(f"{result.op} {result.case.split('/')[0]}", []).append(result)
    lines = []
    for label, members in groups.items():
        worst = max(r.error / r.allowed if r.error is not None and r.allowed else 0.0 for r in members)
        passed = sum(r.ok for r in members)
        lines.append(f"{label}: {passed} of {len(members)} right, worst error {worst:.2f} of what is allowed")
        lines += [
            f"  WRONG {r.case} {r.value}: {r.error}, allowed {r.allowed:.2e}, eager {r.eager_error:.2e} {r.detail}"
            for r in members
            if not r.ok
        ]
    return "\n".join(lines) + "\n"


HEADS = ("case", "passes", "ours", "rival", "rival's", "ratio", "floor", "of floor", "launches", "peak MiB")


def bench_rows(lines: Sequence[BenchLine]) -> list[tuple[str, ...]]:
    """One row for each line that has a time of ours."""
    return [
        (
            line.case,
            line.passes,
            f"{line.ours:.4f} {line.unit}",
            line.rival or "-",
            "-" if line.rival_value is None else f"{line.rival_value:.4f}",
            "-" if line.ratio is None else f"{line.ratio:.2f}",
            "-" if line.floor is None else f"{line.floor:.4f}",
            "-" if not line.floor else f"{100 * line.floor / line.ours:.0f} %",
            f"{line.metrics.get('launches', 0):.0f}",
            "-" if line.peak_bytes is None else f"{line.peak_bytes / 2**20:.0f}",
        )
        for line in lines
        if line.ours
    ]


def bench_table(lines: Sequence[BenchLine]) -> str:
    """One table: a row for each case and pass, columns aligned."""
    rows = [HEADS, *bench_rows(lines)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADS))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def progress(line: BenchLine) -> None:
    """One line to the error stream as soon as it is measured, with all its further numbers."""
    text = "  ".join(bench_rows([line])[0]) if line.ours else line.case
    further = ", ".join(f"{name} {value:g}" for name, value in sorted(line.metrics.items()))
    sys.stderr.write(f"{text}  ({further})\n")
    sys.stderr.flush()


def say(text: str) -> None:
    """One line of progress to the error stream."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def verified(ops: Sequence[str] | None, device: str, jobs: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Verify operators and print one table; those that are right, and those with anything wrong."""
    found = verify_in_jobs(ops, device, jobs, say)
    sys.stdout.write(verify_table([result for results in found.values() for result in results]))
    sys.stdout.flush()
    names = tuple(dict.fromkeys(part.op for part in found))
    wrong = {result.op for results in found.values() for result in results if not result.ok}
    return tuple(name for name in names if name not in wrong), tuple(name for name in names if name in wrong)


LEFT = 75
"""Exit code of a call after which pieces are left."""


def call_tools(device: str, jobs: int, out: Path, evidence: Path | None) -> Tools:
    """What a call of a plan works with: the operators on this device, and its clock."""
    where: list[Where] = []

    def timed(pass_: TimedPass) -> str:
        if not where:
            where.append(Where.here())
        line = bench_one(pass_.suite, pass_.case, pass_.name, where[0], out, evidence)
        progress(line)
        return f"{line.ours} {line.unit}, ratio {line.ratio}"

    return Tools(
        verify=lambda work, keep, late: verify_parts(work, device, jobs, say, keep=keep, late=late),
        time=timed,
        clock=time.monotonic,
        say=say,
    )


def run_call(plan: str, before: Sequence[Path], out: Path, device: str, limit_s: float, tools: Tools) -> Outcome:
    """One call of a plan; see ``suite_calls``."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    return Call(Records(out, before), name, limit_s, tools).run(plan_of(plan), device)


def told(outcome: Outcome) -> int:
    """Say how a call ended; its exit code."""
    say(f"{len(outcome.done)} pieces done, {len(outcome.left)} left")
    if outcome.wrong:
        say(f"wrong, and not timed: {', '.join(outcome.wrong)}")
        return 1
    return LEFT if outcome.left else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Verify and time the fused operators on this device.")
    parser.add_argument("--ops", nargs="*", default=None, choices=tuple(OPERATORS))
    parser.add_argument("--cases", nargs="*", default=[""], help="prefixes of the cases to time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--evidence", type=Path, default=None)
    parser.add_argument("--jobs", type=int, default=None, help="processes that verify; all cores on a GPU machine")
    parser.add_argument("--verify-only", action="store_true")
    parser.add_argument("--bench-only", action="store_true", help="time what was verified before")
    parser.add_argument("--plan", default=None, help="in calls: experts, everything, or a JSON file of steps")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds of one call of a plan")
    parser.add_argument("--before", nargs="*", type=Path, default=(), help="folders with records of earlier calls")
    chosen = parser.parse_args(arguments)
    jobs = default_jobs(chosen.device) if chosen.jobs is None else chosen.jobs
    try:
        if chosen.plan is not None:
            tools = call_tools(chosen.device, jobs, chosen.out, chosen.evidence)
            return told(run_call(chosen.plan, chosen.before, chosen.out, chosen.device, chosen.limit_s, tools))
        right, wrong = (chosen.ops, ()) if chosen.bench_only else verified(chosen.ops, chosen.device, jobs)
        if not chosen.verify_only and right != ():
            lines = bench_all(right, chosen.out, chosen.evidence, cases=chosen.cases, report=progress)
            sys.stdout.write(bench_table(lines))
        if wrong:
            say(f"wrong, and not timed: {', '.join(wrong)}")
            return 1
    except ShardwrightError as error:
        sys.stderr.write(error.text() + "\n")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
