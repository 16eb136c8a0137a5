"""Progress: a search tells how far it is; only a terminal sees a bar, and the event log keeps none of it."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
from pathlib import Path

import workflow_fakes as fakes

from shardwright.workflows.cli.progress import Progress
from shardwright.workflows.drive import drive
from shardwright.workflows.events import Event, read_events


def test_a_search_tells_its_trials_and_the_log_keeps_none(tmp_path: Path, request_of, approving) -> None:
    seen: list[Event] = []

    def search(*arguments, **named):
        for done in (1, 2):
            named["progress"](done, 2)
        return fakes.searched()

    stages = fakes.fake_stages(search=search)
    drive(request_of(), tmp_path / "run", stages=stages, policy=approving, listener=seen.append)
    assert [event.detail for event in seen if event.kind == "progress"] == ["1/2", "2/2"]
    assert all(event["kind"] != "progress" for event in read_events(tmp_path / "run"))


def everything(terminal: int) -> str:
    """What was written to a terminal whose other end is closed (reading on is EIO, then)."""
    parts = []
    with os.fdopen(terminal, "rb", buffering=0) as stream, contextlib.suppress(OSError):
        while part := stream.read(1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


def test_a_log_gets_lines_and_a_terminal_gets_a_bar(capsys, monkeypatch) -> None:
    events = [Event("search", "started"), *(Event("search", "progress", f"{n}/3") for n in (1, 2, 3))]
    events += [Event("structure", "note", "beside it"), Event("search", "finished")]
    tell = Progress()
    for event in events:
        tell(event)
    lines = capsys.readouterr().err
    assert "\r" not in lines and "\x1b" not in lines and [line[:1] for line in lines.splitlines()] == ["▸", " ", "✓"]

    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm-256color")
        tell = Progress()
        for event in events:
            tell(event)
    shown = everything(ours)
    assert "3/3" in shown and "beside it" in shown and "✓ search" in shown
