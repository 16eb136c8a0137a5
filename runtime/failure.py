"""A failure as the launcher and later attempts find it. Imports nothing heavy: a restarted worker reads it first."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from shardwright.schemas.errors import ShardwrightError
from shardwright.schemas.files import write_atomic

FILE = "failure.json"


def record_failure(run_dir: Path, error: ShardwrightError) -> None:
    """Write the error (the first rank to fail wins; ranks that agree write the same) and show it."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 or not (run_dir / FILE).exists():
        write_atomic(run_dir / FILE, json.dumps({**error.as_dict(), "rank": rank}, indent=2).encode() + b"\n")
    sys.stderr.write(error.text() + "\n")
    sys.stderr.flush()


def read_failure(run_dir: Path) -> dict[str, str | int] | None:
    """``code``, ``what``, ``where``, ``next``, ``exit_code`` and ``rank`` of a run's failure; ``None`` without one."""
    path = run_dir / FILE
    if not path.is_file():
        return None
    found: dict[str, str | int] = json.loads(path.read_bytes())
    return found


def clear_failure(run_dir: Path) -> None:
    """Forget an earlier attempt's failure."""
    (run_dir / FILE).unlink(missing_ok=True)


def end_if_failed(run_dir: Path) -> int | None:
    """Exit code of the recorded failure, for a worker that was restarted after it; ``None`` where there is none."""
    failure = read_failure(run_dir)
    return None if failure is None else int(failure["exit_code"])
