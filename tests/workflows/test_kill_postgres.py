"""SIGKILL at every node with the workflow's state in PostgreSQL; two runs share one database; a lost server is said."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import postgres
import pytest
import workflow_fakes as fakes
from test_kill import BESIDE, start, whole

from shardwright.schemas.errors import ApprovalError, RunError
from shardwright.workflows.adapt import NODES
from shardwright.workflows.drive import drive
from shardwright.workflows.serde import URL_VARIABLE, saver

needs_server = pytest.mark.skipif(not postgres.FOUND, reason="no PostgreSQL: apt-get install postgresql")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pytest.importorskip("psycopg", reason="needs the extra `postgres`")
    with postgres.postgresql() as address:
        yield address


@pytest.mark.slow
@needs_server
def test_killed_at_every_node_it_goes_on(url, tmp_path, inputs, monkeypatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, url)
    runs = {"alone": [node for node in NODES if node not in BESIDE], **{node: [node] for node in BESIDE}}
    for name, nodes in runs.items():
        run = tmp_path / name
        for node in nodes:
            killed = start(run, inputs, f"{node}:started")
            assert killed.returncode == -signal.SIGKILL, (node, killed.stderr)
        done = start(run, inputs)
        assert done.stdout == "finished", done.stderr
        whole(run)
        assert not (run / "workflow.sqlite").exists()


@needs_server
def test_two_runs_in_one_database_do_not_see_each_other(url, tmp_path, request_of, approving, monkeypatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, url)
    first = drive(request_of(), tmp_path / "a", stages=fakes.fake_stages(), policy=approving)
    assert first.status == "finished"
    with pytest.raises(ApprovalError):
        drive(request_of(), tmp_path / "b", stages=fakes.fake_stages())
    assert fakes.effects(tmp_path / "b") == []
    assert drive(request_of(), tmp_path / "b", stages=fakes.fake_stages(), policy=approving).status == "finished"


def test_a_server_that_does_not_answer_is_said(tmp_path, request_of, approving, monkeypatch) -> None:
    pytest.importorskip("psycopg", reason="needs the extra `postgres`")
    monkeypatch.setenv(URL_VARIABLE, "postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(RunError) as caught:
        drive(request_of(), tmp_path / "run", stages=fakes.fake_stages(), policy=approving)
    assert caught.value.code == "run/database-gone" and "start it" in caught.value.next_action


def test_a_locked_database_is_said_and_nothing_is_lost(tmp_path, request_of, approving, monkeypatch) -> None:
    monkeypatch.setattr("shardwright.workflows.serde.LOCKED_S", 0.2)
    run = tmp_path / "run"
    with saver(run):
        pass
    other = sqlite3.connect(run / "workflow.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(RunError) as caught:
        drive(request_of(), run, stages=fakes.fake_stages(), policy=approving)
    assert caught.value.code == "run/database-gone" and "locked" in caught.value.what
    other.execute("ROLLBACK")
    other.close()
    assert drive(request_of(), run, stages=fakes.fake_stages(), policy=approving).status == "finished"


def test_a_damaged_database_is_said(tmp_path: Path, request_of, approving) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "workflow.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(RunError, match="database-gone"):
        drive(request_of(), run, stages=fakes.fake_stages(), policy=approving)
