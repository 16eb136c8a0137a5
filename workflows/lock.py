"""One process at a time per run folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from shardwright.schemas.errors import RunError


class RunLock:
    """An advisory lock on ``RUN_DIR/lock``; the kernel lets go of it when the process dies.

    Raises:
        RunError: ``locked``, naming the process that holds it.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "lock"
        self._handle: int | None = None

    def __enter__(self) -> RunLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise RunError(
                "locked",
                f"process {holder} is working in this run folder",
                where=str(self.path),
                next_action="wait for it, watch it with `shardwright status`, or stop it with `shardwright cancel`",
            ) from error
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._handle = handle
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = None


def holder(run_dir: Path) -> int | None:
    """Process id of whoever holds the run folder now, or ``None``."""
    path = run_dir / "lock"
    if not path.is_file():
        return None
    with open(path) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = stream.read().strip()
            return int(text) if text.isdigit() else None
    return None
