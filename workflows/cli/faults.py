"""What ends a command from outside the program, in the form of every other error."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from itertools import pairwise

from shardwright.schemas.errors import RunInterrupted, ShardwrightError, UsageError

Fault = ShardwrightError | KeyboardInterrupt | OSError | RecursionError
"""What the command line turns into words and an exit code."""

GO_ON = "the same command goes on from here"
ADVICE = {
    errno.ENOSPC: "free some space there, then start the same command again",
    errno.EACCES: "check its owner and permissions, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.EDQUOT: "free some of your quota there, then start the same command again",
    errno.EEXIST: "something else stands where a folder or file is to be written: name another place",
    errno.ENOTDIR: "a file stands where a folder is meant: name another place",
    errno.EISDIR: "this is a folder: name a file",
    errno.ENOENT: "check the name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "the link leads to itself: name another place",
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


class InternalFault(ShardwrightError):
    """Something that no part of the program foresaw."""

    area = "internal"


def internal(error: BaseException, where: str) -> InternalFault:
    """A fault of this program, with what a report of it needs."""
    return InternalFault(
        "unforeseen",
        f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a word'}",
        where=where,
        next_action="this is a fault of shardwright: start the command again with SHARDWRIGHT_TRACEBACK=1 and report "
        "what it prints",
    )


def typed(error: Fault) -> ShardwrightError:
    """Any of the ends that a report tells, as an error with a code."""
    if isinstance(error, KeyboardInterrupt):
        return RunInterrupted("by-signal", "SIGINT or SIGTERM came", where="this command", next_action=GO_ON)
    if isinstance(error, RecursionError):
        return UsageError(
            "too-deep",
            "a file is nested too deeply to be read",
            where="one of the files that the command names",
            next_action="it is no recipe, cluster, policy, plan or run of shardwright: name another file",
        )
    return system_fault(error) if isinstance(error, OSError) else error


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for its result as JSON."""
    return "--json" in words or "--output=json" in words or ("--output", "json") in pairwise(words)
