"""Slurm: the sbatch script is written here and submitted. A requeued job goes on from its newest save."""

from __future__ import annotations

import re
import shlex
import sys

from shardwright.runtime.launch.engine import Engine, Say
from shardwright.runtime.launch.job import Job, read_state, write_state
from shardwright.runtime.launch.options import LaunchOptions
from shardwright.runtime.launch.slurm_jobs import ACTIVE, follow, run, show, state, stop
from shardwright.schemas.errors import ClusterError, RunError
from shardwright.schemas.files import write_atomic

SCRIPT = "job.sbatch"
SAVE_SECONDS = 120
"""SIGTERM comes this long before a time limit."""
FIRST_PORT, PORTS = 20000, 20000


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
        f"--output={shlex.quote(str(job.run_dir / 'logs' / 'slurm-%j.out'))}",
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
    done = run(["sbatch", "--parsable", str(script)])
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
    done = run(["sinfo", "--noheader", "--Node", "--format=%P|%N|%T"])
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


ENGINE = Engine(
    name="slurm",
    happens="an sbatch script is written, submitted and followed; requeued jobs go on from the newest save",
    tested_on="slurmctld with two slurmd on one host, `scontrol requeue` in mid-run",
    render=lambda job, options: {SCRIPT: render(job, options)},
    options=frozenset({"partition", "account", "qos", "time_limit", "extra", "setup"}),
    start=lambda job, options, say: launch(job, options, say=say),
    command="sbatch",
    state=state,
    cancel=stop,
)
