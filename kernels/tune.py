"""Choose launch configurations on this device and write them to its data file. Workers never do this.

``PYTHONPATH=src python3 -m shardwright.kernels.tune [--ops OP ...] [--out FILE]``, or ``shardwright kernels
tune``. Every candidate is compared with fp64 in NaN-filled memory before it is timed; a wrong one is never
chosen, one that does not fit is left out. The default in code stays where nothing is clearly faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from triton import OutOfResources

from shardwright.kernels import tuned
from shardwright.kernels.cases import Run, TuneCase
from shardwright.kernels.registry import OPERATORS, code_sha256, operator
from shardwright.kernels.timing import median_ms
from shardwright.kernels.verify import poisoned_memory, relative_error
from shardwright.kernels.where import environment
from shardwright.schemas.errors import KernelError, ShardwrightError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.tuned import TunedEntry, TunedFile

LARGEST_ERROR = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-4}
"""Relative to fp64: rounding of the result, with room for the order of sums."""

CLEARLY = 0.98
"""A choice must take at most this share of the default's time: nearer ones are noise."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """One candidate: its time, or why it has none."""

    choice: Any
    ms: float | None
    remark: str = ""


def right(produced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether every value lies as near to fp64 as its dtype lets it."""
    return all(relative_error(got, exact) <= LARGEST_ERROR[got.dtype] for got, exact in produced)


def try_choice(
    op: str, case: TuneCase, choice: Any, run: Run, check: Callable[[], Any], time: Callable[[Run], float]
) -> Tried:
    """Check one choice, then time it."""
    with tuned.override(op, case.kernel, choice):
        try:
            with poisoned_memory():
                run()
            if not right(check()):
                return Tried(choice, None, "wrong")
            return Tried(choice, time(run))
        except OutOfResources as error:
            return Tried(choice, None, str(error)[:80])


def tune_case(
    op: str, case: TuneCase, time: Callable[[Run], float] = median_ms
) -> tuple[TunedEntry | None, list[Tried]]:
    """The entry for one kernel and bucket, ``None`` where the default stands; and all that was tried.

    Raises:
        KernelError: ``default-wrong`` where the choice in code fails its own check.
    """
    run, check = case.prepare()
    choices = [case.default, *(choice for choice in case.candidates if choice != case.default)]
    tried = [try_choice(op, case, choice, run, check, time) for choice in choices]
    default = tried[0].ms
    if default is None:
        raise KernelError(
            "default-wrong",
            f"{case.default} {tried[0].remark}",
            where=f"{op}/{case.kernel}/{case.bucket}",
            next_action="run `shardwright kernels verify`: the operator itself is wrong here",
        )
    best = min((t for t in tried if t.ms is not None), key=lambda t: t.ms or 0.0)
    if best.ms is None or best.ms > CLEARLY * default:
        return None, tried
    entry = TunedEntry(
        op=op,
        kernel=case.kernel,
        bucket=case.bucket,
        choice=dataclasses.asdict(best.choice),
        code_sha256=code_sha256(op),
        median_ms=round(best.ms, 5),
        default_ms=round(default, 5),
        candidates=len(tried),
    )
    return entry, tried


def merged(old: TunedFile | None, ops: Sequence[str], entries: Sequence[TunedEntry], device: str) -> TunedFile:
    """A device's file with the entries of the named operators replaced, sorted."""
    kept = [entry for entry in (old.entries if old else ()) if entry.op not in ops]
    ordered = sorted((*kept, *entries), key=lambda entry: (entry.op, entry.kernel, entry.bucket))
    return TunedFile(device=device, versions=environment(), entries=tuple(ordered))


def tune(ops: Sequence[str] | None, out: Path | None, report: Callable[[str], None]) -> TunedFile:
    """Tune operators on the current device; write its file.

    Args:
        ops: operator names; all that declare tune cases where ``None``.
        out: the file; the shipped place of this device where ``None``.
        report: called with one line for each kernel and bucket.

    Raises:
        KernelError: ``no-device``, ``unknown-operator`` or ``default-wrong``.
    """
    if not torch.cuda.is_available():
        raise KernelError(
            "no-device",
            "torch sees no CUDA device",
            where="kernels.tune",
            next_action="tune on the GPU machine that workers will use; elsewhere the defaults in code stand",
        )
    device = torch.cuda.get_device_name()
    path = out or tuned.path(tuned.slug(device))
    chosen = tuple(ops or OPERATORS)
    entries: list[TunedEntry] = []
    for name in chosen:
        for suite in operator(name).load_suites():
            for case in () if suite.tune is None else suite.tune():
                entry, tried = tune_case(name, case)
                report(line_of(name, case, entry, tried))
                entries += [entry] if entry is not None else []
                torch.cuda.empty_cache()
    file = merged(tuned.parse(path) if path.is_file() else None, chosen, entries, device)
    write_atomic(path, (file.model_dump_json(indent=1) + "\n").encode())
    tuned.forget()
    return file


def line_of(op: str, case: TuneCase, entry: TunedEntry | None, tried: Sequence[Tried]) -> str:
    """What was chosen, beside the default, and how many candidates could not be."""
    wrong = sum(t.ms is None for t in tried)
    if entry is None:
        stands = f"default stands at {tried[0].ms:.4f} ms"
    else:
        stands = f"{entry.choice} {entry.median_ms:.4f} ms, default {entry.default_ms:.4f} ms"
    return f"{op}/{case.kernel}/{case.bucket}: {stands}; {len(tried)} tried, {wrong} refused"


def say(text: str) -> None:
    """One line on stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Choose launch configurations on this device.")
    parser.add_argument("--ops", nargs="*", default=None, choices=tuple(OPERATORS))
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args(arguments)
    try:
        tune(chosen.ops, chosen.out, say)
    except ShardwrightError as error:
        sys.stderr.write(error.text() + "\n")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
