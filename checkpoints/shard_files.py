"""Bytes of a checkpoint's files: positioned reads of runs, many buffers in one call of the system.

No memory map: a file that shrinks while it is read is an error, not a crash.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

from shardwright.schemas.errors import CheckpointError

MOST_BUFFERS = 1024
"""Buffers that one call of the system fills at most."""
MOST_BYTES = 1 << 30
"""Bytes that one call of the system is asked for at most."""


class Run:
    """Bytes that follow each other in a file, and the buffers that take them."""

    def __init__(self, file: str, start: int) -> None:
        self.file, self.start, self.end = file, start, start
        self.buffers: list[memoryview] = []
        self.names: list[str] = []

    @classmethod
    def of(cls, file: str, start: int, out: torch.Tensor, name: str) -> Run:
        """A run of one buffer."""
        run = cls(file, start)
        run.add(out, name)
        return run

    def add(self, out: torch.Tensor, name: str) -> None:
        """What follows goes into ``out``, a contiguous CPU tensor; ``name`` is the file tensor that an error names."""
        view = memoryview(out.view(-1).view(torch.uint8).numpy().data)
        self.buffers.append(view)
        self.names.append(name)
        self.end += len(view)


class ShardFiles:
    """The files of a folder, each opened when it is first read. Threads may share one.

    Attributes:
        bytes_read: bytes taken from files so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._handles: dict[str, int] = {}
        self._lock = threading.Lock()

    def fill(self, run: Run) -> None:
        """Read a run's bytes into its buffers.

        Raises:
            CheckpointError: ``truncated-shard``, ``missing-shard``, ``unreadable-shard``, naming file and tensor.
        """
        views, at = list(run.buffers), run.start
        handle = self._handle(run.file) if views else -1
        while views:
            name = run.names[len(run.buffers) - len(views)]
            try:
                got = os.preadv(handle, _at_most(views), at)
            except OSError as error:
                raise self._unread(
                    "unreadable-shard", f"cannot read at byte {at}: {error.strerror}", run.file, name
                ) from error
            if got == 0:
                what = f"the file ends at byte {at}; its header promised more when it was read"
                raise self._unread("truncated-shard", what, run.file, name)
            at += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if got:
                views[0] = views[0][got:]
        with self._lock:
            self.bytes_read += at - run.start

    def _unread(self, code: str, what: str, file: str, name: str) -> CheckpointError:
        return CheckpointError(
            code,
            what,
            where=f"{self.folder / file}: {name}",
            next_action="fetch this file again; do not change a checkpoint while it is read",
        )

    def _handle(self, file: str) -> int:
        with self._lock:
            if file not in self._handles:
                try:
                    self._handles[file] = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointError(
                        "missing-shard",
                        f"cannot open: {error.strerror}",
                        where=str(self.folder / file),
                        next_action="fetch this file; check its permissions",
                    ) from error
            return self._handles[file]

    def close(self) -> None:
        """Close all files; they are opened again when they are read again."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def _at_most(views: list[memoryview]) -> list[memoryview]:
    """The first of ``views`` that one call may fill."""
    some, total = [], 0
    for view in views:
        some.append(view[: MOST_BYTES - total])
        total += len(some[-1])
        if total == MOST_BYTES:
            break
    return some
