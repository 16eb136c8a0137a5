"""Tools without side effects: what a model may call, and how a call is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shardwright.agents.llm.reply import Reply, ToolCall, json_of
from shardwright.agents.llm.strict_schema import strict_schema
from shardwright.schemas.validation import explain

Choices = dict[str, tuple[Any, ...]]


class Arguments(BaseModel):
    """Base of all tool arguments: closed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoArguments(Arguments):
    """For tools that take none."""


@dataclass(frozen=True)
class Tool:
    """One thing to ask for.

    Args:
        run: the arguments in, facts out (``redact.facts_only`` has seen them).
        ends: whether the agent is done once this was called.
        choices: alternatives, each argument → the values that would tell something new now; none closes the tool.
    """

    name: str
    description: str
    arguments: type[Arguments]
    run: Callable[[Any], dict[str, Any]]
    ends: bool = False
    choices: Callable[[], tuple[Choices, ...]] = lambda: ({},)

    def published(self) -> dict[str, Any]:
        """As a request's ``tools`` entry."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": strict_schema(self.arguments),
            "strict": True,
        }
        return {"type": "function", "function": function}


class Toolbox:
    """The tools of one agent."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.told: set[str] = set()
        """Tools without arguments that were called: they would say the same again."""

    def published(self) -> list[dict[str, Any]]:
        return [tool.published() for tool in self.tools.values()]

    def in_words(self) -> str:
        """For servers without tool calls: the same as text, with the form of a call."""
        lines = [
            f"- {tool.name}: {tool.description} arguments: {json.dumps(strict_schema(tool.arguments), sort_keys=True)}"
            for tool in self.tools.values()
        ]
        form = '{"tool": NAME, "arguments": {...}}'
        return f"Answer with one JSON object alone, {form}. Tools:\n" + "\n".join(lines)

    def as_schema(self) -> dict[str, Any]:
        """For servers with schema replies but without tool calls: one call, of those that tell something new now."""
        calls = [
            {
                "type": "object",
                "properties": {"tool": {"const": tool.name}, "arguments": arguments},
                "required": ["tool", "arguments"],
                "additionalProperties": False,
            }
            for tool in self.tools.values()
            for arguments in self._offered(tool)
        ]
        schema = {"type": "object", "properties": {"call": {"anyOf": calls}}, "required": ["call"]}
        named = {"name": "Call", "strict": True, "schema": schema | {"additionalProperties": False}}
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    def _offered(self, tool: Tool) -> Iterator[dict[str, Any]]:
        """Schemas of a tool's arguments with what can be chosen now; none where a call would be in vain."""
        for choices in () if tool.name in self.told else tool.choices():
            if not all(choices.values()):
                continue
            schema = strict_schema(tool.arguments)
            for name, values in choices.items():
                one = schema["properties"][name]
                if one.get("type") == "array":
                    one |= {"items": one["items"] | {"enum": list(values)}, "maxItems": len(values)}
                else:
                    one["enum"] = list(values)
            yield schema

    def calls_in(self, reply: Reply) -> tuple[ToolCall, ...]:
        """The calls of a reply: its own, or one written as JSON text."""
        if reply.calls:
            return reply.calls
        try:
            found = json_of(reply.text)
            found = found.get("call", found)
            return (ToolCall("text-0", str(found["tool"]), json.dumps(found.get("arguments") or {})),)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return ()

    def call(self, call: ToolCall) -> tuple[dict[str, Any], bool]:
        """Run one call; what is wrong with it is a result, too. Second: whether it was a call at all that ran."""
        tool = self.tools.get(call.name)
        if tool is None:
            return {"error": "no such tool", "tools": sorted(self.tools)}, False
        try:
            arguments = tool.arguments.model_validate(json_of(call.arguments))
        except ValidationError as error:
            return {"error": explain(error)[:300]}, False
        except (ValueError, RecursionError):
            return {"error": "the arguments are no JSON object"}, False
        if not type(arguments).model_fields:
            self.told.add(tool.name)
        return tool.run(arguments), True
