"""Words that a user wrote into a file."""

from __future__ import annotations

from pathlib import Path

from shardwright.schemas.errors import ShardwrightError


def read_text(path: Path, error: type[ShardwrightError]) -> str:
    """A file's text, which is UTF-8.

    Raises:
        error: ``unreadable``, naming the byte that is not.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise error(
            "unreadable",
            f"not UTF-8 text: byte {problem.object[problem.start]:#04x} at offset {problem.start}",
            where=str(path),
            next_action="save the file as UTF-8",
        ) from problem
