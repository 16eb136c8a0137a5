"""Rivals that tune themselves when they first run, without minutes of a GPU machine's time.

``compiled_at_once``: their candidates are compiled together, not one after another. What is timed, and which candidate
is chosen, stays theirs; the tuning of one layer takes a minute in place of ten. ``first_that_runs``: where only their
values matter, not their speed, no candidate is compared with another.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

WAITING = "candidates_to_compile"
"""Where an autotuner keeps the candidates of its next round until it times the first."""


@contextmanager
def compiled_at_once(workers: int | None = None) -> Iterator[None]:
    """Inside the block Triton's autotuner compiles a round's candidates together before it times the first of them.

    Results that it finds on disk make no round. A candidate that does not compile is left to the autotuner.

    Args:
        workers: threads; a core each unless told.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    prune, bench = Autotuner.prune_configs, Autotuner._bench
    pool = ThreadPoolExecutor(workers or os.cpu_count())

    def kept(self: Any, kwargs: dict[str, Any]) -> Any:
        found = prune(self, kwargs)
        self.__dict__[WAITING] = found
        return found

    def timed(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        if waiting := self.__dict__.pop(WAITING, None):
            with AsyncCompileMode(pool, ignore_errors=True):
                for one in waiting:
                    self.fn.run(*args, **{**meta, **one.all_kwargs(), "warmup": True})
        return bench(self, *args, config=config, **meta)

    Autotuner.prune_configs, Autotuner._bench = kept, timed
    try:
        yield
    finally:
        Autotuner.prune_configs, Autotuner._bench = prune, bench
        pool.shutdown(cancel_futures=True)


@contextmanager
def first_that_runs() -> Iterator[None]:
    """Inside the block Triton's autotuner takes the first candidate of a round that compiles and runs.

    For values, never for times: no choice made here is kept on disk, where one who tunes would find it, nor is one
    taken from there.
    """
    from triton.runtime.autotuner import Autotuner

    prune, bench, disk = Autotuner.prune_configs, Autotuner._bench, Autotuner.check_disk_cache
    settled: set[int] = set()

    def begun(self: Any, kwargs: dict[str, Any]) -> Any:
        settled.discard(id(self))
        return prune(self, kwargs)

    def tried(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        if id(self) in settled:
            return [math.inf] * 3
        found = bench(self, *args, config=config, **meta)
        if math.isfinite(found[0]):
            settled.add(id(self))
        return found

    def chosen(self: Any, key: Any, candidates: Any, choose: Callable[[], None]) -> bool:
        choose()
        return False

    Autotuner.prune_configs, Autotuner._bench, Autotuner.check_disk_cache = begun, tried, chosen
    try:
        yield
    finally:
        Autotuner.prune_configs, Autotuner._bench, Autotuner.check_disk_cache = prune, bench, disk
