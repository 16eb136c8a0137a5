"""A Slurm job's life: its state, following it to its end, asking it to stop; and how Slurm's commands are run.

Job states are polled from ``scontrol show job``: no accounting database is needed.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

from shardwright.runtime.failure import read_failure
from shardwright.runtime.launch.engine import Say
from shardwright.schemas.errors import ClusterError, ExitCode, RunError

ACTIVE = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
STOPPED = {"CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "DEADLINE"}
"""Ends after which the run goes on from its newest save when it is submitted again."""


def show(job_id: str) -> dict[str, str]:
    """Fields of ``scontrol show job``; empty for a job that Slurm has forgotten."""
    done = run(["scontrol", "--oneliner", "show", "job", job_id])
    if done.returncode:
        return {}
    return dict(re.findall(r"(\w+)=(\S*)", done.stdout))


def state(job_id: str) -> str:
    """A job's state in Slurm's own word."""
    try:
        return show(job_id).get("JobState", "forgotten by Slurm")
    except ClusterError:
        return "Slurm is not reachable from here"


def follow(run_dir: Path, job_id: str, *, say: Say, timeout_s: float | None = None, poll_s: float = 1.0) -> int:
    """Wait for a job's end, telling every change of state; an interrupt leaves the job running.

    Raises:
        RunError: ``timeout``, ``job-failed``, ``job-lost``.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    before = ""
    while True:
        found = show(job_id)
        now = f"{found.get('JobState', 'unknown')}, restarts {found.get('Restarts', '0')}"
        if now != before:
            say(f"Slurm job {job_id}: {now}")
            before = now
        if found.get("JobState") not in ACTIVE:
            return _ended(run_dir, job_id, found)
        if deadline is not None and time.monotonic() > deadline:
            raise RunError(
                "timeout",
                f"Slurm job {job_id} took longer than {timeout_s} s",
                where=str(run_dir),
                next_action="it still runs: `shardwright resume` follows it again, `shardwright cancel` ends it",
            )
        time.sleep(poll_s)


def _ended(run_dir: Path, job_id: str, found: dict[str, str]) -> int:
    if not found:
        raise RunError(
            "job-lost",
            f"Slurm does not know job {job_id} any more",
            where=str(run_dir),
            next_action="`shardwright resume` submits it again; it goes on from the newest save",
        )
    ended = found["JobState"]
    if ended == "COMPLETED":
        return int(ExitCode.OK)
    failure = read_failure(run_dir)
    if failure is not None:
        return int(failure["exit_code"])
    if ended in STOPPED:
        return int(ExitCode.INTERRUPTED)
    raise RunError(
        "job-failed",
        f"Slurm job {job_id} ended as {ended}, exit code {found.get('ExitCode', '?')}, and no worker said why",
        where=str(run_dir / "logs"),
        next_action="read the logs there; `shardwright resume` goes on from the newest save",
    )


def cancel(job_id: str) -> None:
    """Ask a job to stop: its workers save first, within Slurm's ``KillWait``.

    Raises:
        RunError: ``cancel-failed``.
    """
    done = run(["scancel", job_id])
    if done.returncode:
        raise RunError(
            "cancel-failed", done.stderr.strip()[:300], where=f"Slurm job {job_id}", next_action="ask its owner"
        )


def stop(job_id: str) -> str | None:
    """Ask a job to stop unless it has ended; says which was asked."""
    if show(job_id).get("JobState") not in ACTIVE:
        return None
    cancel(job_id)
    return f"Slurm job {job_id}"


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    except FileNotFoundError as error:
        raise ClusterError(
            "no-slurm",
            f"{command[0]} is not installed here",
            where="PATH",
            next_action="log in to a machine of the Slurm cluster",
        ) from error
