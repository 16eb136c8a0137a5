"""Slurm: the sbatch script is written here; submit, follow, cancel. A requeued job goes on from its newest save.

Job states are polled from ``scontrol show job``: no accounting database is needed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shardwright.runtime.failure import read_failure
from shardwright.runtime.launch.job import Job, read_state, write_state
from shardwright.runtime.launch.options import LaunchOptions
from shardwright.schemas.errors import ClusterError, ExitCode, RunError
from shardwright.schemas.files import write_atomic

SCRIPT = "job.sbatch"
SAVE_SECONDS = 120
"""SIGTERM comes this long before a time limit."""
ACTIVE = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
STOPPED = {"CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "DEADLINE"}
"""Ends after which the run goes on from its newest save when it is submitted again."""
FIRST_PORT, PORTS = 20000, 20000
Say = Callable[[str], None]


def render(job: Job, options: LaunchOptions) -> str:
    """The sbatch script: one task a node, each a torchrun.

    Its rendezvous is node 0 under the address that Slurm itself uses; its id changes with every requeue.
    """
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",
        f"--output={job.run_dir / 'logs' / 'slurm-%j.out'}",
        f"--signal=TERM@{SAVE_SECONDS}",
        *([f"--gpus-per-node={job.ranks_per_node}"] if job.cuda else []),
        *([f"--partition={options.partition}"] if options.partition else []),
        *([f"--account={options.account}"] if options.account else []),
        *([f"--qos={options.qos}"] if options.qos else []),
        *([f"--time={options.time_limit}"] if options.time_limit else []),
        *options.extra,
    ]
    lint(lines)
    node = [
        *(sys.executable, "-m", "shardwright.runtime.launch.node"),
        *("--nodes", str(job.nodes), "--ranks-per-node", str(job.ranks_per_node)),
        *("--device-type", job.plan.decision.cluster.device_type, "--max-restarts", str(options.max_restarts)),
        *("--run-dir", str(job.run_dir)),
    ]
    worker = shlex.join(job.worker_arguments)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "set -u",
            *options.setup,
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            'address=$(scontrol --oneliner show node "$first" | grep -o "NodeAddr=[^ ]*" | cut -d= -f2)',
            f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
            f'exec srun --kill-on-bad-exit=1 {shlex.join(node)} --endpoint "$address:$port" \\',
            f'  --id "$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" -- {worker}',
            "",
        ]
    )


def lint(lines: list[str]) -> None:
    """Refuse options under which torchrun would be started more than once a node.

    Raises:
        ClusterError: ``tasks-per-node``.
    """
    for line in lines:
        per_node = re.match(r"--ntasks-per-node[= ](\d+)", line)
        if (per_node and per_node[1] != "1") or re.match(r"(?:--ntasks|-n)[= ]", line):
            raise ClusterError(
                "tasks-per-node",
                f"{line}: torchrun starts the ranks of a node, so a node has one task",
                where="launch options: extra",
                next_action="leave the number of tasks out",
            )


def launch(job: Job, options: LaunchOptions, *, say: Say, timeout_s: float | None = None) -> int:
    """Submit, or find the job that already runs this directory, and follow it to its end.

    Raises:
        ClusterError: ``no-slurm``, ``no-partition``, ``too-small``.
        RunError: ``submit-failed``, ``timeout``, ``job-failed``.
    """
    kept = read_state(job.run_dir)
    if kept is not None and kept["engine"] == "slurm" and show(kept["job_id"]).get("JobState") in ACTIVE:
        say(f"Slurm job {kept['job_id']} already runs this directory")
        return follow(job.run_dir, kept["job_id"], say=say, timeout_s=timeout_s)
    return follow(job.run_dir, submit(job, options, say=say), say=say, timeout_s=timeout_s)


def submit(job: Job, options: LaunchOptions, *, say: Say) -> str:
    """Write the script into the run directory and hand it in; returns the job id."""
    nodes = partition_nodes(options.partition)
    job.require(nodes, job.ranks_per_node, f"partition {options.partition or '(default)'}")
    script = job.run_dir / SCRIPT
    (job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    write_atomic(script, render(job, options).encode())
    done = _run(["sbatch", "--parsable", str(script)])
    if done.returncode:
        raise RunError(
            "submit-failed",
            done.stderr.strip()[:500],
            where=str(script),
            next_action="correct the launch options; nothing runs",
        )
    job_id = done.stdout.strip().partition(";")[0]
    write_state(job.run_dir, "slurm", job_id, options.partition or "default partition")
    say(f"submitted as Slurm job {job_id}")
    return job_id


def partition_nodes(partition: str) -> int:
    """How many nodes a partition has that are not down.

    Raises:
        ClusterError: ``no-slurm``, ``no-partition``.
    """
    done = _run(["sinfo", "--noheader", "--Node", "--format=%P|%N|%T"])
    if done.returncode:
        raise ClusterError(
            "no-slurm",
            done.stderr.strip()[:300] or "sinfo failed",
            where="sinfo",
            next_action="log in to a machine of the cluster, or set SLURM_CONF",
        )
    nodes: dict[str, set[str]] = {}
    default = ""
    for line in done.stdout.splitlines():
        name, node, condition = line.strip().split("|")
        default = name.rstrip("*") if name.endswith("*") else default
        if not condition.startswith(("down", "drain")):
            nodes.setdefault(name.rstrip("*"), set()).add(node)
        nodes.setdefault(name.rstrip("*"), set())
    wanted = partition or default
    if wanted not in nodes:
        raise ClusterError(
            "no-partition",
            f"partition {wanted or '(default)'!r} does not exist; there are {', '.join(sorted(nodes)) or 'none'}",
            where="--partition",
            next_action="name one of these",
        )
    return len(nodes[wanted])


def show(job_id: str) -> dict[str, str]:
    """Fields of ``scontrol show job``; empty for a job that Slurm has forgotten."""
    done = _run(["scontrol", "--oneliner", "show", "job", job_id])
    if done.returncode:
        return {}
    return dict(re.findall(r"(\w+)=(\S*)", done.stdout))


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
    done = _run(["scancel", job_id])
    if done.returncode:
        raise RunError(
            "cancel-failed", done.stderr.strip()[:300], where=f"Slurm job {job_id}", next_action="ask its owner"
        )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    except FileNotFoundError as error:
        raise ClusterError(
            "no-slurm",
            f"{command[0]} is not installed here",
            where="PATH",
            next_action="log in to a machine of the Slurm cluster",
        ) from error
