"""Runs as their folders tell them: the list, one run's course, and a fork that starts again at a node."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

from shardwright.schemas.base import Model
from shardwright.schemas.errors import RunError, ShardwrightError, UsageError
from shardwright.workflows.adapt import descendants, nodes_for
from shardwright.workflows.events import read_events
from shardwright.workflows.request import request_path, require_run
from shardwright.workflows.watching import RunStatus, run_status

REVIEWED = ("plan.json", "plans", "approvals.jsonl", "approvals.jsonl.head", "policy_result.json")
"""What stands after review."""
FORKABLE = ("ingest", "structure", "propose", "search", "join", "review", "execute")


class Visit(Model):
    """One time that a node ran, or was found to have nothing to do."""

    node: str
    started: str
    seconds: float | None
    end: str
    """``finished``, ``unchanged``, ``cut off``, or ``failed: CODE``."""


def runs_in(root: Path) -> tuple[tuple[Path, RunStatus | str], ...]:
    """Run folders under a root by name, each with its status or the code of what is wrong with it.

    Raises:
        UsageError: ``no-folder`` or ``is-a-run``.
    """
    if not root.is_dir():
        raise UsageError(
            "no-folder",
            "this is a file" if root.exists() else "no such folder",
            where=str(root),
            next_action="name the folder that holds the runs, such as runs",
        )
    if request_path(root).is_file():
        raise UsageError(
            "is-a-run",
            "this folder is a run itself",
            where=str(root),
            next_action=f"`shardwright runs show {root}` shows its course; --root names the folder around it",
        )
    found: list[tuple[Path, RunStatus | str]] = []
    for folder in sorted(path for path in root.iterdir() if request_path(path).is_file()):
        try:
            found.append((folder, run_status(folder)))
        except ShardwrightError as error:
            found.append((folder, error.code))
    return tuple(found)


def visits(run_dir: Path) -> tuple[Visit, ...]:
    """A run's course, oldest first, every restart included.

    Raises:
        RunError: ``no-run``.
    """
    require_run(run_dir)
    found: list[Visit] = []
    open_at: dict[str, tuple[str, bool]] = {}
    for event in read_events(run_dir):
        node, kind, moment = event["node"], event["kind"], event["time"]
        if kind == "started":
            if node in open_at:
                found.append(Visit(node=node, started=open_at[node][0], seconds=None, end="cut off"))
            open_at[node] = (moment, False)
        elif node in open_at and kind == "cached":
            open_at[node] = (open_at[node][0], True)
        elif node in open_at and kind in ("finished", "failed", "paused"):
            began, cached = open_at.pop(node)
            words = "unchanged" if cached and kind == "finished" else kind
            end = words if kind == "finished" else f"{kind}: {event['detail']}"
            took = (datetime.fromisoformat(moment) - datetime.fromisoformat(began)).total_seconds()
            found.append(Visit(node=node, started=began, seconds=took, end=end))
    found += [Visit(node=node, started=began, seconds=None, end="cut off") for node, (began, _) in open_at.items()]
    return tuple(sorted(found, key=lambda visit: visit.started))


def fork(run_dir: Path, at: str, target: Path) -> Path:
    """A new run folder that has done what this one had done beside and before a node, and nothing after.

    Nodes before it are found in the copied memory and not run again; the node and all after it run anew when the fork
    is resumed. The first run is not touched.

    Args:
        at: the first node that runs again.
        target: a folder that is not there yet.

    Raises:
        UsageError: ``unknown-node`` or ``exists``.
        RunError: ``not-reached``: this run has not come to that node.
    """
    request = require_run(run_dir)
    nodes = nodes_for(request.goal)
    if at not in nodes or at not in FORKABLE:
        known = ", ".join(node for node in nodes if node in FORKABLE)
        raise UsageError("unknown-node", f"no fork at {at!r}", where="--at", next_action=f"name one of: {known}")
    if target.exists():
        raise UsageError("exists", "the folder is there already", where=str(target), next_action="name another --to")
    later = descendants(at) | {at}
    before = [node for node in nodes if node not in later]
    needed = [node for node in before if at in descendants(node)]
    done = {visit.node for visit in visits(run_dir) if visit.end in ("finished", "unchanged")}
    if missing := [node for node in needed if node not in done]:
        raise RunError(
            "not-reached",
            f"the run has not finished {', '.join(missing)}",
            where=str(run_dir),
            next_action=f"fork at {missing[0]}, or resume the run first",
        )
    part = target.with_name(f".{target.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    shutil.copy2(request_path(run_dir), part)
    if (run_dir / "artifacts").is_dir():
        shutil.copytree(run_dir / "artifacts", part / "artifacts")
    for memo in sorted((run_dir / "memo").glob("*.json")):
        if memo.name.split("-", 1)[0] in before:
            (part / "memo").mkdir(exist_ok=True)
            shutil.copy2(memo, part / "memo")
    if at == "execute":
        for name in REVIEWED:
            _copy(run_dir / name, part / name)
    (part / "forked.json").write_text(json.dumps({"from": run_dir.name, "at": at}, sort_keys=True) + "\n")
    part.rename(target)
    return target


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.is_file():
        shutil.copy2(source, target)
