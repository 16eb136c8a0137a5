"""A run's progress on stderr: one line a node, no control characters, the same on a terminal and in a log."""

from __future__ import annotations

import sys
import time

from shardwright.workflows.events import Event

MARKS = {"finished": "✓", "failed": "✗", "paused": "‖"}
LONG = {"structure", "search", "execute"}
"""Nodes whose start is told too; structure and search run beside each other."""


class Progress:
    """An event listener that prints."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._cached: set[str] = set()

    def __call__(self, event: Event) -> None:
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

    def _line(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
