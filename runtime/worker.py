"""One worker: takes an approved plan and nothing else, and executes it.

Started by torchrun's contract (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``):
``python -m shardwright.runtime.worker --plan P --approvals A --checkpoint C --recipe-root R --run-dir D``.

A failure that would come back on every attempt is written to ``failure.json`` in the run directory; a worker that is
restarted after one ends at once with the same exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from shardwright.runtime.failure import end_if_failed, free_room, lasting, record_failure
from shardwright.schemas.errors import ExitCode, ShardwrightError


def main(arguments: list[str] | None = None) -> int:
    """Run the plan; returns an exit code of ``schemas.errors``."""
    options = parse(arguments)
    previous = end_if_failed(options.run_dir)
    if previous is not None:
        return previous
    from shardwright.runtime.execute import close, execute

    failed = True
    try:
        execute(options.plan, options.approvals, options.checkpoint, options.recipe_root, options.run_dir)
        failed = False
        free_room(options.run_dir)
    except ShardwrightError as error:
        record_failure(options.run_dir, error)
        return int(error.exit_code)
    except (OSError, MemoryError, RuntimeError) as error:
        found = lasting(error, options.run_dir)
        if found is None:
            raise
        record_failure(options.run_dir, found)
        return int(found.exit_code)
    finally:
        close(failed)
    return int(ExitCode.OK)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The worker's flags."""
    parser = argparse.ArgumentParser(prog="shardwright.runtime.worker")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--approvals", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--recipe-root", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    return parser.parse_args(arguments)


def entry() -> None:
    """Run, then leave without the interpreter's shutdown: some builds abort in it after all work is done."""
    from shardwright.runtime.launch.process import die_with_parent

    die_with_parent()
    code = main()
    if (remote := sys.modules.get("shardwright.checkpoints.remote_code")) is not None:
        remote.release()
    with contextlib.suppress(OSError):  # a full disk under the logs must not change the exit code
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
