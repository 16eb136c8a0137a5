"""Every kind of error reaches the shell as its exit code, with code, place and next action on stderr."""

from __future__ import annotations

import pytest

from shardwright.schemas.errors import ExitCode, ShardwrightError
from shardwright.workflows.runs import every_error

KINDS = every_error(ShardwrightError)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_of_each_kind(cli, monkeypatch, kind: type[ShardwrightError]) -> None:
    def examine() -> None:
        raise kind("a-code", "what was found", where="a place", next_action="a next step")

    monkeypatch.setattr("shardwright.workflows.machine.examine", examine)
    done = cli("doctor")
    assert done.code == int(kind.exit_code) and done.out == ""
    assert f"error: [{kind.area}/a-code] what was found" in done.err
    assert "where: a place" in done.err and "next:  a next step" in done.err


def test_the_kinds_cover_the_table() -> None:
    assert {kind.exit_code for kind in KINDS} >= set(ExitCode) - {ExitCode.OK, ExitCode.INTERRUPTED}


def test_an_interrupt_ends_with_130(cli, monkeypatch) -> None:
    def examine() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwright.workflows.machine.examine", examine)
    assert cli("doctor").code == 130
