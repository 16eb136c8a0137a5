"""The workflow: ingest → (structure → propose) beside search → join → review → execute → check → export → report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.schemas.errors import ShardwrightError
from shardwright.workflows import serde  # sets strict deserialisation before langgraph is imported
from shardwright.workflows.context import AdaptState, Context, Output
from shardwright.workflows.limits import interrupted_after, limited
from shardwright.workflows.nodes import (
    advise,
    check,
    execute,
    export,
    ingest,
    join,
    propose,
    report,
    review,
    search,
    structure,
)
from shardwright.workflows.retry import tried_again

from langgraph.checkpoint.base import BaseCheckpointSaver  # isort: skip
from langgraph.graph import END, START, StateGraph  # isort: skip

__all__ = ["AFTER", "NODES", "build_graph", "descendants", "nodes_for", "serde"]

NODES: dict[str, Callable[[Context, AdaptState], Output]] = {
    module.NODE: module.run
    for module in (ingest, structure, propose, search, join, review, execute, check, export, report)
}
"""Name → node, in order of execution."""

ALL = NODES | {advise.NODE: advise.run}
"""With the node that runs only where a language model is asked."""

AFTER: dict[str, tuple[str, ...]] = {
    ingest.NODE: (),
    structure.NODE: (ingest.NODE,),
    propose.NODE: (structure.NODE,),
    search.NODE: (ingest.NODE,),
    join.NODE: (propose.NODE, search.NODE),
    review.NODE: (join.NODE,),
    execute.NODE: (review.NODE,),
    check.NODE: (execute.NODE,),
    export.NODE: (check.NODE,),
    report.NODE: (export.NODE,),
}
"""Node → those that it waits for. Structure parsing and the search over the cluster's space run beside each other."""

ADVISED: dict[str, tuple[str, ...]] = {
    advise.NODE: (structure.NODE,),
    propose.NODE: (advise.NODE,),
    search.NODE: (advise.NODE,),
}
"""What waits for what where a language model is asked: it sees its own capture, and two captures never run at once."""

FIRST = {"plan": ingest.NODE, "adapt": ingest.NODE, "apply": execute.NODE}
MAIN_THREAD = (execute.NODE,)
"""Nodes whose workers are ended by an interrupt of the main thread."""


def nodes_for(goal: str) -> tuple[str, ...]:
    """Names of the nodes that a goal runs, in order. ``plan`` stops at the review's pause."""
    names = list(NODES)
    last = names.index(review.NODE) if goal == "plan" else len(names)
    return tuple(names[names.index(FIRST[goal]) : last])


def descendants(node: str) -> frozenset[str]:
    """Every node that waits, directly or not, for this one."""
    found = {node}
    for name in NODES:
        if found.intersection(AFTER[name]):
            found.add(name)
    return frozenset(found - {node})


def build_graph(context: Context, checkpointer: BaseCheckpointSaver[Any]) -> Any:
    """The compiled graph of one run.

    Args:
        context: run folder, request, stages; bound into every node.
        checkpointer: where state is kept between nodes.
    """
    names, waits = list(NODES), AFTER
    names = names[names.index(FIRST[context.request.goal]) :]
    if context.request.llm is not None and ingest.NODE in names:
        names, waits = [*names[:1], advise.NODE, *names[1:]], AFTER | ADVISED
    graph = StateGraph(AdaptState)
    for name in names:
        graph.add_node(name, _bound(name, context))
    for name in names:
        before = [one for one in waits[name] if one in names]
        graph.add_edge(before if len(before) > 1 else (before or [START])[0], name)
    graph.add_edge(names[-1], END)
    return graph.compile(checkpointer=checkpointer, name="shardwright")


def _bound(name: str, context: Context) -> Any:
    node = ALL[name]

    def call(state: AdaptState) -> Output:
        if name == review.NODE:  # its first act is its pause; the driver tells of it
            output = node(context, state)
        else:
            context.tell(name, "started")
            output = _worked(name, context, state)
        context.tell(name, "finished")
        return output

    call.__name__ = name
    return call


def _worked(name: str, context: Context, state: AdaptState) -> Output:
    """A node's output, within its time; what ends it is told under its name, and ends the node beside it."""

    def work() -> Output:
        return tried_again(
            lambda: ALL[name](context, state), lambda words: context.tell(name, "note", words), where=name
        )

    seconds = context.limits.get(name)
    try:
        if name in MAIN_THREAD:
            with interrupted_after(name, seconds):
                return work()
        return limited(name, seconds, work, context.failure)
    except ShardwrightError as error:
        if context.failure.tells(error):
            context.tell(name, "failed", error.code)
        else:
            context.tell(name, "note", f"{name} was ended: {error.code} beside it")
        raise
