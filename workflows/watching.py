"""What a run's folder tells about the run: status, logs, and stopping it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from shardwright.schemas.base import Model
from shardwright.schemas.errors import RunError
from shardwright.schemas.plan import load_plan
from shardwright.schemas.run import StepMetric
from shardwright.workflows.adapt import nodes_for
from shardwright.workflows.events import read_events
from shardwright.workflows.lock import holder
from shardwright.workflows.request import require_run
from shardwright.workflows.runs import load_record


class NodeStatus(Model):
    name: str
    state: str
    """``waiting``, ``running``, ``interrupted``, ``done``, ``paused: CODE`` or ``failed: CODE``."""


class RunStatus(Model):
    """A run as its folder shows it."""

    schema_version: int = 1
    name: str
    state: str
    """``running (process N)``, ``finished``, ``paused``, ``failed`` or ``interrupted``."""
    nodes: tuple[NodeStatus, ...]
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    engine: str = ""
    """Which engine runs it, where, under which job."""
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    predicted_bytes: int | None = None
    last_save: int | None = None
    """Step of the newest save that has its name."""
    warnings: tuple[str, ...] = ()
    next_command: str = ""


def run_status(run_dir: Path) -> RunStatus:
    """Read a run's folder; starts nothing and takes no lock.

    Raises:
        RunError: ``no-run``.
    """
    request, pid = require_run(run_dir), holder(run_dir)
    latest = {event["node"]: event for event in read_events(run_dir)}
    nodes = [NodeStatus(name=name, state=_node_state(latest.get(name), pid)) for name in nodes_for(request.goal)]
    unfinished = next((node for node in nodes if node.state != "done"), None)
    if pid is not None:
        state = f"running (process {pid})"
    elif unfinished is None:
        state = "finished"
    else:
        state = unfinished.state.split(":")[0].replace("waiting", "interrupted")
    command = ""
    if pid is None and unfinished is not None:
        review = unfinished.state.startswith("paused")
        command = f"shardwright {'review ' + str(run_dir / 'plan.json') if review else 'resume ' + str(run_dir)}"
    last, record = _last_step(run_dir), load_record(run_dir)
    steps = load_plan(run_dir / "plan.json").decision.recipe.schedule.steps if last is not None else None
    return RunStatus(
        name=request.name,
        state=state,
        nodes=tuple(nodes),
        step=None if last is None else last.step,
        steps=steps,
        loss=None if last is None else last.loss,
        engine=engine_of(run_dir),
        tokens_per_s=last.tokens / last.seconds if last is not None and last.seconds else None,
        memory_bytes=None if last is None else last.peak_memory_bytes,
        predicted_bytes=None if record is None else record.predicted_peak_bytes,
        last_save=_last_save(run_dir),
        warnings=() if record is None else record.warnings,
        next_command=command,
    )


def engine_of(run_dir: Path) -> str:
    """Engine, place and job of the run's newest launch; empty before any."""
    from shardwright.runtime.launch.engines import where

    return where(run_dir)


def _last_save(run_dir: Path) -> int | None:
    steps = [
        int(folder.name.removeprefix("step-"))
        for folder in (run_dir / "checkpoints").glob("step-*")
        if folder.name.removeprefix("step-").isdigit()
    ]
    return max(steps, default=None)


def _node_state(event: dict[str, str] | None, pid: int | None) -> str:
    if event is None:
        return "waiting"
    kind = event["kind"]
    if kind == "finished":
        return "done"
    if kind in ("failed", "paused"):
        return f"{kind}: {event['detail']}"
    return "running" if pid is not None else "interrupted"


def _last_step(run_dir: Path) -> StepMetric | None:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return None
    for line in reversed(path.read_text(encoding="utf-8").splitlines()):
        try:
            metric = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off by a kill
        if metric.pop("kind", "") == "step":
            return StepMetric.model_validate(metric)
    return None


def event_lines(run_dir: Path) -> list[str]:
    """A run's events, one line each."""
    require_run(run_dir)
    return [f"{e['time']}  {e['node']:<10} {e['kind']:<9} {e['detail']}".rstrip() for e in read_events(run_dir)]


def worker_logs(run_dir: Path, lines: int) -> list[tuple[Path, str]]:
    """The last lines of every file under ``logs/``."""
    require_run(run_dir)
    files = sorted(path for path in (run_dir / "logs").rglob("*") if path.is_file())
    return [(path, "\n".join(path.read_text("utf-8", errors="replace").splitlines()[-lines:])) for path in files]


def interrupt_run(run_dir: Path, timeout_s: float) -> int | None:
    """Send SIGINT to the process that works in the folder and wait until it has let go.

    Returns:
        Its process id, or ``None`` where none works there.

    Raises:
        RunError: ``still-running`` after the time-out, or ``not-allowed``.
    """
    require_run(run_dir)
    pid = holder(run_dir)
    if pid is None:
        return None
    try:
        os.kill(pid, signal.SIGINT)
    except PermissionError as error:
        raise RunError(
            "not-allowed", f"process {pid} is another user's", where=str(run_dir), next_action="ask its owner"
        ) from error
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if holder(run_dir) != pid:
            return pid
        time.sleep(0.1)
    raise RunError(
        "still-running",
        f"process {pid} did not stop in {timeout_s:g} s",
        where=str(run_dir),
        next_action="wait: it may be saving; call `shardwright cancel` again with a longer --timeout",
    )
