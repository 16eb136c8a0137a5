"""One node's torchrun inside a scheduler's job: ``python -m shardwright.runtime.launch.node … -- WORKER-FLAGS``.

One task a node: torchrun starts the ranks. A scheduler that starts one task a rank sets the ranks itself and runs
``shardwright.runtime.worker``; both at once would bind every port twice.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from shardwright.runtime.failure import clear_failure, read_failure
from shardwright.runtime.launch.agent import FRESH_STORE
from shardwright.runtime.launch.local import environment
from shardwright.runtime.launch.process import tie_children
from shardwright.schemas.errors import ExitCode, UsageError

SHUTDOWN_S = 120
"""After a request to stop: time for the step in progress and its save."""


def main(arguments: list[str] | None = None) -> int:
    """Run this node's workers; returns the run's exit code."""
    parser = argparse.ArgumentParser(prog="shardwright.runtime.launch.node")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--node", type=int, default=int(os.environ.get("SLURM_NODEID", "0")))
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--endpoint", required=True, help="HOST:PORT of node 0")
    parser.add_argument("--id", required=True)
    parser.add_argument("--max-restarts", type=int, default=3)
    parser.add_argument("--device-type", required=True)
    parser.add_argument("--local-addr", default="")
    parser.add_argument("--run-dir", type=Path, required=True)
    options, worker = parser.parse_known_args(arguments)
    worker = [word for word in worker if word != "--"]
    refuse_nested(dict(os.environ))
    if options.node == 0:
        # Workers of all nodes start only after node 0 has joined the rendezvous.
        clear_failure(options.run_dir)
    os.environ.update(environment(options.device_type, options.ranks_per_node))
    if options.nodes > 1:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if options.endpoint.startswith("127."):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(FRESH_STORE)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    tie_children()
    return _torchrun(torchrun_arguments(options, worker), options.run_dir)


def torchrun_arguments(options: argparse.Namespace, worker: list[str]) -> list[str]:
    """torchrun's own command line for this node."""
    local = options.local_addr or address_of(os.environ.get("SLURMD_NODENAME", ""))
    return [
        f"--nnodes={options.nodes}",
        f"--nproc-per-node={options.ranks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={options.endpoint}",
        f"--rdzv-id={options.id}",
        f"--rdzv-conf=is_host={int(options.node == 0)}",
        *([f"--local-addr={local}"] if local else []),
        f"--max-restarts={options.max_restarts}",
        "--monitor-interval=0.5",
        f"--log-dir={options.run_dir / 'logs' / f'node-{options.node}'}",
        "--tee=3",
        "--local-ranks-filter=0",
        "--module",
        "shardwright.runtime.worker",
        *worker,
    ]


def address_of(node: str) -> str:
    """The address under which Slurm reaches a node; empty outside Slurm."""
    if not node:
        return ""
    command = ["scontrol", "--oneliner", "show", "node", node]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found[1] if found else ""


def refuse_nested(env: dict[str, str]) -> None:
    """One launcher at a time.

    Raises:
        UsageError: ``nested-launch`` under a scheduler step of several tasks a node, or below another launcher.
    """
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_NTASKS_PER_NODE", "1")).partition("(")[0]
    if tasks not in ("", "1") or "RANK" in env:
        raise UsageError(
            "nested-launch",
            f"torchrun starts the ranks of a node, but this step has {tasks} tasks a node"
            + (" and RANK is already set" if "RANK" in env else ""),
            where="SLURM_NTASKS_PER_NODE",
            next_action="use --ntasks-per-node=1 with this module, or start shardwright.runtime.worker in each task",
        )


def _torchrun(arguments: list[str], run_dir: Path) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except SignalException:
        return int(ExitCode.INTERRUPTED)
    except ChildFailedError:
        failure = read_failure(run_dir)
        return int(ExitCode.ERROR if failure is None else failure["exit_code"])
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
