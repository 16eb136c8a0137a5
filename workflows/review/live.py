"""What the page hears while it is open: the course of the plan's run, and that another reviewer changed the plan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from shardwright.schemas.errors import ShardwrightError
from shardwright.workflows.lock import holder
from shardwright.workflows.request import request_path
from shardwright.workflows.watching import RunStatus, run_status

POLL_S = 0.5
STILL_S = 15.0
"""A comment is sent after so long without news, so that a closed connection is noticed."""
SIGNS = ("events.jsonl", "metrics.jsonl", "run.json", "launch.json")
"""Files of a run folder whose change is news."""


def run_of(plan_file: Path) -> RunStatus | str | None:
    """The run that a plan file belongs to, or what is wrong with it; ``None`` for a plan outside of a run folder."""
    folder = plan_file.resolve().parent
    if not request_path(folder).is_file():
        return None
    try:
        return run_status(folder)
    except ShardwrightError as error:
        return error.what


def signature(plan_file: Path) -> tuple[object, ...]:
    """Changes whenever there may be news; costs a few looks at the folder."""
    folder = plan_file.resolve().parent
    paths = [plan_file, *(folder / name for name in SIGNS)]
    facts = [path.stat() if path.is_file() else None for path in paths]
    return (holder(folder), *((one.st_mtime_ns, one.st_size) if one is not None else None for one in facts))


def message(event: str, data: str) -> str:
    """One server-sent event."""
    lines = "".join(f"data: {line}\n" for line in data.splitlines() or [""])
    return f"event: {event}\n{lines}\n"


async def news(
    plan_file: Path, look: Callable[[], dict[str, str]], over: Callable[[], Awaitable[bool]]
) -> AsyncIterator[str]:
    """Server-sent events until the connection is over: each kind at first, then whenever it has changed.

    Args:
        look: event → its data now; called only where a file has changed.
        over: whether the browser has left or the server ends.
    """
    told: dict[str, str] = {}
    seen: tuple[object, ...] | None = None
    still = 0.0
    while not await over():
        now = await run_in_threadpool(signature, plan_file)
        if now != seen:
            seen = now
            for event, data in (await run_in_threadpool(look)).items():
                if told.get(event) != data:
                    told[event] = data
                    still = 0.0
                    yield message(event, data)
        if still >= STILL_S:
            still = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(POLL_S)
        still += POLL_S
