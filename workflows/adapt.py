"""The workflow: ingest → structure → propose → search → join → review → execute → check → export → report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.workflows import serde  # sets strict deserialisation before langgraph is imported
from shardwright.workflows.context import AdaptState, Context, Output
from shardwright.workflows.nodes import check, execute, export, ingest, join, propose, report, review, search, structure
from shardwright.workflows.retry import tried_again

from langgraph.checkpoint.base import BaseCheckpointSaver  # isort: skip
from langgraph.graph import END, START, StateGraph  # isort: skip

__all__ = ["NODES", "build_graph", "nodes_for", "serde"]

NODES: dict[str, Callable[[Context, AdaptState], Output]] = {
    module.NODE: module.run
    for module in (ingest, structure, propose, search, join, review, execute, check, export, report)
}
"""Name → node, in order of execution."""

FIRST = {"plan": ingest.NODE, "adapt": ingest.NODE, "apply": execute.NODE}


def nodes_for(goal: str) -> tuple[str, ...]:
    """Names of the nodes that a goal runs, in order. ``plan`` stops at the review's pause."""
    names = list(NODES)
    last = names.index(review.NODE) if goal == "plan" else len(names)
    return tuple(names[names.index(FIRST[goal]) : last])


def build_graph(context: Context, checkpointer: BaseCheckpointSaver[Any]) -> Any:
    """The compiled graph of one run.

    Args:
        context: run folder, request, stages; bound into every node.
        checkpointer: where state is kept between nodes.
    """
    names = list(NODES)
    names = names[names.index(FIRST[context.request.goal]) :]
    graph = StateGraph(AdaptState)
    for name in names:
        graph.add_node(name, _bound(name, context))
    for before, after in zip([START, *names], [*names, END], strict=True):
        graph.add_edge(before, after)
    return graph.compile(checkpointer=checkpointer, name="shardwright")


def _bound(name: str, context: Context) -> Any:
    node = NODES[name]

    def call(state: AdaptState) -> Output:
        if name != review.NODE:  # review's first act is its pause; the driver tells of it
            context.tell(name, "started")
        if name == review.NODE:
            output = node(context, state)
        else:
            output = tried_again(lambda: node(context, state), lambda words: context.tell(name, "note", words))
        context.tell(name, "finished")
        return output

    call.__name__ = name
    return call
