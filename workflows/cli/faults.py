"""What ends a command from outside the program, in the form of every other error."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from itertools import pairwise

from shardwright.schemas.errors import RunInterrupted, ShardwrightError

GO_ON = "the same command goes on from here"
ADVICE = {
    errno.ENOSPC: "free some space there, then start the same command again",
    errno.EACCES: "check its owner and permissions, or name another place",
    errno.EROFS: "name a place that can be written",
}


class SystemFault(ShardwrightError):
    """The operating system refused something."""

    area = "system"


def system_fault(error: OSError) -> SystemFault:
    """What the operating system refused, where, and what helps."""
    number = error.errno or 0
    return SystemFault(
        errno.errorcode.get(number, "unknown").lower(),
        error.strerror or str(error),
        where=str(error.filename if error.filename is not None else "this machine"),
        next_action=ADVICE.get(number, "mend that, then start the same command again"),
    )


def typed(error: ShardwrightError | KeyboardInterrupt | OSError) -> ShardwrightError:
    """Any of the ends that a report tells, as an error with a code."""
    if isinstance(error, KeyboardInterrupt):
        return RunInterrupted("by-signal", "SIGINT or SIGTERM came", where="this command", next_action=GO_ON)
    return system_fault(error) if isinstance(error, OSError) else error


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for its result as JSON."""
    return "--json" in words or "--output=json" in words or ("--output", "json") in pairwise(words)
