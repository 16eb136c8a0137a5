"""The checkpointer gives back plain values only, whatever stands in the database."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import ormsgpack

from shardwright.schemas.errors import ExitCode
from shardwright.workflows.serde import saver, strict_serializer

EXT_CONSTRUCTOR_SINGLE_ARG = 0


def test_a_stored_call_is_not_made(tmp_path: Path) -> None:
    """CVE-2026-28277: an extension value that names a callable must not be called while it is read."""
    marker = tmp_path / "called"
    payload = ormsgpack.packb(("os", "mkdir", str(marker)))
    stored = ormsgpack.packb(ormsgpack.Ext(EXT_CONSTRUCTOR_SINGLE_ARG, payload))
    strict_serializer().loads_typed(("msgpack", stored))
    assert not marker.exists()


def test_an_unregistered_class_comes_back_as_plain_data() -> None:
    serializer = strict_serializer()
    value = serializer.loads_typed(serializer.dumps_typed(ExitCode.OK))
    assert type(value) is not ExitCode


def test_pickle_is_refused() -> None:
    serializer = strict_serializer()
    try:
        serializer.loads_typed(("pickle", b"cos\nsystem\n(S'true'\ntR."))
    except NotImplementedError:
        return
    raise AssertionError("a pickle was read")


def test_strict_is_set_before_langgraph_is_imported() -> None:
    script = (
        "import shardwright.workflows.drive\n"
        "from langgraph.checkpoint.serde import _msgpack\n"
        "assert _msgpack.STRICT_MSGPACK_ENABLED"
    )
    environment = {k: v for k, v in os.environ.items() if k != "LANGGRAPH_STRICT_MSGPACK"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_the_database_is_private_and_synced(tmp_path: Path) -> None:
    with saver(tmp_path) as checkpointer:
        assert checkpointer.conn.execute("PRAGMA synchronous").fetchone() == (2,)
    assert stat.S_IMODE((tmp_path / "workflow.sqlite").stat().st_mode) == 0o600


def test_a_run_stores_no_constructor_calls(finished) -> None:
    """Every checkpoint of a real run reads back under the strict serializer as plain containers, text and numbers.

    Sets are the names that a join of two branches has seen; langgraph's own list of safe types holds ``set``.
    """
    connection = sqlite3.connect(finished.run_dir / "workflow.sqlite")
    rows = connection.execute("SELECT type, checkpoint FROM checkpoints").fetchall()
    connection.close()
    assert len(rows) >= 10
    for kind, blob in rows:
        loaded = strict_serializer().loads_typed((kind, blob))
        assert plain(loaded), loaded


def plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(plain(k) and plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)) or type(value) is set:
        return all(map(plain, value))
    return value is None or type(value) in (str, int, float, bool)
