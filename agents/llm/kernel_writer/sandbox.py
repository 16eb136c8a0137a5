"""A process of its own for code that nobody has read: no network, bounded time, memory, files and processes.

The child gets a network namespace without interfaces; where the kernel refuses one, nothing is run. It starts in an
empty folder, with an environment of a few named variables, and is killed as a group at its deadline.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.schemas.errors import LlmError

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Limits:
    """What one run may use."""

    seconds: float = 120.0
    memory_bytes: int | None = 8 << 30
    """Address space; ``None`` on a GPU machine, where the driver maps more than any useful bound."""
    file_bytes: int = 1 << 30
    files: int = 256


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    code: int
    """Exit status; negative where a signal ended it."""
    timed_out: bool
    errors: str
    """The end of its error stream."""


def run_apart(
    module: str, arguments: list[str], folder: Path, limits: Limits, environment: Mapping[str, str] | None = None
) -> Finished:
    """Run ``python -m module`` in a sandbox.

    Args:
        folder: its working folder, and the only place where it should write.
        environment: further variables.

    Raises:
        LlmError: ``no-sandbox`` where the network cannot be taken away.
    """
    child = {name: os.environ[name] for name in KEPT if name in os.environ}
    child |= {"HOME": str(folder), "TMPDIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    child |= dict(environment or {})
    with open(folder / "errors.txt", "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardwright.agents.llm.kernel_writer.jail", module, *arguments],
            cwd=folder,
            env=child | {"SHARDWRIGHT_JAIL": _packed(limits)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code, timed_out = process.wait(limits.seconds), False
        except subprocess.TimeoutExpired:
            timed_out = True
            code = -signal.SIGKILL
        finally:
            _kill_group(process)
    text = (folder / "errors.txt").read_bytes()[-2000:].decode(errors="replace")
    if code == NO_SANDBOX:
        raise LlmError(
            "no-sandbox",
            "this machine gives no network namespace, so written code is not run",
            where="sandbox",
            next_action="allow user namespaces, or leave the kernel writer off",
        )
    return Finished(code, timed_out, text)


NO_SANDBOX = 97
"""Exit status of a child that could not shut itself in."""


def _packed(limits: Limits) -> str:
    return f"{limits.memory_bytes or 0} {limits.file_bytes} {limits.files} {int(limits.seconds) + 1}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def shut_in(packed: str) -> None:
    """Take network, and bound everything else; called in the child before any candidate's text is read.

    Raises:
        OSError: no network namespace can be had.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0 and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    memory, file_bytes, files, seconds = (int(part) for part in packed.split())
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_CPU, (64 * seconds, 64 * seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
