"""What a run says while it goes: JSON lines, one line a step on stderr, and the places of ``runtime.metrics_sinks``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from shardwright.runtime.metrics_sinks import Sink, evaluation_values, open_sinks, step_values
from shardwright.schemas.files import write_atomic
from shardwright.schemas.run import EvalMetric, StepMetric

FILE = "metrics.jsonl"
"""In the run directory."""


def say(text: str) -> None:
    """One line of progress on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Metrics:
    """Rank 0's recorder. Lines are synced as they are written; a resumed run drops lines past its step."""

    def __init__(self, run_dir: Path, total_steps: int, labels: dict[str, str] | None = None) -> None:
        self.path, self.total = run_dir / FILE, total_steps
        self.sinks: list[Sink] = []
        self.run_dir, self.labels = run_dir, labels or {}
        run_dir.mkdir(parents=True, exist_ok=True)

    def begin(self, step: int) -> tuple[list[StepMetric], list[EvalMetric]]:
        """What was written up to ``step`` (-1 for a fresh start); later lines, of work that was lost, are removed."""
        steps, evaluations = read_metrics(self.path)
        kept = [one for one in steps if one.step <= step]
        held = [one for one in evaluations if one.step <= step]
        lines: list[StepMetric | EvalMetric] = sorted([*kept, *held], key=lambda one: one.step)
        write_atomic(self.path, b"".join(_line(one) for one in lines))
        self.sinks, missing = open_sinks(self.run_dir, step + 1, self.labels)
        for line in missing:
            say(line)
        return kept, held

    def step(self, metric: StepMetric) -> None:
        self._append(metric)
        values = step_values(metric)
        rate = values["tokens_per_s"]
        for sink in self.sinks:
            sink.scalars(metric.step, values)
        say(
            f"step {metric.step}/{self.total}  loss {metric.loss:.4f}  grad {metric.grad_norm:.3g}  "
            f"lr {metric.learning_rate:.2e}  {rate:.0f} tok/s  {metric.peak_memory_bytes / 2**30:.2f} GiB  "
            f"hottest expert {metric.expert_load_max_over_mean:.2f}× mean"
        )

    def evaluation(self, metric: EvalMetric) -> None:
        self._append(metric)
        for sink in self.sinks:
            sink.scalars(metric.step, evaluation_values(metric))
        say(f"held-out loss after step {metric.step}: {metric.loss:.4f} ({metric.tokens} tokens)")

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def _append(self, metric: StepMetric | EvalMetric) -> None:
        with open(self.path, "ab") as stream:
            stream.write(_line(metric))
            stream.flush()
            os.fsync(stream.fileno())


def _line(metric: StepMetric | EvalMetric) -> bytes:
    kind = "step" if isinstance(metric, StepMetric) else "evaluation"
    body = metric.model_dump(mode="json")
    return json.dumps({"kind": kind, **body}, sort_keys=True).encode() + b"\n"


def read_metrics(path: Path) -> tuple[list[StepMetric], list[EvalMetric]]:
    """All whole lines of a metrics file; a last line cut by a kill is left out."""
    steps: list[StepMetric] = []
    evaluations: list[EvalMetric] = []
    if not path.is_file():
        return steps, evaluations
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue
        body = json.loads(line)
        if body.pop("kind") == "step":
            steps.append(StepMetric.model_validate(body))
        else:
            evaluations.append(EvalMetric.model_validate(body))
    return steps, evaluations
