"""Engine name → how it starts workers. One worker contract: torchrun's environment (``runtime.launch.job``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwright.runtime.launch import kubernetes, local, ray, skypilot, slurm
from shardwright.runtime.launch.job import Job, read_state, write_state
from shardwright.runtime.launch.options import LaunchOptions, read_options
from shardwright.runtime.metrics import say
from shardwright.schemas.errors import ClusterError, UsageError

RENDERED_ONLY = {"kubernetes", "skypilot"}
"""Manifests are written for these; submitting them is the user's, with the cluster's own tool."""


def launch(plan_path: Path, checkpoint: Path, data_root: Path, approvals: Path, run_dir: Path) -> int:
    """Run an approved plan with the engine that the run directory names.

    Returns:
        The workers' exit code.

    Raises:
        UsageError: ``rendered-only``.
        ClusterError, RunError: as the engine.
    """
    options = read_options(run_dir)
    if options.engine == "local":
        write_state(run_dir, "local", "", "this machine")
        return local.launch(plan_path, checkpoint, data_root, approvals, run_dir, max_restarts=options.max_restarts)
    job = Job.of(plan_path, checkpoint, data_root, approvals, run_dir)
    if options.engine == "slurm":
        return slurm.launch(job, options, say=say)
    if options.engine == "ray":
        return ray.launch(job, options, say=say)
    written = write_manifest(job, options)
    raise UsageError(
        "rendered-only",
        f"{options.engine} jobs are rendered, not submitted: {', '.join(path.name for path in written)}",
        where=str(run_dir),
        next_action=NEXT[options.engine].format(path=written[0]),
    )


NEXT = {
    "kubernetes": "`kubectl apply -f {path}`, then watch it there; the run directory fills as it goes",
    "skypilot": "`sky jobs launch {path}`, then watch it there; the run directory fills as it goes",
}


def render(job: Job, options: LaunchOptions) -> dict[str, str]:
    """File name → text of what would be submitted."""
    table: dict[str, Callable[[Job, LaunchOptions], dict[str, str]]] = {
        "local": lambda job, options: {"command": local.describe(job, options)},
        "slurm": lambda job, options: {slurm.SCRIPT: slurm.render(job, options)},
        "ray": lambda job, options: {"ray.json": ray.render(job, options)},
        "kubernetes": kubernetes.render,
        "skypilot": lambda job, options: {skypilot.FILE: skypilot.render(job, options)},
    }
    return table[options.engine](job, options)


def write_manifest(job: Job, options: LaunchOptions) -> tuple[Path, ...]:
    """Put what :func:`render` gives into the run directory."""
    from shardwright.schemas.files import write_atomic

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
    if kept is None or kept["engine"] != "slurm" or slurm.show(kept["job_id"]).get("JobState") not in slurm.ACTIVE:
        return None
    slurm.cancel(kept["job_id"])
    return f"Slurm job {kept['job_id']}"


def where(run_dir: Path) -> str:
    """Engine, job and its state in one line; empty for a run that was never launched."""
    kept = read_state(run_dir)
    if kept is None:
        return ""
    if kept["engine"] != "slurm":
        return f"{kept['engine']} {kept['job_id'] or kept['where']}".strip()
    try:
        found = slurm.show(kept["job_id"]).get("JobState", "forgotten by Slurm")
    except ClusterError:
        found = "Slurm is not reachable from here"
    return f"slurm job {kept['job_id']} in {kept['where']}: {found}"
