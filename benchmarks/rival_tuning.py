"""Rivals that tune themselves when they first run: their candidates are compiled at once, not one after another.

What is timed, and which candidate is chosen, stays theirs. With a few hundred candidates of some seconds each the
tuning of one layer takes a minute of a GPU machine's cores in place of ten.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
