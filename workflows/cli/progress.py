"""A run's progress on stderr: one line a node; on a terminal also a bar while a node counts its work."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars

from shardwright.workflows.events import Event

MARKS = {"finished": "✓", "failed": "✗", "paused": "‖"}
LONG = {"structure", "search", "execute"}
"""Nodes whose start is told too; structure and search run beside each other."""


class Progress:
    """An event listener that prints."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._cached: set[str] = set()
        self._bars: Bars | None = None

    def __call__(self, event: Event) -> None:
        if event.kind == "progress":
            self._bar(event)
            return
        if event.kind in MARKS and self._bars is not None and self._bars.tasks[0].description == event.node:
            self._bars.stop()
            self._bars = None
        if event.kind == "started":
            self._began[event.node] = time.monotonic()
            if event.node in LONG:
                self._line(f"▸ {event.node}")
        elif event.kind == "cached":
            self._cached.add(event.node)
        elif event.kind == "note":
            self._line(f"  {event.detail}")
        elif event.kind in MARKS:
            self._line(
                f"{MARKS[event.kind]} {event.node:<10}{self._took(event.node)}{event.detail and '  ' + event.detail}"
            )

    def _took(self, node: str) -> str:
        if node in self._cached:
            return " unchanged"
        began = self._began.get(node)
        return "" if began is None else f" {time.monotonic() - began:6.1f} s"

    def _bar(self, event: Event) -> None:
        """Nothing where stderr is no terminal: a log needs no control characters."""
        if not sys.stderr.isatty():
            return
        done, _, wanted = event.detail.partition("/")
        if self._bars is None:
            columns = TextColumn("  {task.description:<10}"), BarColumn(), MofNCompleteColumn()
            self._bars = Bars(*columns, console=Console(stderr=True), transient=True)
            self._bars.add_task(event.node, total=int(wanted))
            self._bars.start()
        self._bars.update(self._bars.task_ids[0], completed=int(done), refresh=done == wanted)

    def _line(self, text: str) -> None:
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
