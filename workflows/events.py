"""Progress of a run: one event a node boundary, written to ``events.jsonl`` and told to listeners."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

EventKind = Literal["started", "computed", "cached", "finished", "note", "failed", "paused", "progress"]


@dataclass(frozen=True)
class Event:
    """Something that happened at a node."""

    node: str
    kind: EventKind
    detail: str = ""


Listener = Callable[[Event], None]


def silent(event: Event) -> None:
    """A listener that wants nothing."""


class EventLog:
    """Appends events with the time to a file that ``shardwright logs`` reads, then tells the listener.

    ``progress`` ("done/wanted") is told and not kept: it says nothing once its node has ended.

    Branches that run beside each other take turns.
    """

    def __init__(self, run_dir: Path, listener: Listener = silent) -> None:
        self.path = run_dir / "events.jsonl"
        self.listener = listener
        self._turn = threading.Lock()

    def __call__(self, event: Event) -> None:
        if event.kind == "progress":
            with self._turn:
                self.listener(event)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **asdict(event)})
        with self._turn:
            with open(self.path, "a", encoding="utf-8") as stream:
                stream.write(line + "\n")
            self.listener(event)


def read_events(run_dir: Path) -> list[dict[str, str]]:
    """All whole lines of a run's event log; a last line cut off by a kill is left out."""
    path = run_dir / "events.jsonl"
    if not path.is_file():
        return []
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
