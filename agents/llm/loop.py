"""The agent loop: the model calls tools until it is done, stops calling, or a limit is reached."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypedDict

from shardwright.agents.llm.chat import Chat, Message
from shardwright.agents.llm.tools import Toolbox

REPEATS = 3
"""Times that the same call may be made before the loop is ended."""

MISSES = 6
"""Calls in a row that name no tool, no argument or no thing of ours before the loop is ended."""

RESULT_CHARACTERS = 12_000
SYSTEM = (
    "You advise a program that adapts mixture-of-experts checkpoints. You see extracted facts only. Code checks every "
    "suggestion; a suggestion that fails a check is dropped. Use the tools; end with the tool that ends."
)


class Talk(TypedDict):
    """State of one loop."""

    messages: list[Message]
    turns: int
    done: str
    """Why the loop ended; empty while it runs."""


@dataclass(frozen=True)
class Ended:
    """How a loop ended."""

    why: str
    turns: int


def run_loop(chat: Chat, toolbox: Toolbox, task: str) -> Ended:
    """Let a model work on a task.

    Args:
        task: our own words; facts come through tools.

    Raises:
        LlmError: a spent budget or a failed wire, after whatever the tools have already taken.
    """
    from langgraph.graph import END, START, StateGraph

    native = chat.can.tool_calls
    counts: dict[str, int] = {}
    missed = [0]
    limit = chat.budget.endpoint.limits.turns

    def model(state: Talk) -> Talk:
        options: dict[str, Any] = {"tools": toolbox.published()} if native else {}
        if not native and chat.can.schema_replies:
            options = toolbox.as_schema()
        reply = chat.send(state["messages"], **options)
        calls = toolbox.calls_in(reply)
        said: Message = {"role": "assistant", "content": reply.text[:RESULT_CHARACTERS]}
        if reply.calls:
            said["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
        messages, done = [*state["messages"], said], ""
        if not calls and reply.cut and not native:
            missed[0] += 1
            messages.append({"role": "user", "content": "The reply was cut at its limit. Answer in fewer words."})
        elif not calls:
            done = "the model refused" if reply.refused else "the model called no tool"
        for call in calls:
            key = json.dumps([call.name, call.arguments])
            counts[key] = counts.get(key, 0) + 1
            if counts[key] > REPEATS:
                done = done or "the model repeats one call"
                break
            result, ran = toolbox.call(call)
            missed[0] = missed[0] + 1 if "error" in result else 0
            text = json.dumps(result, sort_keys=True)[:RESULT_CHARACTERS]
            if reply.calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            else:
                messages.append({"role": "user", "content": f"Result: {text}"})
            if ran and toolbox.tools[call.name].ends:
                done = "complete"
        if missed[0] >= MISSES:
            done = done or f"{missed[0]} calls in a row named nothing that there is"
        turns = state["turns"] + 1
        return {"messages": messages, "turns": turns, "done": done or ("all turns are spent" if turns >= limit else "")}

    graph = StateGraph(Talk)
    graph.add_node("model", model)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", lambda state: END if state["done"] else "model", ["model", END])
    system = SYSTEM if native else f"{SYSTEM}\n{toolbox.in_words()}"
    opening: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    start: Talk = {"messages": opening, "turns": 0, "done": ""}
    last = graph.compile().invoke(start, {"recursion_limit": limit + 3})
    return Ended(last["done"], last["turns"])
