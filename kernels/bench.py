"""Time fused operators beside their rivals, in one process, and write result lines and evidence.

Every pass is timed alone (``kernels.passes``). A line states its floor, the larger of bytes and flops over
ceilings that stand in the line, the fraction of it that ours reaches, launches, peak memory, and whatever else
its suite declares. The inputs of the shipped cases are several times the second-level cache, which is flushed
besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from shardwright.kernels.cases import BenchCase, Function, OpSuite, Run
from shardwright.kernels.evidence import EvidenceStore, shape_bucket
from shardwright.kernels.floors import Ceilings, floor_of, floor_parts
from shardwright.kernels.passes import timed_pass
from shardwright.kernels.registry import OPERATORS, operator, source_sha256
from shardwright.kernels.timing import device_ms, launches, median_ms, peak_bytes
from shardwright.kernels.tuned import slug
from shardwright.kernels.where import Where, commit
from shardwright.schemas.bench import BenchLine
from shardwright.schemas.errors import KernelError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.ops import MeasuredTime, PassName

BENCH = "kernels"
REPEATS = 3
"""Each median is taken this many times, ours and rivals in turn; the smallest stands."""

PROVIDERS = {"ours": "shardwright", "eager": "eager", "torch.compile": "compile", "F.rms_norm": "torch"}
"""Names in result lines → provider names in the evidence store."""


def bench_pass(
    suite: OpSuite, case: BenchCase, name: str, functions: Mapping[str, Function]
) -> tuple[dict[str, float], dict[str, float], int, dict[str, float]]:
    """Time one pass of each function, ``ours`` first.

    Returns:
        Median ms of each; the device-busy ms of each; the peak bytes of ours; and for each rival that is left out
        ``NAME_out_of_memory: 1``, where this device's memory does not hold it, or ``NAME_refused: 1``, where it
        does not run here (flash-linear-attention 0.6.0 refuses its gated backward with Triton 3.4 to 3.7.0).
    """
    runs, refused = {}, {}
    for who, function in functions.items():
        try:
            runs[who] = timed_pass(suite, case, function, name)
            runs[who]()
        except RuntimeError as error:
            if who == "ours":
                raise
            runs.pop(who, None)
            reason = "out_of_memory" if isinstance(error, torch.OutOfMemoryError) else "refused"
            refused[f"{who}_{reason}"] = 1.0
            torch.cuda.empty_cache()
    peak = peak_bytes(runs["ours"])
    times = rounds(runs)
    busy = {who: device_ms(run) for who, run in runs.items()}
    return times, busy, peak, refused


def rounds(runs: Mapping[str, Run]) -> dict[str, float]:
    """Median ms of each run, in turns, ``REPEATS`` times; the smallest stands."""
    times: dict[str, float] = {}
    for _ in range(REPEATS):
        for who, run in runs.items():
            times[who] = min(times.get(who, float("inf")), median_ms(run))
    return times


def extra_metrics(suite: OpSuite, case: BenchCase, name: str) -> dict[str, float]:
    """Further timings and facts that the suite declares, with our time of the same round beside them."""
    metrics = {} if suite.facts is None else dict(suite.facts(case))
    if suite.extras is None:
        return metrics
    runs = dict(suite.extras(case, name))
    if runs:
        times = rounds({"ours": timed_pass(suite, case, suite.fused, name), **runs})
        for who in runs:
            metrics |= {f"{who}_ms": round(times[who], 5), f"ours_over_{who}": round(times["ours"] / times[who], 4)}
    return metrics


def bench_case(suite: OpSuite, case: BenchCase, name: str, where: Where) -> tuple[BenchLine, list[MeasuredTime]]:
    """One line, and its times as evidence."""
    functions: dict[str, Function] = {"ours": suite.fused, **{who: make() for who, make in suite.rivals.items()}}
    times, busy, peak, refused = bench_pass(suite, case, name, functions)
    dtype = str(case.dtype).rpartition(".")[2]
    counted = suite.forward_cost if name == "fwd" and suite.forward_cost is not None else suite.cost
    cost = counted(**case.shape, dtype=dtype, weight_gradient=name in ("bwd", "fwd+bwd"))
    ceilings = Ceilings.of(where, dtype)
    floor, stated = floor_of(cost, name, ceilings)
    rival = min((who for who in times if who != "ours"), key=lambda who: times[who], default=None)
    metrics = refused | {f"{who}_ms": round(ms, 5) for who, ms in times.items() if who != "ours"}
    metrics |= {f"{who}_device_ms": round(ms, 5) for who, ms in busy.items()}
    metrics |= stated | {"copy_tb_per_s": round(where.copy_bytes_per_s / 1e12, 3)}
    metrics |= {"floor_fraction": round(floor / times["ours"], 4)}
    metrics |= {"tflop_per_s": round(floor_parts(cost, name)[1] / times["ours"] / 1e9, 1)}
    metrics["launches"] = float(launches(timed_pass(suite, case, suite.fused, name)))
    metrics |= extra_metrics(suite, case, name)
    sha = source_sha256(suite.op)
    line = BenchLine(
        bench=BENCH,
        case=case.case,
        passes=name,
        ours=round(times["ours"], 5),
        rival=rival,
        rival_value=None if rival is None else round(times[rival], 5),
        ratio=None if rival is None else round(times[rival] / times["ours"], 4),
        floor=round(floor, 5),
        peak_bytes=peak,
        device=where.device,
        versions={**where.versions, "source": sha[:16]},
        commit=commit(sha),
        date=where.date,
        metrics=metrics,
    )
    return line, [
        measured(suite.op, who, name, ms, case, dtype, floor, peak if who == "ours" else 0, sha, where)
        for who, ms in times.items()
    ]


def measured(
    op: str,
    who: str,
    pass_name: str,
    ms: float,
    case: BenchCase,
    dtype: str,
    floor_ms: float,
    peak: int,
    sha: str,
    where: Where,
) -> MeasuredTime:
    """One time as evidence."""
    kinds: dict[str, PassName] = {"fwd": "fwd", "bwd": "bwd", "fwd+bwd": "fwd+bwd", "fwd+dx": "fwd+dx"}
    return MeasuredTime(
        op=op,
        provider=PROVIDERS.get(who, who),
        pass_name=kinds[pass_name],
        device=where.device,
        driver=where.versions["driver"],
        versions=dict(where.versions),
        source_sha256=sha,
        shape_bucket=shape_bucket(case.shape),
        dtype=dtype,
        median_ms=round(ms, 5),
        floor_ms=round(floor_ms, 5),
        peak_bytes=peak,
        repeats=REPEATS,
        date=where.date,
    )


def bench_all(
    ops: Sequence[str] | None,
    out_dir: Path,
    evidence_path: Path | None = None,
    *,
    cases: Sequence[str] = ("",),
    report: Callable[[BenchLine], None] = lambda line: None,
) -> list[BenchLine]:
    """Time operators on the current CUDA device; write result lines and evidence after each one.

    Args:
        ops: operator names; all where ``None``.
        out_dir: its ``kernels-DEVICE-DATE.jsonl`` gets the lines, each replacing today's for the same case and
            pass; the file is always whole.
        evidence_path: evidence store to add the times to; none where ``None``.
        cases: prefixes of case names to run.
        report: called with each line as soon as it is measured.

    Raises:
        KernelError: ``no-device`` without CUDA; ``unknown-operator``; ``no-case`` where no case has a prefix.
    """
    demand_device()
    chosen = [
        (suite, case)
        for name in ops or tuple(OPERATORS)
        for suite in operator(name).load_suites()
        for case in suite.bench
        if any(case.case.startswith(prefix) for prefix in cases)
    ]
    if not chosen:
        raise KernelError(
            "no-case",
            f"no case begins with {', '.join(cases)}",
            where="kernels.bench",
            next_action="name the beginning of a case, as in `--cases moe/ linear-ce`",
        )
    return bench_chosen(chosen, out_dir, evidence_path, report=report)


def demand_device() -> None:
    """Raises: KernelError: ``no-device`` without CUDA."""
    if not torch.cuda.is_available():
        raise KernelError(
            "no-device",
            "torch sees no CUDA device",
            where="kernels.bench",
            next_action="run this on a GPU machine: PYTHONPATH=src python3 -m shardwright.kernels.suite",
        )


def bench_chosen(
    chosen: Sequence[tuple[OpSuite, BenchCase]],
    out_dir: Path,
    evidence_path: Path | None = None,
    *,
    report: Callable[[BenchLine], None] = lambda line: None,
) -> list[BenchLine]:
    """Time cases one after the other, each pass of each; files and ``report`` as in ``bench_all``.

    Raises:
        KernelError: ``no-device`` without CUDA.
    """
    demand_device()
    where = Where.here()
    lines = []
    for suite, case in chosen:
        for pass_name in case.passes:
            lines.append(bench_one(suite, case, pass_name, where, out_dir, evidence_path))
            report(lines[-1])
    return lines


def bench_one(
    suite: OpSuite, case: BenchCase, pass_name: str, where: Where, out_dir: Path, evidence_path: Path | None
) -> BenchLine:
    """Time one pass, and write its line and its evidence at once."""
    line, times = bench_case(suite, case, pass_name, where)
    torch.cuda.empty_cache()
    keep_line(out_dir / f"{BENCH}-{slug(where.device)}-{where.date}.jsonl", line)
    if evidence_path is not None:
        EvidenceStore(evidence_path).add(times)
    return line


def keep_line(path: Path, line: BenchLine) -> None:
    """Add a line to a result file in place of the one for the same case and pass."""
    before = path.read_text().splitlines() if path.exists() else []
    kept = [BenchLine.model_validate_json(text) for text in before if text.strip()]
    kept = [old for old in kept if (old.case, old.passes) != (line.case, line.passes)]
    write_atomic(path, "".join(old.model_dump_json() + "\n" for old in (*kept, line)).encode())
