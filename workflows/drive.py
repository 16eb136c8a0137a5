"""Start a run or go on with it, until it is finished, paused at review, or failed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwright.schemas.errors import ShardwrightError
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.policy import Policy
from shardwright.workflows.adapt import build_graph
from shardwright.workflows.cache import NodeCache
from shardwright.workflows.context import AdaptState, Context
from shardwright.workflows.decide import Reviewer, settle
from shardwright.workflows.events import EventLog, Listener, silent
from shardwright.workflows.limits import DEFAULT_S
from shardwright.workflows.lock import RunLock
from shardwright.workflows.remote_code import isolated
from shardwright.workflows.request import Request, claim
from shardwright.workflows.search_options import stages_for
from shardwright.workflows.serde import URL_VARIABLE, saver
from shardwright.workflows.stages import Stages


def config_of(run_dir: Path) -> dict[str, Any]:
    """The thread of a run: its folder's request where runs share a database, so that none sees another's state."""
    shared = bool(os.environ.get(URL_VARIABLE))
    return {"configurable": {"thread_id": f"run:{run_dir.resolve()}" if shared else "run"}}


@dataclass(frozen=True)
class Outcome:
    """Where a run stands when the driver returns."""

    status: Literal["planned", "finished"]
    run_dir: Path
    state: AdaptState
    plan: AdaptationPlan


def drive(
    request: Request,
    run_dir: Path,
    *,
    stages: Stages | None = None,
    listener: Listener = silent,
    policy: Policy | None = None,
    reviewer: Reviewer | None = None,
    start: AdaptState | None = None,
    limits: Mapping[str, float] | None = None,
    cache: NodeCache | None = None,
) -> Outcome:
    """Run the workflow of a request in its folder. The same call again goes on where the last one ended.

    Args:
        request: inputs; must be the folder's own.
        policy: decides at review where no person does (headless).
        reviewer: asks a person at review; may put a child plan into the folder.
        start: first state where the graph starts past ingest (``apply``).
        limits: node → seconds; by default those of ``workflows.limits``.
        cache: results of other runs on this machine.

    Raises:
        ApprovalError, PolicyDenied: review did not approve; the run stays paused.
        RunError: ``locked``.
        ShardwrightError: whatever a node raises; the run stays before that node.
    """
    with RunLock(run_dir):
        claim(run_dir, request)
        log = EventLog(run_dir, listener)
        config = config_of(run_dir)
        context = Context(
            run_dir=run_dir,
            request=request,
            stages=isolated(stages or stages_for(request), Path(request.checkpoint), request.trust_remote_code),
            log=log,
            limits=DEFAULT_S if limits is None else limits,
            cache=cache if request.trust_remote_code is None else None,
        )
        with saver(run_dir) as checkpointer:
            graph = build_graph(context, checkpointer)
            snapshot = graph.get_state(config)
            step: Any = None if snapshot.next else {"request": request.key(), **(start or {})}
            if not snapshot.next and snapshot.values.get("report"):
                return _outcome("finished", context, snapshot.values)
            while True:
                if snapshot.interrupts:
                    if request.goal == "plan":
                        return _outcome("planned", context, snapshot.values)
                    step = _wake(context, snapshot.values, policy, reviewer)
                graph.invoke(step, config, durability="sync")
                snapshot = graph.get_state(config)
                step = None
                if not snapshot.next:
                    return _outcome("finished", context, snapshot.values)


def _wake(context: Context, state: AdaptState, policy: Policy | None, reviewer: Reviewer | None) -> Any:
    from langgraph.types import Command

    context.tell("review", "started")
    try:
        verdict = settle(context, context.plan(state["plan"]), policy, reviewer)
    except ShardwrightError as error:
        context.tell("review", "paused", error.code)
        raise
    context.tell("review", "note", f"plan {verdict.decision_sha256[:16]}… approved by {verdict.actor}")
    return Command(resume={"decided": True})


def _outcome(status: Literal["planned", "finished"], context: Context, state: AdaptState) -> Outcome:
    return Outcome(status, context.run_dir, state, context.plan(state["plan"]))
