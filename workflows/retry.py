"""Trying a node again where its cause may pass by itself: a network or file system that stumbles, nothing else."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from shardwright.schemas.errors import RunError

T = TypeVar("T")

ATTEMPTS = 3
FIRST_WAIT_S = 0.5
"""Doubled before each further attempt."""
PASSING = frozenset(
    {errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ENETUNREACH, errno.ESTALE, errno.ETIMEDOUT}
)
"""System errors that network file systems give and take back."""


def passing(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    return isinstance(error, OSError) and error.errno in PASSING


def tried_again(
    work: Callable[[], T],
    tell: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    where: str = "workflow",
) -> T:
    """Do the work, at most three times.

    Args:
        tell: told each cause that passed, with the wait before the next attempt.

    Raises:
        RunError: ``kept-failing``, with the cause of the last attempt.
    """
    wait = FIRST_WAIT_S
    for attempt in range(1, ATTEMPTS):
        try:
            return work()
        except OSError as error:
            if not passing(error):
                raise
            tell(f"{type(error).__name__}: {error}; attempt {attempt} of {ATTEMPTS}, again in {wait:g} s")
        sleep(wait)
        wait *= 2
    try:
        return work()
    except OSError as error:
        if not passing(error):
            raise
        raise RunError(
            "kept-failing",
            f"{type(error).__name__}: {error}, {ATTEMPTS} times",
            where=where,
            next_action="mend the network or file system, then start the same command again: it goes on from here",
        ) from error
