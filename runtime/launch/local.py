"""Workers on this machine through torchrun; in this process where a launcher has already set ``RANK``."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from shardwright.runtime.failure import clear_failure, read_failure, read_silence
from shardwright.runtime.launch.allocator import choose_allocator
from shardwright.runtime.launch.engine import Engine, Say
from shardwright.runtime.launch.job import Job, write_state
from shardwright.runtime.launch.options import LaunchOptions
from shardwright.runtime.launch.process import PARENT, RunLock, free_port
from shardwright.schemas.errors import ExitCode, RunError
from shardwright.schemas.plan import load_plan

HERE = "this machine"
KILL_AFTER_S = 60.0
"""Between a polite end and a forced one: time for the step in progress and its save."""
MAX_RESTARTS = 3
LINE_PREFIX = "  "
"""Before each line of rank 0, in place of torchrun's role and rank: only rank 0 is shown."""


def launch(
    plan_path: Path,
    checkpoint: Path,
    data_root: Path,
    approvals_log: Path,
    run_dir: Path,
    *,
    timeout_s: float | None = None,
    max_restarts: int = MAX_RESTARTS,
) -> int:
    """Run an approved plan to its end.

    Args:
        plan_path, approvals_log: what workers verify for themselves.
        checkpoint: the folder to load.
        data_root: what the recipe's data paths are relative to.
        run_dir: where everything is written; one launch at a time.
        timeout_s: end the run after this time; ``None`` waits.
        max_restarts: how often a killed worker is started again from the newest save.

    Returns:
        The workers' exit code; ``runtime.failure.read_failure(run_dir)`` says why it is not 0.

    Raises:
        RunError: ``run-dir-in-use``, ``timeout``, ``workers-died``, ``rank-silent``; ``disk-full`` before the start.
    """
    arguments = worker_arguments(plan_path, checkpoint, data_root, approvals_log, run_dir)
    if "RANK" in os.environ:
        choose_allocator(os.environ)
        from shardwright.runtime.worker import main

        return main(arguments)
    plan = load_plan(plan_path)
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = RunLock(run_dir, ".launch.lock")
    lock.acquire(wait_s=10.0)
    try:
        clear_failure(run_dir)
        ranks = plan.decision.strategy.mesh.world_size
        command = torchrun_command(ranks, run_dir, max_restarts) + arguments
        code = _watch(command, environment(plan.decision.cluster.device_type, ranks), run_dir, timeout_s)
    finally:
        lock.release()
    failure = read_failure(run_dir)
    if failure is not None:
        return int(failure["exit_code"])
    if code == 0 or code == int(ExitCode.INTERRUPTED):
        return code
    if silence := read_silence(run_dir):
        raise RunError(
            "rank-silent",
            f"{silence}; {max_restarts} restarts did not mend it",
            where=str(run_dir / "logs"),
            next_action="look at that rank's device and links (`shardwright doctor`, the launch option preflight); "
            "`shardwright resume` goes on from the newest save",
        )
    raise RunError(
        "workers-died",
        f"torchrun ended with code {code} after {max_restarts} restarts and no worker said why",
        where=str(run_dir / "logs"),
        next_action="read the last lines of the rank logs there; `shardwright resume` goes on from the newest save",
    )


def start(job: Job, options: LaunchOptions, say: Say) -> int:
    """:func:`launch` as an engine's."""
    write_state(job.run_dir, ENGINE.name, "", HERE)
    paths = job.plan_path, job.checkpoint, job.data_root, job.approvals, job.run_dir
    return launch(*paths, max_restarts=options.max_restarts)


def describe(job: Job, options: LaunchOptions) -> str:
    """The command that :func:`launch` runs."""
    command = torchrun_command(job.ranks, job.run_dir, options.max_restarts)
    return shlex.join(command + job.worker_arguments) + "\n"


def worker_arguments(
    plan_path: Path, checkpoint: Path, data_root: Path, approvals_log: Path, run_dir: Path
) -> list[str]:
    """Flags of ``shardwright.runtime.worker``."""
    flags = {
        "--plan": plan_path,
        "--approvals": approvals_log,
        "--checkpoint": checkpoint,
        "--recipe-root": data_root,
        "--run-dir": run_dir,
    }
    return [word for flag, path in flags.items() for word in (flag, str(path.resolve()))]


def torchrun_command(ranks: int, run_dir: Path, max_restarts: int) -> list[str]:
    """torchrun for one node, tied to this process's life; rank 0's output is shown, all is kept in ``logs/``."""
    return [
        sys.executable,
        "-m",
        "shardwright.runtime.launch.agent",
        f"--nproc-per-node={ranks}",
        "--nnodes=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        f"--rdzv-id={run_dir.name or 'run'}",
        "--local-addr=127.0.0.1",
        f"--max-restarts={max_restarts}",
        "--monitor-interval=0.2",
        f"--log-dir={run_dir / 'logs'}",
        "--tee=3",
        "--local-ranks-filter=0",
        "--module",
        "shardwright.runtime.worker",
    ]


def environment(device_type: str, ranks: int) -> dict[str, str]:
    """The workers' environment: on a CPU the cores are divided among them and gloo stays on the loopback."""
    env = dict(os.environ)
    choose_allocator(env)
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env["HF_HUB_OFFLINE"] = env["TRANSFORMERS_OFFLINE"] = "1"
    env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = LINE_PREFIX
    env[PARENT] = str(os.getpid())
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(KILL_AFTER_S) - 10))
    if device_type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        env["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def _watch(command: list[str], env: dict[str, str], run_dir: Path, timeout_s: float | None) -> int:
    """Wait for torchrun; end it, at first politely, on timeout or interrupt."""
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        _end(process)
        raise RunError(
            "timeout",
            f"the run took longer than {timeout_s} s",
            where=str(run_dir),
            next_action="`shardwright resume` goes on from the newest save; allow more time",
        ) from error
    except KeyboardInterrupt:
        _end(process)
        return int(ExitCode.INTERRUPTED)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


ENGINE = Engine(
    name="local",
    happens="torchrun on this machine; killed workers are restarted from the newest save",
    tested_on="two and four CPU ranks, SIGKILL of a rank",
    render=lambda job, options: {"command": describe(job, options)},
    start=start,
)
