"""The engines, each a file of this folder: an explicit list. An engine's file is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from shardwright.schemas.errors import UsageError

if TYPE_CHECKING:
    from shardwright.runtime.launch.engine import Engine

NAMES = ("local", "slurm", "ray", "kubernetes", "skypilot")
"""In the order in which they are shown; ``runtime/launch/NAME.py`` holds the engine as its ``ENGINE``."""


def engine(name: str) -> Engine:
    """The engine of a name.

    Raises:
        UsageError: ``unknown-engine``.
    """
    if name not in NAMES:
        raise UsageError(
            "unknown-engine",
            f"{name!r} is not an engine; there are {', '.join(NAMES)}",
            where="runtime/launch/registry.py",
            next_action="name one of these",
        )
    found: Engine = importlib.import_module(f"shardwright.runtime.launch.{name}").ENGINE
    return found


def engines() -> tuple[Engine, ...]:
    """All of them, in the order of the list."""
    return tuple(engine(name) for name in NAMES)


def table() -> str:
    """The engines as docs/runs.md shows them."""
    rows = [f"| `{one.name}` | {one.happens} | {one.tested_on} |" for one in engines()]
    return "\n".join(["| engine | what happens | tested on |", "|---|---|---|", *rows, ""])
