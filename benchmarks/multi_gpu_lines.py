"""Result lines of ``multi_gpu.py`` from its raw results: verdicts, predictions beside steps, summaries."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

COMPLETE, ENDED = "complete", "ended-early"
"""Cases of raw results about a part of the script itself: it is whole; its processes ended before they should."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of a gradient's relative difference: other orders of sums, and in bf16 of rounded terms."""

Raw = dict[str, Any]


def lines_of(raw: Iterable[Raw], devices: int, calibration: Path | None, prefix: str) -> list[dict[str, Any]]:
    """Fields of result lines, and for steps their prediction, the summary and the rank correlation."""
    found: list[dict[str, Any]] = []
    pairs: list[dict[str, float]] = []
    alone: float | None = None
    last = {(one["kind"], one["case"]): one for one in raw}
    for (kind, case), one in last.items():
        if case == COMPLETE or (case == ENDED and (kind, COMPLETE) in last):
            continue
        metrics = dict(one["metrics"])
        if one["kind"] == "parity" and "gradient_error" in metrics:
            metrics["passed"] = float(passed(one))
        if one["kind"] in ("steps", "scaling") and "step_ms" in metrics:
            predicted = predict(one["case"], devices, calibration, tuple(map(tuple, one.get("loads", ()))))
            metrics |= predicted or {}
            if predicted is not None and one["kind"] == "steps":
                pairs.append(metrics)
        if one["kind"] == "scaling" and "step_ms" in metrics:
            alone = metrics["tokens_per_s"] if metrics["ranks"] == 1 else alone
            if alone is not None:
                metrics["efficiency"] = metrics["tokens_per_s"] / (alone * metrics["ranks"])
        unit = "ms" if "step_ms" in metrics else "-"
        found.append({"case": f"{prefix}-{devices}/{one['kind']}/{one['case']}", "unit": unit, "metrics": metrics})
    if pairs:
        found += summary(pairs, f"{prefix}-{devices}")
    return [{"bench": f"{prefix}-{devices}", **fields} for fields in found]


def passed(one: Raw) -> bool:
    """Whether a parity result's gradients are those of one rank."""
    base = "bfloat16" if "bfloat16" in one["case"] else "float32"
    return bool(one["metrics"]["gradient_error"] <= TOLERANCE[base])


def wrong(one: Raw) -> bool:
    """Whether a raw result says that something failed."""
    metrics = one["metrics"]
    unequal = one["kind"] == "parity" and "gradient_error" in metrics and not passed(one)
    return one["case"] == ENDED or metrics.get("passed") == 0.0 or metrics.get("failed") == 1.0 or unequal


def predict(
    case: str, devices: int, calibration: Path | None, loads: tuple[tuple[float, ...], ...] = ()
) -> dict[str, float] | None:
    """Peak and step time of a step setting by the product's own model; ``None`` for an unknown case.

    Args:
        loads: measured shares of rows by layer and expert, as a plan has them from ``--load-profile``: a router with
            random weights is less even than the prior for trained ones.
    """
    from multi_gpu_cases import every_setting
    from multi_gpu_described import described_setting

    from shardwright.search_spaces.calibration import load_calibration
    from shardwright.search_spaces.catalogue import load_cluster
    from shardwright.search_spaces.cost import estimate

    setting = every_setting(devices).get(case)
    if setting is None:
        return None
    what = described_setting(setting)
    strategy = setting.strategy
    ranks = strategy.mesh.world_size
    batch = what.recipe.batch.model_copy(
        update={"global_batch_sequences": strategy.mesh.data_ranks * strategy.micro_batch_sequences}
    )
    recipe = what.recipe.model_copy(update={"batch": batch})
    base = load_cluster("h200-8")
    cluster = base.model_copy(update={"name": f"h200-{ranks}", "devices_per_node": ranks, "nodes": 1})
    curves = load_calibration(calibration) if calibration is not None and calibration.is_file() else None
    report = estimate(what.profile, recipe, cluster, strategy, what.targets, what.fusions, curves, loads)
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
