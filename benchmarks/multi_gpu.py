"""Several devices of one host over NCCL, or a rehearsal of every step over gloo on CPU ranks.

``python benchmarks/multi_gpu.py SUBCOMMAND [--devices N] [--rehearse] [--models M,...] [--limit-seconds 480]``

- ``calibrate``: curves of collectives (even and skewed), products and copies into a calibration file;
- ``parity``: the runtime's families on FSDP, EP and both against one rank, fp32 and bf16, fused where kernels run;
- ``steps``: real-size steps on at most six plans a model, predicted beside measured, rank correlation;
- ``overlap``: share of the experts' exchanges that nothing covers, from a profiler's timeline;
- ``faults``: kill one worker, go on with one rank;
- ``all``: every one of them in that order, within the limit;
- ``report FILE...``: result lines from raw results of another machine, with predictions made here.

Raw results (one JSON a line) go to stdout and to ``--out``; ``--append`` or ``report`` turns them into lines of
``benchmarks/results``, cases ``multi-gpu-N/...`` (``multi-cpu-N/...`` for a rehearsal, never appended). Every child
runs under ``timeout -k``. NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

HERE = Path(__file__).resolve().parent
ORDER = ("calibrate", "parity", "steps", "overlap", "faults")
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
MARK = "RESULT "
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of a gradient's relative difference: other orders of sums, and in bf16 of rounded terms."""

Raw = dict[str, Any]


def ranks(what: str, count: int, given: argparse.Namespace, work: Path, limit_s: float) -> list[Raw]:
    """Run ``multi_gpu_rank.py`` on that many ranks under a hard limit; results of rank 0, also of a run cut short."""
    options = [f"--nproc-per-node={count}", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    words = ["timeout", "-k", "5", str(int(limit_s)), sys.executable, "-m", "torch.distributed.run", *options]
    words += ["--local-addr=127.0.0.1", str(HERE / "multi_gpu_rank.py"), what, "--models", given.models]
    words += ["--work", str(work), "--calibration", str(given.calibration), "--limit-seconds", str(limit_s * 0.85)]
    words += ["--rehearse"] if given.rehearse else []
    environment = {**os.environ, **QUIET, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if given.rehearse:
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    found = [json.loads(line[len(MARK) :]) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode:
        found.append({"kind": what, "case": "ended-early", "metrics": {"exit_code": float(done.returncode)}})
    return found


def run(what: str, given: argparse.Namespace, work: Path, limit_s: float) -> list[Raw]:
    """One subcommand."""
    if what == "faults":
        from multi_gpu_faults import faults

        found = faults(work, given.devices, "cpu" if given.rehearse else "cuda", limit_s)
        return [{"kind": "faults", "case": "kill-one-resume-on-one", "metrics": found}]
    if what == "parity":
        began = time.monotonic()
        alone = ranks(what, 1, given, work, limit_s / 2)
        return alone + ranks(what, given.devices, given, work, limit_s - (time.monotonic() - began))
    return ranks(what, given.devices, given, work, limit_s)


def lines_of(raw: Iterable[Raw], devices: int, calibration: Path | None, prefix: str) -> list[dict[str, Any]]:
    """Fields of result lines, and for steps their prediction, the summary and the rank correlation."""
    found, pairs = [], []
    for one in raw:
        metrics = dict(one["metrics"])
        if one["kind"] == "parity" and "gradient_error" in metrics:
            base = "bfloat16" if "bfloat16" in one["case"] else "float32"
            metrics["passed"] = float(metrics["gradient_error"] <= TOLERANCE[base])
        if one["kind"] == "steps" and "step_ms" in metrics:
            predicted = predict(one["case"], devices, calibration, tuple(map(tuple, one.get("loads", ()))))
            if predicted is not None:
                metrics |= predicted
                pairs.append(metrics)
        unit = "ms" if "step_ms" in metrics else "-"
        found.append({"case": f"{prefix}-{devices}/{one['kind']}/{one['case']}", "unit": unit, "metrics": metrics})
    if pairs:
        found += summary(pairs, f"{prefix}-{devices}")
    return [{"bench": f"{prefix}-{devices}", **fields} for fields in found]


def predict(
    case: str, devices: int, calibration: Path | None, loads: tuple[tuple[float, ...], ...] = ()
) -> dict[str, float] | None:
    """Peak and step time of a step setting by the product's own model; ``None`` for an unknown case.

    Args:
        loads: measured shares of rows by layer and expert, as a plan has them from ``--load-profile``: a router with
            random weights is less even than the prior for trained ones.
    """
    from multi_gpu_cases import step_settings
    from multi_gpu_model import fusions_for
    from points_model import described
    from points_shapes import SHAPES, Point

    from shardwright.search_spaces.calibration import load_calibration
    from shardwright.search_spaces.catalogue import load_cluster
    from shardwright.search_spaces.cost import estimate

    known = {one.case: one for one in step_settings(devices, tuple(SHAPES)[:2], False)}
    setting = known.get(case)
    if setting is None:
        return None
    what = described(Point(setting.executor, setting.model, setting.targets, setting.layers, setting.tokens, 1, "full"))
    strategy = setting.strategy
    ranks_ = strategy.mesh.world_size
    batch = what.recipe.batch.model_copy(
        update={"global_batch_sequences": strategy.mesh.data_ranks * strategy.micro_batch_sequences}
    )
    recipe = what.recipe.model_copy(update={"batch": batch})
    named = set(fusions_for(setting.operators, strategy.mesh.ep))
    fusions = tuple(
        f if f.op in named else f.model_copy(update={"op": "grouped_lora_mlp"})
        for f in what.fusions
    )  # fmt: skip
    base = load_cluster("h200-8")
    cluster = base.model_copy(update={"name": f"h200-{ranks_}", "devices_per_node": ranks_, "nodes": 1})
    curves = load_calibration(calibration) if calibration is not None and calibration.is_file() else None
    report = estimate(what.profile, recipe, cluster, strategy, what.targets, fusions, curves, loads)
    return {
        "predicted_peak_bytes": float(report.memory.peak_bytes),
        "predicted_reserved_bytes": float(report.memory.reserved_bytes),
        "predicted_step_ms": report.time.step_ms,
        "predicted_tokens_per_s": report.time.tokens_per_s,
    }


def summary(pairs: list[dict[str, float]], prefix: str) -> list[dict[str, Any]]:
    """Cases ``memory``, ``time`` and ``rank-correlation``."""
    memory = [100 * (p["predicted_peak_bytes"] / p["peak_bytes"] - 1) for p in pairs if p.get("peak_bytes")]
    time_ = [100 * (p["predicted_step_ms"] / p["step_ms"] - 1) for p in pairs]
    measured = [p["tokens_per_s"] for p in pairs]
    predicted = [p["predicted_tokens_per_s"] for p in pairs]
    best = measured.index(max(measured)) == predicted.index(max(predicted))
    found: list[dict[str, Any]] = []
    if memory:
        found.append({"case": f"{prefix}/memory", "unit": "%", "metrics": {"worst_abs_pct": max(map(abs, memory))}})
    metrics = {"worst_abs_pct": max(map(abs, time_)), "mean_abs_pct": sum(map(abs, time_)) / len(time_)}
    found.append({"case": f"{prefix}/time", "unit": "%", "metrics": metrics})
    value = {
        "value": rank_correlation(measured, predicted),
        "points": float(len(pairs)),
        "choice_is_best": float(best),
    }
    found.append({"case": f"{prefix}/rank-correlation", "unit": "-", "metrics": value})
    return found


def rank_correlation(left: list[float], right: list[float]) -> float:
    """Spearman's: Pearson's correlation of mean ranks; 0 where one side does not vary."""

    def ranked(values: list[float]) -> list[float]:
        return [
            sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
            for value in values
        ]

    a, b = ranked(left), ranked(right)
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    above = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    size_a, size_b = sum((x - mean_a) ** 2 for x in a), sum((y - mean_b) ** 2 for y in b)
    return float(above / (size_a * size_b) ** 0.5) if size_a and size_b else 0.0


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 where a run ended early or a drill failed."""
    parser = argparse.ArgumentParser(prog="multi_gpu.py")
    parser.add_argument("what", choices=(*ORDER, "all", "report"))
    parser.add_argument("files", nargs="*", type=Path, help="raw results, for report")
    parser.add_argument("--devices", type=int, help="ranks on this host; all GPUs unless told")
    parser.add_argument("--rehearse", action="store_true", help="gloo on CPU ranks, miniatures")
    parser.add_argument("--models", default="qwen3-30b")
    parser.add_argument("--limit-seconds", type=float, default=480.0, help="hard limit of the whole call")
    parser.add_argument("--skip", default="", help="with all: subcommands to leave out")
    parser.add_argument("--calibration", type=Path, help="written by calibrate, read by report")
    parser.add_argument("--out", type=Path, help="also append raw results here as they come")
    parser.add_argument("--append", action="store_true", help="append result lines to benchmarks/results")
    given = parser.parse_args(arguments)
    given.calibration = given.calibration or Path(tempfile.gettempdir()) / "multi-gpu-calibration.json"
    raw: list[Raw] = []
    if given.what == "report":
        raw = [json.loads(text) for path in given.files for text in path.read_text().splitlines() if text.strip()]
        given.devices = given.devices or next(int(one["devices"]) for one in raw)
    else:
        given.devices = given.devices or _devices()
        raw = _measured(given)
    prefix = "multi-cpu" if given.rehearse else "multi-gpu"
    fields = lines_of(raw, given.devices, given.calibration, prefix)
    for one in fields:
        sys.stderr.write(f"{one['case']}: {json.dumps(one['metrics'])}\n")
    if given.append and not given.rehearse:
        from lines import append, line

        facts = {key: raw[0][key] for key in ("device", "versions", "commit", "date") if key in raw[0]}
        append([line({**facts, **one}) for one in fields])
    bad = [one for one in raw if one["case"] == "ended-early" or one["metrics"].get("passed") == 0.0]
    return 1 if bad or not raw else 0


def _measured(given: argparse.Namespace) -> list[Raw]:
    from lines import line

    facts = line({"bench": "multi", "case": "facts"}).model_dump(include={"device", "versions", "commit", "date"})
    began, raw = time.monotonic(), []
    skipped = given.skip.split(",")
    for what in (one for one in (ORDER if given.what == "all" else (given.what,)) if one not in skipped):
        left = given.limit_seconds - (time.monotonic() - began)
        if left < 20:
            sys.stderr.write(f"{what}: not begun, {left:.0f} s are left\n")
            continue
        with tempfile.TemporaryDirectory() as work:
            found = run(what, given, Path(work), left)
        sys.stderr.write(f"{what}: {time.monotonic() - began:.0f} s since the start\n")
        for one in found:
            one |= {"devices": given.devices, **facts}
            sys.stdout.write(json.dumps(one) + "\n")
            sys.stdout.flush()
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(one) + "\n")
        raw += found
    return raw


def _devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 2


if __name__ == "__main__":
    raise SystemExit(main())
