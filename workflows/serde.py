"""The workflow's checkpointer with strict deserialisation: only plain values come back, never objects.

SQLite in the run folder by default; PostgreSQL where a URL is given, one thread a run folder.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.schemas.errors import RunError

# langgraph reads this once, at its first import.
os.environ["LANGGRAPH_STRICT_MSGPACK"] = "true"

URL_VARIABLE = "SHARDWRIGHT_DATABASE_URL"
"""Names the PostgreSQL database of the workflow; a URL may hold a password, so it is no option and in no file."""
LOCKED_S = 30.0

if TYPE_CHECKING:
    from langgraph.checkpoint.base import BaseCheckpointSaver
    from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
    from langgraph.checkpoint.sqlite import SqliteSaver


def strict_serializer() -> JsonPlusSerializer:
    """No pickle, no import by name: the allow-list beyond langgraph's own safe types is empty."""
    from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

    return JsonPlusSerializer(pickle_fallback=False, allowed_json_modules=None, allowed_msgpack_modules=None)


@contextmanager
def saver(run_dir: Path) -> Iterator[BaseCheckpointSaver[str]]:
    """The run folder's database, or PostgreSQL where ``SHARDWRIGHT_DATABASE_URL`` names one.

    Raises:
        RunError: ``database-gone`` or ``no-postgresql``.
    """
    url = os.environ.get(URL_VARIABLE)
    if url:
        with _postgres(url) as checkpointer:
            yield checkpointer
    else:
        with sqlite_saver(run_dir) as checkpointer:
            yield checkpointer


@contextmanager
def sqlite_saver(run_dir: Path) -> Iterator[SqliteSaver]:
    """``RUN_DIR/workflow.sqlite``, readable by its owner only, synced to disk at every commit."""
    from langgraph.checkpoint.sqlite import SqliteSaver

    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "workflow.sqlite"
    path.touch(mode=0o600)
    connection = sqlite3.connect(path, check_same_thread=False, timeout=LOCKED_S)
    try:
        connection.execute("PRAGMA synchronous=FULL")
        yield SqliteSaver(connection, serde=strict_serializer())
    except sqlite3.DatabaseError as error:
        raise RunError(
            "database-gone",
            f"the workflow's database cannot be used: {error}",
            where=str(path),
            next_action="end whatever else holds it open, then start the same command again: nodes that had finished "
            "are not run again",
        ) from error
    finally:
        connection.close()


@contextmanager
def _postgres(url: str) -> Iterator[BaseCheckpointSaver[str]]:
    try:
        import psycopg
        from langgraph.checkpoint.postgres import PostgresSaver
        from psycopg.rows import dict_row
    except ImportError as error:
        raise RunError(
            "no-postgresql",
            f"{URL_VARIABLE} is set, and {error.name} is not installed",
            where=URL_VARIABLE,
            next_action="pip install 'shardwright[postgres]', or unset the variable to use the run folder",
        ) from error
    try:
        with psycopg.connect(url, autocommit=True, prepare_threshold=0, row_factory=dict_row) as connection:
            checkpointer = PostgresSaver(connection, serde=strict_serializer())
            checkpointer.setup()
            yield checkpointer
    except psycopg.OperationalError as error:
        raise RunError(
            "database-gone",
            f"the workflow's database does not answer: {str(error).splitlines()[0]}",
            where=URL_VARIABLE,
            next_action="start it, then start the same command again: nodes that had finished are not run again",
        ) from error
