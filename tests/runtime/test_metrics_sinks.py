"""Metrics reach every place that was asked for, under the same names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardwright.runtime import metrics_sinks
from shardwright.runtime.metrics import Metrics, read_metrics
from shardwright.runtime.metrics_sinks import OpenTelemetry, PrometheusFile, open_sinks
from shardwright.schemas.run import EvalMetric, StepMetric

STEP = StepMetric(
    step=3, loss=2.5, grad_norm=0.5, learning_rate=1e-3, tokens=200, seconds=0.5, peak_memory_bytes=2 << 30
)
NAMES = {"loss", "grad_norm", "learning_rate", "tokens_per_s", "peak_memory_gib", "expert_load_max_over_mean"}


def exposition(path: Path) -> dict[str, float]:
    """Name → value of a Prometheus text file with one label set."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_prometheus_file_holds_the_newest_values_with_labels(tmp_path: Path) -> None:
    sink = PrometheusFile(tmp_path, {"run": 'a "quoted" name'})
    sink.scalars(1, {"loss": 3.0})
    sink.scalars(2, {"held_out_loss": 2.0})
    sink.scalars(3, {"loss": 2.5})
    text = (tmp_path / "metrics.prom").read_text()
    assert exposition(tmp_path / "metrics.prom") == {
        "shardwright_step": 3.0,
        "shardwright_loss": 2.5,
        "shardwright_held_out_loss": 2.0,
    }
    assert '{run="a \\"quoted\\" name"}' in text and text.count("# TYPE shardwright_loss gauge") == 1


def fake(name: str, monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def test_optional_places_get_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow and W&B through stand-ins with their documented calls."""
    seen: list[tuple[str, int, set[str]]] = []
    run = SimpleNamespace(
        log=lambda values, step: seen.append(("wandb", step, set(values))),
        finish=lambda: seen.append(("end", 0, set())),
    )
    fake("wandb", monkeypatch, init=lambda **given: run)
    fake(
        "mlflow",
        monkeypatch,
        start_run=lambda **given: None,
        end_run=lambda: None,
        log_metrics=lambda values, step: seen.append(("mlflow", step, set(values))),
    )
    monkeypatch.setattr(metrics_sinks, "_installed", lambda package: package in ("wandb", "mlflow"))
    monkeypatch.setenv("WANDB_PROJECT", "p")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:x")
    metrics = Metrics(tmp_path, 5, {"run": "r"})
    metrics.begin(-1)
    metrics.step(STEP)
    metrics.close()
    assert seen == [("mlflow", 3, NAMES), ("wandb", 3, NAMES), ("end", 0, set())]
    assert read_metrics(tmp_path / "metrics.jsonl") == ([STEP], [])
    assert exposition(tmp_path / "metrics.prom")["shardwright_tokens_per_s"] == 400.0


def test_a_place_that_is_asked_for_and_absent_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_sinks, "_installed", lambda package: False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:x")
    sinks, missing = open_sinks(tmp_path, 0, {})
    assert [type(sink) for sink in sinks] == [PrometheusFile]
    assert missing[1] == "MLFLOW_TRACKING_URI is set but mlflow is not installed: no metrics go there"


def test_tensorboard_events_hold_the_scalars(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    metrics = Metrics(tmp_path, 5)
    metrics.begin(-1)
    metrics.step(STEP)
    metrics.evaluation(EvalMetric(step=3, loss=2.25, tokens=10))
    metrics.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == NAMES | {"held_out_loss"}
    assert events.Scalars("held_out_loss")[0].value == 2.25 and events.Scalars("loss")[0].step == 3


def test_opentelemetry_gauges_reach_a_reader() -> None:
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    sink = OpenTelemetry({"run": "r"}, reader)
    sink.scalars(3, {"loss": 2.5})
    found = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    points = {metric.name: metric.data.data_points[0] for metric in found}
    assert points["shardwright.loss"].value == 2.5 and dict(points["shardwright.loss"].attributes) == {"run": "r"}
    sink.close()
