"""The workflow's SQLite checkpointer with strict deserialisation: only plain values come back, never objects."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

# langgraph reads this once, at its first import.
os.environ["LANGGRAPH_STRICT_MSGPACK"] = "true"

if TYPE_CHECKING:
    from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
    from langgraph.checkpoint.sqlite import SqliteSaver


def strict_serializer() -> JsonPlusSerializer:
    """No pickle, no import by name: the allow-list beyond langgraph's own safe types is empty."""
    from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

    return JsonPlusSerializer(pickle_fallback=False, allowed_json_modules=None, allowed_msgpack_modules=None)


@contextmanager
def saver(run_dir: Path) -> Iterator[SqliteSaver]:
    """``RUN_DIR/workflow.sqlite``, readable by its owner only, synced to disk at every commit."""
    from langgraph.checkpoint.sqlite import SqliteSaver

    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "workflow.sqlite"
    path.touch(mode=0o600)
    connection = sqlite3.connect(path, check_same_thread=False, timeout=30)
    try:
        connection.execute("PRAGMA synchronous=FULL")
        yield SqliteSaver(connection, serde=strict_serializer())
    finally:
        connection.close()
