"""How long a node may take, and when nobody waits for it any more: its time is over, or a node beside it has failed.

One that takes longer ends with a typed cause, and the run stays before it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

from shardwright.schemas.errors import (
    CheckpointError,
    ClusterError,
    InfeasibleError,
    LegalityError,
    RecipeError,
    RunError,
    ShardwrightError,
    UsageError,
)

T = TypeVar("T")

DEFAULT_S: Mapping[str, float] = {
    "ingest": 1800,
    "structure": 7200,
    "propose": 1800,
    "search": 7200,
    "join": 1800,
    "check": 1800,
    "report": 1800,
}
"""Seconds. Training, its export and a reviewer take as long as they take, unless a limit is given for them."""
UNLIMITED = "review"

LEFT_BEHIND: list[threading.Thread] = []
"""Threads that nobody waits for. A process with one of them ends without waiting, too: it may be in native code."""


def parse_limits(words: Sequence[str], nodes: Sequence[str]) -> dict[str, float]:
    """``NODE=SECONDS`` words over the defaults.

    Raises:
        UsageError: ``bad-time-limit``, naming the nodes that may have one.
    """
    found = dict(DEFAULT_S)
    allowed = [node for node in nodes if node != UNLIMITED]
    for word in words:
        node, _, text = word.partition("=")
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if node not in allowed or not 0 < seconds < float("inf"):
            raise UsageError(
                "bad-time-limit",
                f"{word!r} is not NODE=SECONDS",
                where="--time-limit",
                next_action=f"write structure=600, for example; nodes: {', '.join(allowed)}",
            )
        found[node] = seconds
    return found


FINAL = (CheckpointError, ClusterError, InfeasibleError, LegalityError, RecipeError)
"""What the same inputs give again. After another failure the same command goes on, so what runs beside it is kept."""


class Failure:
    """The first final failure of a run's nodes: those beside it end with the same."""

    def __init__(self) -> None:
        self.first: Future[None] = Future()

    def tells(self, error: ShardwrightError) -> bool:
        """Whether the error is its node's own; a final one ends the nodes beside it."""
        if not isinstance(error, FINAL):
            return True
        try:
            self.first.set_exception(error)
        except InvalidStateError:
            return False
        return True


def limited(node: str, seconds: float | None, work: Callable[[], T], failure: Failure | None = None) -> T:
    """Do the work of a node, in a thread of its own that is left behind when nobody waits for it any more.

    What a left thread still writes is content-addressed and does no harm; it dies with the process.

    Raises:
        RunError: ``timed-out``.
        ShardwrightError: that of the node that failed first, where one beside this did.
    """
    if seconds is None:
        return work()
    worker = _Worker(work)
    worker.start()
    beside = () if failure is None else (failure.first,)
    wait((worker.outcome, *beside), seconds, FIRST_COMPLETED)
    if worker.outcome.done():
        return worker.outcome.result()
    LEFT_BEHIND.append(worker)
    if failure is not None and failure.first.done():
        failure.first.result()
    raise late(node, seconds)


class _Worker(threading.Thread, Generic[T]):
    """One call whose result or error waits for whoever started it."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.outcome: Future[T] = Future()

    def run(self) -> None:
        try:
            self.outcome.set_result(self.work())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self.outcome.set_exception(error)


@contextmanager
def interrupted_after(node: str, seconds: float | None) -> Iterator[None]:
    """Interrupt this process's main thread when the time is over, so that workers save before they stop.

    A shell's background job ignores interrupts; while this waits, it does not.

    Raises:
        RunError: ``timed-out`` in place of the interrupt.
    """
    if seconds is None:
        yield
        return
    over = threading.Event()

    def ring() -> None:
        over.set()
        os.kill(os.getpid(), signal.SIGINT)

    deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread()
    if deaf:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, ring)
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt as error:
        if over.is_set():
            raise late(node, seconds) from error
        raise
    finally:
        timer.cancel()
        if deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def late(node: str, seconds: float) -> RunError:
    """The cause of a node that took too long."""
    return RunError(
        "timed-out",
        f"{node} took longer than {seconds:g} s",
        where=node,
        next_action=f"start the same command again, with --time-limit {node}=SECONDS for more; what was done is kept",
    )
