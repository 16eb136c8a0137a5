"""Predicted beside published and measured: ``python benchmarks/cost_model.py [--write]``.

Four parts. Full training under ZeRO-1 beside SimuMax's measured rows. LoRA on MoE models beside published peaks.
transformers with PEFT on one H200. And our own runs: lines of bench ``cost-points`` in ``benchmarks/results``,
whose ``case`` is one of ``points_shapes.py`` and whose metrics are ``peak_bytes``, ``reserved_bytes``,
``weights_bytes`` and ``step_ms``, or ``out_of_memory``; without such lines that part is left out.
``--write`` puts the tables into ``docs/cost-model.md`` between its markers, and appends result lines.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import models
from lines import RESULTS, ROOT, append, line, versions
from points_process import OUT_OF_MEMORY
from points_shapes import Point, read_case
from render import read_lines

from shardwright.schemas.bench import BenchLine
from shardwright.schemas.cluster import Calibration
from shardwright.schemas.cost import CostReport
from shardwright.schemas.files import write_atomic
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.calibration import load_calibration
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost import estimate, evaluate, workload
from shardwright.search_spaces.cost.full_training import Layout, stage_bytes
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.holes import hole_bytes
from shardwright.search_spaces.cost.plans import Array, Plans, plans_of

GIB = 2**30
PAGE = ROOT / "docs" / "cost-model.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

MODELS: dict[str, Callable[[], CheckpointProfile]] = {
    "qwen3-30b": models.qwen3_30b,
    "kimi-linear-48b": models.kimi_linear,
    "deepseek-v3": models.deepseek_v3,
    "glm-5": models.glm_5,
}


@dataclass(frozen=True)
class Row:
    """One comparison."""

    case: str
    predicted: float
    measured: float
    unit: str
    note: str = ""

    @property
    def error_pct(self) -> float:
        return 100 * (self.predicted / self.measured - 1)


@dataclass(frozen=True)
class ReplicatedOverExperts(Plans):
    """Executors that shard non-expert weights over the FSDP ranks only, a copy on every EP rank."""

    @cached_property
    def dense_shards(self) -> Array:
        return self.shard


def simumax() -> list[Row]:
    """Published rows of SimuMax v1.2 on 8 × B200: 4 layers, 4,096 tokens, one sequence, balanced routing."""
    v3, v2 = models.deepseek_v3(4, 1), models.deepseek_v2(4, 1)
    rows = []
    for name, model, layout, batches, measured in (
        ("DeepSeek-V3 4 layers, ep8", v3, Layout(8, 8), (4, 8, 32), 104.30),
        ("DeepSeek-V3 4 layers, ep4 pp2, last stage", v3, Layout(4, 4, 2, 4), (4,), 114.00),
        ("DeepSeek-V3 4 layers, ep4 pp2, first stage", v3, Layout(4, 4, 2, 4), (4,), 71.24),
        ("DeepSeek-V2 4 layers, ep8", v2, Layout(8, 8), (4,), 45.63),
        ("DeepSeek-V2 4 layers, ep4 pp2", v2, Layout(4, 4, 2, 4), (4,), 44.70),
    ):
        work = workload(model, models.recipe_for(batch=8, tokens=4096), ())
        stages = [sum(stage_bytes(work, layout, 4096, stage).values()) for stage in range(layout.stages)]
        peak = stages[0] if "first" in name else max(stages)
        rows += [Row(f"{name}, {count} micro-batches", peak / GIB, measured, "GiB") for count in batches]
    return rows


def lora_report(
    model: CheckpointProfile,
    cluster: str,
    strategy: ParallelStrategy,
    *,
    batch: int,
    tokens: int,
    shared_batch: bool,
    **what: Any,
) -> CostReport:
    """Peak and time of our model for another executor.

    Args:
        shared_batch: ranks of an EP group work on one batch and each computes its own experts' rows of it, as
            transformers' own expert parallelism does: non-expert weights are copied on every EP rank, T·K/e rows fall
            to each of them, at most about one a token here; and the loss is made in chunks.
    """
    recipe = models.recipe_for(batch=batch, tokens=tokens, **what)
    targets = models.targets_for(model, rank=recipe.lora.rank, experts="experts" in recipe.lora.targets)
    plans, library = plans_of([strategy], model), {"kda": ("library", ())}
    if shared_batch:
        plans = ReplicatedOverExperts(**{name: getattr(plans, name) for name in plans.__dataclass_fields__})
        library["linear_cross_entropy"] = ("shardwright", ())
        model = model.model_copy(update={"shape": model.shape.model_copy(update={"experts_per_token": 1})})
    fused = FusedProviders(library)
    return evaluate(workload(model, recipe, targets), load_cluster(cluster), plans, fused).report(0)


def published_lora() -> list[Row]:
    """TRL's published LoRA runs on H100: at most 2,048 tokens, chunked loss, checkpointing, attention adapters.

    "GB" is taken at its word; of GLM-4.6 the bf16 weights of a rank alone are 75.7 GB, more than the 73 that it
    publishes, so its figure must be 73 GiB, or its non-expert weights are not copied whole.
    """
    rows = []
    for name, model, cluster, mesh, measured, note in (
        ("GLM-5.2 753B, ep32 × fsdp2 on 64 H100", models.glm_5(), "h100-64", Mesh(shard=2, ep=32), 56.0,
         "sizes of GLM-5 without MTP; dense weights shared by the FSDP ranks only"),
        ("GLM-4.6 357B, ep16 on 16 H100", models.glm_46(), "h100-16", Mesh(ep=16), 73.0,
         "dense weights copied on every EP rank"),
    ):  # fmt: skip
        strategy = ParallelStrategy(mesh=mesh, checkpointing="full")
        batch = mesh.data_ranks
        report = lora_report(
            model, cluster, strategy, batch=batch, tokens=2048, shared_batch=True, targets=("attention",)
        )
        peak, static = report.memory.peak_bytes, static_bytes(report)
        other = 100 * (peak / GIB / measured - 1)
        what = f"{note}; {static / 1e9:.1f} GB of it weights; {peak / GIB:.1f} GiB, {other:+.1f} %, if GiB is meant"
        rows.append(Row(name, peak / 1e9, measured, "GB", what))
    return rows


NOT_PREDICTED = (
    (
        "Nemotron-3 Omni 30B-A3B LoRA, 8 H100 ep8: 30.2 GiB",
        "sequence and batch vary (CORD-v2) and are not published; of 33.0B parameters 7.7 GiB a rank are weights, "
        "the rest is activations of an unknown number of tokens",
    ),
    (
        "GLM-4.5-Air 110B and Qwen3-30B full training: 41 and 34 GB",
        "formats of gradients and moments are not published; between 8 and 16 bytes a parameter the prediction doubles",
    ),
    ("DeepSeek-V3 16B full training, 8 H100: 73.3 GiB", "the reduced batch is not stated"),
    (
        "Qwen3.5-35B and 122B full training at 128k",
        "full training with context parallelism and offload is not modelled",
    ),
    ("Llama 3 8B and 70B LoRA", "throughput only, dense models; no memory published"),
)
"""Published rows that the model cannot be held against, and why."""


def transformers_peft() -> tuple[list[Row], list[Row]]:
    """Peak and step time of transformers 5.24 with PEFT 0.21 on one H200: rank 16, 4,096 tokens, checkpointing."""
    peaks, times = [], []
    for name, sequences, experts, peak, seconds in (
        ("qwen3-30b", 1, False, 64.82, 0.6960),
        ("qwen3-30b", 4, False, 88.03, 1.9442),
        ("qwen3-30b", 4, True, 95.06, 2.3973),
        ("kimi-linear-48b", 2, False, 107.72, 1.1281),
        ("kimi-linear-48b", 2, True, 116.86, 1.7323),
    ):
        what = ("attention", "experts") if experts else ("attention",)
        strategy = ParallelStrategy(mesh=Mesh(), micro_batch_sequences=sequences, checkpointing="full")
        report = lora_report(
            MODELS[name](), "h200-1", strategy, batch=sequences, tokens=4096, shared_batch=False, targets=what
        )
        case = f"{name}, {sequences} × 4,096 tokens, LoRA on {' and '.join(what)}"
        peaks.append(Row(case, report.memory.peak_bytes / GIB, peak, "GiB"))
        times.append(Row(case, report.time.step_ms, 1e3 * seconds, "ms"))
    return peaks, times


def predict(point: Point, calibration: Calibration | None = None) -> CostReport:
    """What the product itself would predict for a measured point: same profile, targets, fusions and plan."""
    from points_model import described

    what, cluster = described(point), load_cluster("h200-1")
    return estimate(what.profile, what.recipe, cluster, strategy_of(point), what.targets, what.fusions, calibration)


def strategy_of(point: Point) -> ParallelStrategy:
    return ParallelStrategy(
        mesh=Mesh(),
        micro_batch_sequences=point.batch,
        checkpointing=point.how,  # type: ignore[arg-type]
    )


def calibration_of(folder: Path = RESULTS) -> Calibration | None:
    """The newest calibration of an H200 among the results; ``None`` without one."""
    found = sorted(folder.glob("calibration-nvidia-h200*.json"))
    return load_calibration(found[-1]) if found else None


WHOLE_STEPS = {
    "train-step/qwen3-30b-experts": "qwen3-30b-48layers/attention+experts/t4096/b4/full/fused",
    "train-step/qwen3-30b-attention": "qwen3-30b-48layers/attention/t4096/b4/full/fused",
}
"""Whole models that ``train_step.py`` measured, as points; both are far from the cut ones in size."""


def as_point(measured: BenchLine) -> BenchLine | None:
    """A ``cost-points`` line as it is, a whole training step with every layer recomputed as a point, else ``None``."""
    if measured.bench == "cost-points":
        return measured
    case = WHOLE_STEPS.get(measured.case)
    if measured.bench != "train-step" or case is None or measured.peak_bytes is None:
        return None
    if measured.metrics.get("whole_layers"):
        return None
    kept = {key: value for key, value in measured.metrics.items() if key == "weights_bytes"}
    metrics = {**kept, "peak_bytes": float(measured.peak_bytes), "step_ms": 1e3 * measured.metrics["step_s"]}
    return measured.model_copy(update={"bench": "cost-points", "case": case, "metrics": metrics})


def own_points(folder: Path = RESULTS) -> tuple[list[tuple[BenchLine, CostReport]], list[str]]:
    """(newest measured line of a case, prediction) for the ``cost-points`` lines, and the cases that name nothing."""
    lines: dict[str, BenchLine] = {}
    for found_line in read_lines(folder):
        measured = as_point(found_line)
        if measured is not None:
            kept = lines.get(measured.case)
            lines[measured.case] = measured if kept is None or measured.date >= kept.date else kept
    calibration = calibration_of(folder)
    found, unknown = [], []
    for case, measured in lines.items():
        point = read_case(case)
        if point is None:
            unknown.append(case)
        else:
            found.append((measured, predict(point, calibration)))
    return found, unknown


def static_bytes(report: CostReport) -> int:
    """What a rank holds before the first step: base, adapters and buffers."""
    names = ("frozen_base", "adapter_parameters", "buffers")
    return sum(one.bytes for one in report.memory.components if one.name in names)


def reserved_bytes(measured: BenchLine, report: CostReport) -> float:
    """What the prediction says of a line's allocator: without the mark of segments that grow it had fixed ones."""
    from points_model import described

    point = read_case(measured.case)
    if point is None or measured.metrics.get("expandable_segments"):
        return report.memory.reserved_bytes
    what = described(point)
    work, fused = workload(what.profile, what.recipe, what.targets), FusedProviders.of(what.fusions)
    plans = plans_of([strategy_of(point)], what.profile)
    growing, fixed = (float(hole_bytes(work, plans, fused, grows)[0]) for grows in (True, False))
    return report.memory.reserved_bytes + fixed - growing


Points = list[tuple[BenchLine, CostReport]]


def ended(points: Points) -> Points:
    """Those that did not run out of memory."""
    return [one for one in points if OUT_OF_MEMORY not in one[0].metrics]


def own_rows(points: Points) -> tuple[list[Row], list[Row]]:
    """Peaks and step times, case by case, of what was measured."""
    peaks, times = [], []
    for measured, report in ended(points):
        have, what = measured.metrics, f"{measured.device}, {measured.date}"
        peaks.append(Row(measured.case, report.memory.peak_bytes / GIB, have["peak_bytes"] / GIB, "GiB", what))
        if "step_ms" in have:
            times.append(Row(measured.case, report.time.step_ms, have["step_ms"], "ms", report.time.bound_by))
    return peaks, times


def own_metrics(points: Points) -> dict[str, dict[str, float]]:
    """The cases ``cost/memory`` and ``cost/time``; empty without points."""
    whole = ended(points)
    if not whole:
        return {}
    peaks, dynamics, reserved, times = [], [], [], []
    for measured, report in whole:
        have = measured.metrics
        weights = static_bytes(report)
        peaks.append(100 * (report.memory.peak_bytes / have["peak_bytes"] - 1))
        ours, theirs = report.memory.peak_bytes - weights, have["peak_bytes"] - have.get("weights_bytes", weights)
        dynamics.append(100 * (ours / theirs - 1))
        if "reserved_bytes" in have:
            seen = have["reserved_bytes"] + have.get("context_bytes", 0.0)
            reserved.append(100 * (reserved_bytes(measured, report) / seen - 1))
        if "step_ms" in have:
            times.append(100 * (report.time.step_ms / have["step_ms"] - 1))

    def share(errors: list[float], limit: float) -> float:
        return round(sum(abs(error) <= limit for error in errors) / len(errors), 4)

    memory = {
        "points": float(len(whole)),
        "share_within_3pct": share(peaks, 3),
        "dynamic_share_within_10pct": share(dynamics, 10),
        "worst_under_pct": round(max(0.0, -min(peaks)), 3),
        "feasible_out_of_memory": float(sum(report.feasible for one, report in points if OUT_OF_MEMORY in one.metrics)),
    }
    if reserved:
        memory["reserved_share_within_6pct"] = share(reserved, 6)
    found = {"cost/memory": memory}
    if times:
        found["cost/time"] = {"points": float(len(times)), "mean_abs_pct": round(statistics.mean(map(abs, times)), 3)}
    return found


def table(title: str, rows: list[Row]) -> list[str]:
    text = [f"### {title}", "", "| Case | Predicted | Measured | Error | Note |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        numbers = f"{row.predicted:,.2f} {row.unit} | {row.measured:,.2f} {row.unit} | {row.error_pct:+.1f} %"
        text.append(f"| {row.case} | {numbers} | {row.note} |")
    return [*text, ""]


def page() -> tuple[str, list[dict[str, Any]]]:
    """The tables as text, and result lines."""
    full, lora = simumax(), published_lora()
    peaks, times = transformers_peft()
    points, unknown = own_points()
    text = table("Full training, ZeRO-1, 8 × B200 (published by SimuMax v1.2)", full)
    text += table("LoRA on MoE models, peak a rank (published by TRL)", lora)
    text += table("transformers 5.24 with PEFT 0.21 on one H200, peak", peaks)
    text += table(
        "transformers 5.24 with PEFT 0.21 on one H200, step time of our eager path without calibration", times
    )
    text += ["### Published rows that are not predicted", ""]
    text += [f"- {case}: {reason}." for case, reason in NOT_PREDICTED] + [""]
    metrics = own_metrics(points)
    if points:
        measured_peaks, measured_times = own_rows(points)
        text += table("Our own runs, peak", measured_peaks)
        text += [
            f"- {measured.case} ran out of memory: {report.memory.reserved_bytes / GIB:.2f} GiB predicted, "
            f"{'feasible' if report.feasible else 'infeasible'}."
            for measured, report in points
            if OUT_OF_MEMORY in measured.metrics
        ] + [""]
        text += table("Our own runs, step time (last column: what bounds the prediction)", measured_times)
    if metrics:
        text += ["### Our own runs", "", "| Case | Metric | Value |", "| --- | --- | --- |"]
        text += [
            f"| {case} | {name} | {value:g} |" for case, values in metrics.items() for name, value in values.items()
        ]
        text.append("")
    if unknown:
        text += [f"Lines that name no known case: {', '.join(sorted(unknown))}.", ""]

    def largest(rows: list[Row]) -> float:
        return round(max(abs(row.error_pct) for row in rows), 3)

    mean_time = round(statistics.mean(abs(row.error_pct) for row in times), 3)
    lines: list[dict[str, Any]] = [
        {"bench": "cost-model", "case": f"cost/{name}", "unit": "%", "ours": value}
        for name, value in (
            ("simumax", largest(full[:4])),
            ("published-lora", largest(lora)),
            ("transformers-peft-peak", largest(peaks)),
            ("transformers-peft-time", mean_time),
        )
    ]
    for case, values in metrics.items():
        lines.append({"bench": "cost-model", "case": case, "unit": "share", "metrics": values})
    return "\n".join(text), lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="update docs/cost-model.md and append result lines")
    given = parser.parse_args(arguments)
    text, results = page()
    sys.stdout.write(text + "\n")
    if given.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        write_atomic(PAGE, f"{before}{BEGIN}\n\n{text}\n{END}{after}".encode())
        append([line({"versions": versions(("numpy",)), **one}) for one in results])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
