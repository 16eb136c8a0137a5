"""Where each rank is. One that stops is named with its place by those that wait for it, long before they give up.

A rank tells the job's store each place that it comes to: a few bytes, no file. Where it has not moved for too long, a
thread reads the places of all ranks, says which are behind, and ends this process: the launcher starts the ranks again
from the newest save.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol

from torch.distributed.distributed_c10d import _get_default_store

from shardwright.runtime.failure import record_silence

LIMIT_S = 25 * 60.0
"""Below the process group's own limit: after that a collective raises somewhere, and says nothing of who is missing."""
KEY = "shardwright/place"
SHOWN = 8


class Place(Protocol):
    """What is asked of a rank's place."""

    @property
    def world(self) -> int: ...

    @property
    def rank(self) -> int: ...


class Board(Protocol):
    """A store of bytes by name that all ranks see."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class Whereabouts:
    """One rank's side; the thread runs while it is entered.

    Args:
        ranks: this rank's place.
        run_dir: gets what was found.
        limit_s: the longest stay at one place.
        store: what all ranks see; the job's own unless told.
        end: ends this process.
    """

    def __init__(
        self,
        ranks: Place,
        run_dir: Path,
        limit_s: float = LIMIT_S,
        store: Board | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.rank, self.world, self.run_dir, self.limit_s, self.end = ranks.rank, ranks.world, run_dir, limit_s, end
        self.store: Board | None = store or (_get_default_store() if ranks.world > 1 else None)
        self.moves, self.place, self.since = 0, "the start", time.monotonic()
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def at(self, place: str) -> None:
        """This rank comes to a place."""
        self.moves, self.place, self.since = self.moves + 1, place, time.monotonic()
        if self.store is not None:
            self.store.set(f"{KEY}/{self.rank}", f"{self.moves} {place}")

    def __enter__(self) -> Whereabouts:
        if self.store is not None:
            self.since = time.monotonic()
            self.over.clear()
            self.thread = threading.Thread(target=self._watch, name="whereabouts", daemon=True)
            self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _watch(self) -> None:
        while not self.over.wait(min(15.0, self.limit_s / 4)):
            waited = time.monotonic() - self.since
            if waited > self.limit_s:
                record_silence(self.run_dir, self.behind(waited))
                self.end(1)
                return

    def behind(self, waited_s: float) -> str:
        """Which ranks have come less far than this one, and where they are."""
        assert self.store is not None
        told: list[tuple[int, int, str]] = []
        for rank in range(self.world):
            key = f"{KEY}/{rank}"
            moves, _, place = self.store.get(key).decode().partition(" ") if self.store.check([key]) else ("0", "", "")
            told.append((int(moves), rank, place or "the start"))
        late = [(rank, place) for moves, rank, place in sorted(told) if moves < self.moves]
        who = ", ".join(f"rank {rank} is at {place}" for rank, place in late[:SHOWN])
        more = f" and {len(late) - SHOWN} others" if len(late) > SHOWN else ""
        found = f"{who}{more}" if late else f"so are all {self.world} ranks, or further: a collective does not end"
        return f"rank {self.rank} has been at {self.place} for {waited_s:.0f} s; {found}"
