"""What is done with the engine that a run names: launch, render, cancel, tell where."""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.runtime.launch import local
from shardwright.runtime.launch.job import Job, read_state, write_state
from shardwright.runtime.launch.options import LaunchOptions, read_options
from shardwright.runtime.launch.registry import NAMES, engine
from shardwright.runtime.metrics import say
from shardwright.schemas.errors import UsageError
from shardwright.schemas.files import write_atomic


def launch(plan_path: Path, checkpoint: Path, data_root: Path, approvals: Path, run_dir: Path) -> int:
    """Run an approved plan with the engine that the run directory names.

    Where ``RANK`` is set already, another launcher started this process: it runs as that rank and starts nothing.

    Returns:
        The workers' exit code.

    Raises:
        UsageError: ``rendered-only``.
        ClusterError, RunError: as the engine.
    """
    options = read_options(run_dir)
    if "RANK" in os.environ:
        write_state(run_dir, local.ENGINE.name, "", local.HERE)
        return local.launch(plan_path, checkpoint, data_root, approvals, run_dir)
    job = Job.of(plan_path, checkpoint, data_root, approvals, run_dir)
    chosen = engine(options.engine)
    if chosen.start is not None:
        return chosen.start(job, options, say)
    written = write_manifest(job, options)
    raise UsageError(
        "rendered-only",
        f"{chosen.name} jobs are rendered, not submitted: {', '.join(path.name for path in written)}",
        where=str(run_dir),
        next_action=f"`{chosen.submit_with.format(path=written[0])}`, then watch it there; the run directory fills as "
        "it goes",
    )


def render(job: Job, options: LaunchOptions) -> dict[str, str]:
    """File name → text of what would be submitted."""
    return engine(options.engine).render(job, options)


def write_manifest(job: Job, options: LaunchOptions) -> tuple[Path, ...]:
    """Put what :func:`render` gives into the run directory."""
    paths = []
    for name, text in render(job, options).items():
        write_atomic(job.run_dir / name, text.encode())
        paths.append(job.run_dir / name)
    return tuple(paths)


def cancel(run_dir: Path) -> str | None:
    """Ask the engine's job of a run to stop; returns what was asked, ``None`` for a local run or none.

    Raises:
        RunError: ``cancel-failed``.
    """
    kept = read_state(run_dir)
    if kept is None or (stop := engine(kept["engine"]).cancel) is None:
        return None
    return stop(kept["job_id"])


def where(run_dir: Path) -> str:
    """Engine, job and its state in one line; empty for a run that was never launched."""
    kept = read_state(run_dir)
    if kept is None:
        return ""
    ask = engine(kept["engine"]).state if kept["engine"] in NAMES else None
    if ask is None:
        return f"{kept['engine']} {kept['job_id'] or kept['where']}".strip()
    return f"{kept['engine']} job {kept['job_id']} in {kept['where']}: {ask(kept['job_id'])}"
