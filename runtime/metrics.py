"""What a run says while it goes: JSON lines, TensorBoard, and one line a step on the terminal's stderr."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from shardwright.schemas.files import write_atomic
from shardwright.schemas.run import EvalMetric, StepMetric


def say(text: str) -> None:
    """One line of progress on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Metrics:
    """Rank 0's recorder. Lines are flushed as they are written; a resumed run drops lines past its step."""

    def __init__(self, run_dir: Path, total_steps: int) -> None:
        self.path, self.total = run_dir / "metrics.jsonl", total_steps
        self.board: Any = None
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)

    def _open_board(self, first: int) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            say("tensorboard is not installed: metrics go to metrics.jsonl only")
            return
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=first)

    def begin(self, step: int) -> tuple[list[StepMetric], list[EvalMetric]]:
        """What was written up to ``step`` (-1 for a fresh start); later lines, of work that was lost, are removed."""
        steps, evaluations = read_metrics(self.path)
        kept = [one for one in steps if one.step <= step]
        held = [one for one in evaluations if one.step <= step]
        lines: list[StepMetric | EvalMetric] = sorted([*kept, *held], key=lambda one: one.step)
        write_atomic(self.path, b"".join(_line(one) for one in lines))
        self._open_board(step + 1)
        return kept, held

    def step(self, metric: StepMetric) -> None:
        self._append(metric)
        self._scalars(metric.step, loss=metric.loss, grad_norm=metric.grad_norm, learning_rate=metric.learning_rate)
        rate = metric.tokens / metric.seconds if metric.seconds else 0.0
        self._scalars(metric.step, tokens_per_s=rate, peak_memory_gib=metric.peak_memory_bytes / 2**30)
        say(
            f"step {metric.step}/{self.total}  loss {metric.loss:.4f}  grad {metric.grad_norm:.3g}  "
            f"lr {metric.learning_rate:.2e}  {rate:.0f} tok/s  {metric.peak_memory_bytes / 2**30:.2f} GiB  "
            f"hottest expert {metric.expert_load_max_over_mean:.2f}× mean"
        )

    def evaluation(self, metric: EvalMetric) -> None:
        self._append(metric)
        self._scalars(metric.step, held_out_loss=metric.loss)
        say(f"held-out loss after step {metric.step}: {metric.loss:.4f} ({metric.tokens} tokens)")

    def close(self) -> None:
        if self.board is not None:
            self.board.close()

    def _append(self, metric: StepMetric | EvalMetric) -> None:
        with open(self.path, "ab") as stream:
            stream.write(_line(metric))

    def _scalars(self, step: int, **values: float) -> None:
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()


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
