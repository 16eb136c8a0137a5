"""Processes that end when the one that started them ends, and locks that end with their holder."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import sys
import time
from pathlib import Path

from shardwright.schemas.errors import RunError

PR_SET_PDEATHSIG = 1
PARENT = "SHARDWRIGHT_PARENT"
"""Process id of whoever started this one, for a child that must not outlive it."""


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends (Linux; elsewhere nothing happens).

    A polite signal would not do: a process that handles it in Python can be waiting for a lock that the interrupted
    code holds, and then stays for ever. Where :data:`PARENT` tells who the parent was, a parent that ended before this
    call is noticed too; the variable is taken out of the environment, so that grandchildren do not read it.
    """
    parent = os.environ.pop(PARENT, "")
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent.isdigit() and os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)


def tie_children() -> None:
    """Let children of this process know whom :func:`die_with_parent` must find as their parent."""
    os.environ[PARENT] = str(os.getpid())


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RunLock:
    """An exclusive lock on a run directory; the kernel releases it when the holder dies."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.path = run_dir / name
        self.handle = -1

    def acquire(self, wait_s: float) -> None:
        """Take the lock, waiting for a dying holder up to ``wait_s`` seconds.

        Raises:
            RunError: ``run-dir-in-use``, naming the holder's process.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    holder = os.pread(handle, 64, 0).decode(errors="replace").strip()
                    os.close(handle)
                    raise RunError(
                        "run-dir-in-use",
                        f"process {holder or '?'} is running in this directory",
                        where=str(self.path.parent),
                        next_action="wait for it, cancel it, or give another --run-dir",
                    ) from error
                time.sleep(0.2)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self.handle = handle

    def release(self) -> None:
        """Give the lock back."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
