"""Time fused operators beside their rivals, in one process, and write result lines and evidence.

Every pass is timed alone: ``bwd`` is the backward of a kept graph with all gradients, ``fwd+bwd`` both
with all gradients, ``fwd+dx`` both with the weights frozen. Gradients are returned, not accumulated.
The inputs of the shipped cases are several times the second-level cache, which is flushed besides.

Legend: T rows, H hidden.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import triton

from shardwright.kernels.cases import BenchCase, Function, OpSuite, normal_on_device
from shardwright.kernels.evidence import EvidenceStore, shape_bucket
from shardwright.kernels.registry import OPERATORS, operator, source_sha256
from shardwright.kernels.timing import copy_bytes_per_second, device_ms, median_ms, peak_bytes
from shardwright.schemas.bench import BenchLine
from shardwright.schemas.errors import KernelError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.ops import MeasuredTime, OpCost, PassName

BENCH = "kernels"
SEED = 7
REPEATS = 3
"""Each median is taken this many times, ours and rivals in turn; the smallest stands."""

CEILING_BYTES_PER_S = {"NVIDIA H200": 4.3e12}
"""Copy bandwidth behind the stated floors, bytes read plus written, measured on that device; for another
device the copy measured in the same process is used."""

PROVIDERS = {"ours": "shardwright", "eager": "eager", "torch.compile": "compile", "F.rms_norm": "torch"}
"""Names in result lines → provider names in the evidence store."""


def environment() -> dict[str, str]:
    """Versions that a time depends on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": driver_version(),
    }


def driver_version() -> str:
    """The display driver's version, or ``unknown`` where nvidia-smi is missing."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def commit(sha: str) -> str:
    """The source revision: ``SHARDWRIGHT_COMMIT``, else git's, else the operator's own source hash."""
    if stated := os.environ.get("SHARDWRIGHT_COMMIT"):
        return stated
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"source-{sha[:12]}"


def today() -> str:
    """Date of measurement, UTC: it names results and enters no hash."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def timed_pass(suite: OpSuite, case: BenchCase, function: Function, name: str) -> Callable[[], object]:
    """A closure that runs one pass of ``function`` once, on inputs of the case."""
    inputs = suite.inputs(case.shape, case.dtype, "cuda", SEED)
    learns = [name != "fwd" and not (name == "fwd+dx" and role in suite.frozen) for role in suite.input_names]
    leaves = [tensor.requires_grad_(wanted) for tensor, wanted in zip(inputs, learns, strict=True)]
    wanted = [leaf for leaf, yes in zip(leaves, learns, strict=True) if yes]
    if name == "fwd":
        return lambda: function(*leaves)
    kept = function(*leaves)
    gradients = [
        normal_on_device(tuple(output.shape), output.dtype, "cuda", SEED + 1 + at) for at, output in enumerate(kept)
    ]
    if name == "bwd":
        return lambda: torch.autograd.grad(kept, wanted, gradients, retain_graph=True)
    return lambda: torch.autograd.grad(function(*leaves), wanted, gradients)


def floor_bytes(cost: OpCost, name: str) -> int:
    """The fewest bytes a pass must move."""
    backward = 0 if cost.backward is None else cost.backward.floor_bytes
    return {"fwd": cost.forward.floor_bytes, "bwd": backward}.get(name, cost.forward.floor_bytes + backward)


def bench_pass(
    suite: OpSuite, case: BenchCase, name: str, functions: Mapping[str, Function]
) -> tuple[dict[str, float], dict[str, float], int]:
    """Median ms of each function (``ours`` first), the device-busy ms of each, and the peak bytes of ours."""
    runs = {who: timed_pass(suite, case, function, name) for who, function in functions.items()}
    peak = peak_bytes(runs["ours"])
    times: dict[str, float] = {}
    for _ in range(REPEATS):
        for who, run in runs.items():
            times[who] = min(times.get(who, float("inf")), median_ms(run))
    busy = {who: device_ms(run) for who, run in runs.items()}
    return times, busy, peak


def bench_op(name: str, when: str) -> tuple[list[BenchLine], list[MeasuredTime]]:
    """All cases of one operator on the current device."""
    suite, sha = operator(name).load_suite(), source_sha256(name)
    device, versions = torch.cuda.get_device_name(), environment()
    measured_copy = copy_bytes_per_second()
    ceiling = CEILING_BYTES_PER_S.get(device, measured_copy)
    lines, evidence = [], []
    for case in suite.bench:
        functions: dict[str, Function] = {"ours": suite.fused, **{who: make() for who, make in suite.rivals.items()}}
        dtype = str(case.dtype).rpartition(".")[2]
        for pass_name in case.passes:
            times, busy, peak = bench_pass(suite, case, pass_name, functions)
            learns = pass_name in ("bwd", "fwd+bwd")
            cost = suite.cost(**case.shape, dtype=dtype, weight_gradient=learns)
            floor = floor_bytes(cost, pass_name) / ceiling * 1e3
            rival = min((who for who in times if who != "ours"), key=lambda who: times[who])
            others = {f"{who}_ms": round(ms, 5) for who, ms in times.items() if who != "ours"}
            others |= {f"{who}_device_ms": round(ms, 5) for who, ms in busy.items()}
            lines.append(
                BenchLine(
                    bench=BENCH,
                    case=case.case,
                    passes=pass_name,
                    ours=round(times["ours"], 5),
                    rival=rival,
                    rival_value=round(times[rival], 5),
                    ratio=round(times[rival] / times["ours"], 4),
                    floor=round(floor, 5),
                    peak_bytes=peak,
                    device=device,
                    versions={**versions, "source": sha[:16]},
                    commit=commit(sha),
                    date=when,
                    metrics={**others, "copy_tb_per_s": round(measured_copy / 1e12, 3)},
                )
            )
            evidence += [
                measured(
                    name, who, pass_name, ms, case, dtype, floor, peak if who == "ours" else 0, sha, when, versions
                )
                for who, ms in times.items()
            ]
    return lines, evidence


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
    when: str,
    versions: Mapping[str, str],
) -> MeasuredTime:
    """One time as evidence."""
    kinds: dict[str, PassName] = {"fwd": "fwd", "bwd": "bwd", "fwd+bwd": "fwd+bwd", "fwd+dx": "fwd+dx"}
    return MeasuredTime(
        op=op,
        provider=PROVIDERS.get(who, who),
        pass_name=kinds[pass_name],
        device=torch.cuda.get_device_name(),
        driver=versions["driver"],
        versions=dict(versions),
        source_sha256=sha,
        shape_bucket=shape_bucket(case.shape),
        dtype=dtype,
        median_ms=round(ms, 5),
        floor_ms=round(floor_ms, 5),
        peak_bytes=peak,
        repeats=REPEATS,
        date=when,
    )


def bench_all(ops: Sequence[str] | None, out_dir: Path, evidence_path: Path | None = None) -> list[BenchLine]:
    """Time operators on the current CUDA device; write result lines and evidence.

    Args:
        ops: operator names; all where ``None``.
        out_dir: gets ``kernels-DEVICE-DATE.jsonl``, whole or not at all.
        evidence_path: evidence store to add the times to; none where ``None``.

    Raises:
        KernelError: ``no-device`` without CUDA; ``unknown-operator``.
    """
    if not torch.cuda.is_available():
        raise KernelError(
            "no-device",
            "torch sees no CUDA device",
            where="kernels.bench",
            next_action="run this on a GPU machine: PYTHONPATH=src python3 -m shardwright.kernels.suite",
        )
    when, lines, evidence = today(), [], []
    for name in ops or tuple(OPERATORS):
        found, times = bench_op(name, when)
        lines += found
        evidence += times
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    text = "".join(line.model_dump_json() + "\n" for line in lines)
    write_atomic(out_dir / f"{BENCH}-{device}-{when}.jsonl", text.encode())
    if evidence_path is not None:
        EvidenceStore(evidence_path).add(evidence)
    return lines
