"""Where metrics go besides the terminal: one protocol, one class a place. Optional places are used where they are both
installed and asked for by their own standard environment variables.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Protocol

from shardwright.schemas.files import write_atomic
from shardwright.schemas.run import EvalMetric, StepMetric

TENSORBOARD, PROMETHEUS = "tensorboard", "metrics.prom"


class Sink(Protocol):
    """A place that takes numbers by name at a step."""

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Record some values of one step."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


def step_values(metric: StepMetric) -> dict[str, float]:
    """What is told of a training step."""
    return {
        "loss": metric.loss,
        "grad_norm": metric.grad_norm,
        "learning_rate": metric.learning_rate,
        "tokens_per_s": metric.tokens / metric.seconds if metric.seconds else 0.0,
        "peak_memory_gib": metric.peak_memory_bytes / 2**30,
        "expert_load_max_over_mean": metric.expert_load_max_over_mean,
    }


def evaluation_values(metric: EvalMetric) -> dict[str, float]:
    """What is told of an evaluation."""
    return {"held_out_loss": metric.loss}


class TensorBoard:
    """``tensorboard/`` in the run directory; events past the first step of a resumed run are purged."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(run_dir / TENSORBOARD), purge_step=first_step)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class PrometheusFile:
    """``metrics.prom``: the newest values in the text format that node_exporter's textfile collector reads."""

    def __init__(self, run_dir: Path, labels: dict[str, str]) -> None:
        self.path = run_dir / PROMETHEUS
        inside = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
        self.labels = f"{{{inside}}}" if inside else ""
        self.values: dict[str, float] = {}

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.values |= {"step": float(step), **values}
        lines = []
        for name, value in sorted(self.values.items()):
            lines += [f"# TYPE shardwright_{name} gauge", f"shardwright_{name}{self.labels} {value!r}"]
        write_atomic(self.path, ("\n".join(lines) + "\n").encode())

    def close(self) -> None:
        """The last values stay for the collector."""


class OpenTelemetry:
    """Gauges through the OpenTelemetry SDK; ``OTEL_EXPORTER_OTLP_ENDPOINT`` names the collector.

    Args:
        reader: where readings go; by default an OTLP exporter over HTTP.
    """

    def __init__(self, labels: dict[str, str], reader: Any = None) -> None:
        metrics: Any = importlib.import_module("opentelemetry.sdk.metrics")
        if reader is None:
            export: Any = importlib.import_module("opentelemetry.sdk.metrics.export")
            otlp: Any = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
            reader = export.PeriodicExportingMetricReader(otlp.OTLPMetricExporter())
        self.provider = metrics.MeterProvider(metric_readers=[reader])
        self.meter = self.provider.get_meter("shardwright")
        self.labels = labels
        self.gauges: dict[str, Any] = {}

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in {"step": float(step), **values}.items():
            if name not in self.gauges:
                self.gauges[name] = self.meter.create_gauge(f"shardwright.{name}")
            self.gauges[name].set(value, self.labels)

    def close(self) -> None:
        self.provider.shutdown()


class MLflow:
    """A run on the server that ``MLFLOW_TRACKING_URI`` names."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.mlflow: Any = importlib.import_module("mlflow")
        self.mlflow.start_run(run_name=labels.get("run", "shardwright"), tags=labels)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.mlflow.log_metrics(values, step=step)

    def close(self) -> None:
        self.mlflow.end_run()


class WeightsAndBiases:
    """A run in the project that ``WANDB_PROJECT`` names; ``WANDB_MODE=offline`` keeps it here."""

    def __init__(self, run_dir: Path, labels: dict[str, str]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self.run = wandb.init(dir=str(run_dir), name=labels.get("run"), config=labels, resume="allow")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


def open_sinks(run_dir: Path, first_step: int, labels: dict[str, str]) -> tuple[list[Sink], list[str]]:
    """All places for a run, and a line for each that was asked for and is not to be had.

    Args:
        run_dir: of the run.
        first_step: that will be recorded.
        labels: ``run`` and ``decision``.
    """
    sinks: list[Sink] = [PrometheusFile(run_dir, labels)]
    missing = []
    if _installed("tensorboard"):
        sinks.append(TensorBoard(run_dir, first_step))
    else:
        missing.append("tensorboard is not installed: metrics go to metrics.jsonl and metrics.prom only")
    wanted: list[tuple[str, str, Any]] = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "opentelemetry.exporter.otlp.proto.http", lambda: OpenTelemetry(labels)),
        ("MLFLOW_TRACKING_URI", "mlflow", lambda: MLflow(labels)),
        ("WANDB_PROJECT", "wandb", lambda: WeightsAndBiases(run_dir, labels)),
    ]
    for variable, package, make in wanted:
        if not os.environ.get(variable):
            continue
        if _installed(package):
            sinks.append(make())
        else:
            missing.append(f"{variable} is set but {package} is not installed: no metrics go there")
    return sinks, missing


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
