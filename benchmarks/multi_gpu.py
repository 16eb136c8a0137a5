"""Several devices of one host over NCCL, or a rehearsal of every step over gloo on CPU ranks.

``python benchmarks/multi_gpu.py SUBCOMMAND [--devices N] [--rehearse] [--models M,...] [--limit-seconds 480]``

- ``calibrate``: curves of collectives (even and skewed), products and copies into a calibration file;
- ``parity``: the runtime's families on FSDP, EP and both against one rank, fp32 and bf16, fused where kernels run;
- ``steps``: real-size steps on at most six plans a model, predicted beside measured, rank correlation;
- ``overlap``: share of the experts' exchanges that nothing covers, from a profiler's timeline;
- ``scaling``: the same step a rank on 1, 2, 4, … devices, by FSDP and by EP;
- ``faults``: kill one worker, go on with half of the ranks;
- ``all``: every one of them, within the limit;
- ``report FILE...``: result lines from raw results of another machine, with predictions made here.

Raw results (one JSON a line) go to stdout and to ``--out`` as they come; a call that finds earlier ones there, or in
``--before``, does only what they lack. ``--append`` or ``report`` turns them into lines of ``benchmarks/results``,
cases ``multi-gpu-N/...`` (``multi-cpu-N/...`` for a rehearsal, never appended). Every child runs under ``timeout -k``.
NVLink multicast stays off. Exit codes: 0 all is there, 1 something failed, 2 the limit came first: the same command
goes on.

On 4 × H200, twice with nine minutes each::

    python benchmarks/multi_gpu.py all --devices 4 --limit-seconds 480 --out OUT/raw.jsonl [--before FIRST/raw.jsonl]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from multi_gpu_cases import scaling_worlds
from multi_gpu_lines import COMPLETE, ENDED, Raw, lines_of, wrong
from multi_gpu_run import LEAST_S, ranks, whole

ORDER = ("calibrate", "parity", "faults", "scaling", "overlap", "steps")
"""Of ``all``: what is short first, so that a limit cuts only steps, whose cases are kept one by one."""
CAP_S = {"calibrate": 150.0, "parity": 180.0, "faults": 150.0, "scaling": 180.0, "overlap": 120.0}
"""The longest that one part may take of a call's limit on devices, seconds; steps take what is left."""


def run(
    what: str, given: argparse.Namespace, work: Path, limit_s: float, done: set[str], tell: Callable[[Raw], None]
) -> None:
    """One subcommand; its results go to ``tell`` as they come."""
    began = time.monotonic()

    def left() -> float:
        return limit_s - (time.monotonic() - began)

    if what == "faults":
        from multi_gpu_faults import DrillFailed, drill_name, faults

        try:
            found = faults(work, given.devices, "cpu" if given.rehearse else "cuda", limit_s)
        except DrillFailed as failed:
            sys.stderr.write(f"faults: {failed}\n")
            tell({"kind": what, "case": ENDED, "metrics": {"exit_code": 1.0}})
            return
        tell({"kind": what, "case": drill_name(given.devices), "metrics": found})
        tell({"kind": what, "case": COMPLETE, "metrics": {"seconds": time.monotonic() - began}})
    elif what == "parity":
        parts: list[Raw] = []
        ranks(what, 1, given, work, limit_s / 2, set(), lambda one: _of_a_part(one, tell, parts))
        if parts:
            ranks(what, given.devices, given, work, left(), done, tell)
    elif what == "scaling":
        worlds, parts = scaling_worlds(given.devices), []
        for count in worlds:
            if left() >= LEAST_S:
                ranks(what, count, given, work, left(), done, lambda one: _of_a_part(one, tell, parts))
        if len(parts) == len(worlds):
            tell({"kind": what, "case": COMPLETE, "metrics": {"seconds": time.monotonic() - began}})
    else:
        ranks(what, given.devices, given, work, limit_s, done, tell)


def _of_a_part(one: Raw, tell: Callable[[Raw], None], parts: list[Raw]) -> None:
    """Hand on a result of one number of ranks, but that it is whole: that makes no whole subcommand."""
    if one["case"] == COMPLETE:
        parts.append(one)
    else:
        tell(one)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 where a run ended early or a drill failed, 2 where the limit came first."""
    parser = argparse.ArgumentParser(prog="multi_gpu.py")
    parser.add_argument("what", choices=(*ORDER, "all", "report"))
    parser.add_argument("files", nargs="*", type=Path, help="raw results, for report")
    parser.add_argument("--devices", type=int, help="ranks on this host; all GPUs unless told")
    parser.add_argument("--rehearse", action="store_true", help="gloo on CPU ranks, miniatures")
    parser.add_argument(
        "--models", default="qwen3-30b,kimi-linear-48b", help="of steps; overlap and scaling: the first"
    )
    parser.add_argument(
        "--limit-seconds", type=float, default=480.0, help="hard limit of the measurements of this call"
    )
    parser.add_argument("--skip", default="", help="with all: subcommands to leave out")
    parser.add_argument("--calibration", type=Path, help="written by calibrate, read by report")
    parser.add_argument("--out", type=Path, help="also append raw results here as they come; earlier ones are kept")
    parser.add_argument("--before", type=Path, nargs="*", default=[], help="raw results of earlier calls")
    parser.add_argument("--append", action="store_true", help="append result lines to benchmarks/results")
    given = parser.parse_args(arguments)
    given.calibration = given.calibration or Path(tempfile.gettempdir()) / "multi-gpu-calibration.json"
    if given.what == "report":
        raw = read_raw(given.files)
        given.devices = given.devices or next(int(one["devices"]) for one in raw)
        unpack_calibration(raw, given.calibration)
        missing: list[str] = []
    else:
        given.devices = given.devices or _devices()
        raw, missing = _measured(given)
    prefix = "multi-cpu" if given.rehearse else "multi-gpu"
    fields = lines_of(raw, given.devices, given.calibration, prefix)
    for one in fields:
        sys.stderr.write(f"{one['case']}: {json.dumps(one['metrics'])}\n")
    if given.append and not given.rehearse:
        from lines import append, line

        facts = {key: raw[0][key] for key in ("device", "versions", "commit", "date") if key in raw[0]}
        append([line({**facts, **one}) for one in fields])
    if missing:
        sys.stderr.write(f"not whole: {', '.join(missing)}; the same command with these results goes on\n")
    if any(wrong(one) for one in raw if one["case"] != ENDED or not whole(one["kind"], raw)) or not raw:
        return 1
    return 2 if missing else 0


def read_raw(paths: list[Path]) -> list[Raw]:
    """Raw results of files, in order; a last line that a kill cut is left out."""
    found: list[Raw] = []
    for path in paths:
        for text in path.read_text().splitlines(keepends=True):
            if text.strip() and text.endswith("\n"):
                found.append(json.loads(text))
    return found


def unpack_calibration(raw: list[Raw], path: Path) -> None:
    """Write the calibration that raw results carry, where the file is not there."""
    carried: list[Any] = [one["calibration"] for one in raw if "calibration" in one]
    if carried and not path.is_file():
        path.write_text(json.dumps(carried[-1]))


def _measured(given: argparse.Namespace) -> tuple[list[Raw], list[str]]:
    """(all raw results, earlier ones first; parts that are not whole)."""
    from lines import line

    facts = line({"bench": "multi", "case": "facts"}).model_dump(include={"device", "versions", "commit", "date"})
    if given.out and given.out.is_file():
        kept = given.out.read_bytes()
        given.out.write_bytes(kept[: kept.rfind(b"\n") + 1])
    paths = [*given.before, *([given.out] if given.out and given.out.is_file() else [])]
    began, raw = time.monotonic(), read_raw(paths)
    unpack_calibration(raw, given.calibration)

    def tell(one: Raw) -> None:
        one |= {"devices": given.devices, **facts}
        text = json.dumps(one) + "\n"
        sys.stdout.write(text)
        sys.stdout.flush()
        if given.out:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            with given.out.open("a") as file:
                file.write(text)
        raw.append(one)

    skipped = given.skip.split(",")
    asked = [one for one in (ORDER if given.what == "all" else (given.what,)) if one not in skipped]
    for what in asked:
        if whole(what, raw):
            continue
        left = given.limit_seconds - (time.monotonic() - began)
        if left < LEAST_S:
            sys.stderr.write(f"{what}: not begun, {left:.0f} s are left\n")
            continue
        capped = given.what == "all" and not given.rehearse
        limit_s = min(left, CAP_S.get(what, left)) if capped else left
        done = {one["case"] for one in raw if one["kind"] == what and one["case"] != ENDED}
        with tempfile.TemporaryDirectory() as work:
            run(what, given, Path(work), limit_s, done, tell)
        sys.stderr.write(f"{what}: {time.monotonic() - began:.0f} s since the start\n")
    return raw, [what for what in asked if not whole(what, raw)]


def _devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 2


if __name__ == "__main__":
    raise SystemExit(main())
