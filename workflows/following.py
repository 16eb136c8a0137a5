"""A run's lines as they come: events and training steps, or the workers' logs, until nobody works there any more."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shardwright.workflows.lock import holder
from shardwright.workflows.request import require_run
from shardwright.workflows.watching import event_lines, worker_logs

POLL_S = 0.5


def follow(
    run_dir: Path, lines: int, *, workers: bool = False, sleep: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """The last lines that are there, then each new one.

    Ends when no process holds the run folder and nothing new has come since.

    Raises:
        RunError: ``no-run``.
    """
    require_run(run_dir)
    texts = _worker_texts if workers else _run_texts
    told: dict[str, int] = {}
    first = True
    while True:
        alive = holder(run_dir) is not None
        fresh = []
        for name, found in texts(run_dir).items():
            begin = told.get(name, max(0, len(found) - lines) if first else 0)
            fresh += found[begin:]
            told[name] = len(found)
        yield from fresh
        first = False
        if not alive and not fresh:
            return
        if not fresh:
            sleep(POLL_S)


def _run_texts(run_dir: Path) -> dict[str, list[str]]:
    return {"events": event_lines(run_dir), "steps": step_lines(run_dir)}


def _worker_texts(run_dir: Path) -> dict[str, list[str]]:
    logs = worker_logs(run_dir, 1_000_000)
    return {str(path): [f"{path.name}: {line}" for line in text.splitlines()] for path, text in logs}


def step_lines(run_dir: Path) -> list[str]:
    """One line for each training step and evaluation so far; a line cut off by a kill is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            metric = json.loads(line)
        except json.JSONDecodeError:
            continue
        if metric.get("kind") == "step":
            speed = metric["tokens"] / metric["seconds"] if metric["seconds"] else 0.0
            found.append(f"step {metric['step']:>5}  loss {metric['loss']:.4f}  {speed:,.0f} tokens/s")
        elif "loss" in metric:
            found.append(f"held-out loss after step {metric['step']}: {metric['loss']:.4f}")
    return found
