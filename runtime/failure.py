"""A failure as the launcher and later attempts find it. Imports nothing heavy: a restarted worker reads it first."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from pathlib import Path

from shardwright.schemas.errors import RunError, ShardwrightError
from shardwright.schemas.files import write_atomic

FILE, ROOM, SILENT = "failure.json", ".failure.room", "silent.txt"
ROOM_BYTES = 1 << 20
"""Kept free for the last words of a run whose disk is full: its failure, and its record as it ended."""
LASTING = {
    errno.ENOSPC: ("disk-full", "free some space there, then `shardwright resume`"),
    errno.EDQUOT: ("disk-full", "free some of the quota, then `shardwright resume`"),
    errno.EROFS: ("not-writable", "make it writable, then `shardwright resume`"),
    errno.EACCES: ("not-permitted", "correct owner or permissions, then `shardwright resume`"),
    errno.EPERM: ("not-permitted", "correct owner or permissions, then `shardwright resume`"),
}
"""System errors that a restart meets again."""
NO_MEMORY = "OutOfMemoryError"
"""The name of torch's error, which may not be imported here."""


def lasting(error: Exception, run_dir: Path) -> RunError | None:
    """The typed error of one that no restart mends, memory that ran out among them; ``None`` for one that may pass."""
    if isinstance(error, MemoryError) or type(error).__name__ == NO_MEMORY:
        return RunError(
            "out-of-memory",
            (str(error) or "the host gave no more memory").splitlines()[0],
            where=str(run_dir),
            next_action="a restart would meet it again: plan for more ranks or devices with more memory",
        )
    if not isinstance(error, OSError) or error.errno not in LASTING:
        return None
    code, next_action = LASTING[error.errno]
    where = error.filename if isinstance(error.filename, (str, bytes, os.PathLike)) else run_dir
    return RunError(code, str(error), where=os.fsdecode(where), next_action=next_action)


def record_failure(run_dir: Path, error: ShardwrightError) -> None:
    """Write the error (the first rank to fail wins; ranks that agree write the same) and show it.

    On a full disk the room that was kept for this is given up.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 or not (run_dir / FILE).exists():
        text = json.dumps({**error.as_dict(), "rank": rank}, indent=2).encode() + b"\n"
        try:
            write_atomic(run_dir / FILE, text)
        except OSError:
            free_room(run_dir)
            with contextlib.suppress(OSError):
                write_atomic(run_dir / FILE, text)
    with contextlib.suppress(OSError):
        sys.stderr.write(error.text() + "\n")
        sys.stderr.flush()


def keep_room(run_dir: Path) -> None:
    """Take space on the run's disk that :func:`record_failure` can give back.

    Raises:
        RunError: ``disk-full``, ``not-writable``, ``not-permitted``: a run that starts like this cannot tell its end.
    """
    try:
        if not (run_dir / ROOM).is_file() or (run_dir / ROOM).stat().st_size < ROOM_BYTES:
            write_atomic(run_dir / ROOM, bytes(ROOM_BYTES))
    except OSError as error:
        found = lasting(error, run_dir)
        if found is None:
            raise
        raise found from error


def free_room(run_dir: Path) -> None:
    """Give the kept space back to whoever must still write."""
    with contextlib.suppress(OSError):
        (run_dir / ROOM).unlink(missing_ok=True)


def record_silence(run_dir: Path, text: str) -> None:
    """Note that a rank waits in vain, and for whom; no failure, because a restart may mend it."""
    with contextlib.suppress(OSError):
        write_atomic(run_dir / SILENT, f"{text}\n".encode())
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def read_silence(run_dir: Path) -> str:
    """What :func:`record_silence` noted last; empty where nothing was."""
    path = run_dir / SILENT
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def read_failure(run_dir: Path) -> dict[str, str | int] | None:
    """``code``, ``what``, ``where``, ``next``, ``exit_code`` and ``rank`` of a run's failure; ``None`` without one."""
    path = run_dir / FILE
    if not path.is_file():
        return None
    found: dict[str, str | int] = json.loads(path.read_bytes())
    return found


def clear_failure(run_dir: Path) -> None:
    """Forget an earlier attempt's failure, and keep room for this one's.

    Raises:
        RunError: as :func:`keep_room`.
    """
    (run_dir / FILE).unlink(missing_ok=True)
    (run_dir / SILENT).unlink(missing_ok=True)
    keep_room(run_dir)


def end_if_failed(run_dir: Path) -> int | None:
    """Exit code of the recorded failure, for a worker that was restarted after it; ``None`` where there is none."""
    failure = read_failure(run_dir)
    return None if failure is None else int(failure["exit_code"])
