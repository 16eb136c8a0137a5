"""A chat completion as it came over the wire, read without trust."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from shardwright.schemas.errors import LlmError


@dataclass(frozen=True)
class ToolCall:
    """One call that a model asks for; the arguments are still text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """What one completion says."""

    text: str
    calls: tuple[ToolCall, ...]
    usage: tuple[int, int] | None
    """Prompt and completion tokens; ``None`` where the server does not count."""
    refused: bool
    cut: bool
    """Whether the server stopped at its length limit."""


def read_reply(body: Any) -> Reply:
    """Read a decoded body.

    Raises:
        LlmError: ``bad-reply`` where it is not a chat completion.
    """
    try:
        choice = body["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        calls = tuple(
            ToolCall(str(one.get("id") or f"call-{at}"), str(one["function"]["name"]), _text(one["function"]))
            for at, one in enumerate(message.get("tool_calls") or ())
        )
        if not isinstance(text, str):
            raise TypeError("content is no text")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise LlmError(
            "bad-reply",
            f"the body is no chat completion: {type(error).__name__}",
            where="choices[0].message",
            next_action="use a server that speaks the chat completions protocol",
        ) from error
    return Reply(text, calls, _usage(body), bool(message.get("refusal")), choice.get("finish_reason") == "length")


def _text(function: dict[str, Any]) -> str:
    arguments = function.get("arguments") or "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _usage(body: dict[str, Any]) -> tuple[int, int] | None:
    found = body.get("usage")
    if not isinstance(found, dict):
        return None
    counts = (found.get("prompt_tokens"), found.get("completion_tokens"))
    if all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts):
        return int(counts[0] or 0), int(counts[1] or 0)
    return None


def json_of(text: str) -> Any:
    """The JSON value in a model's text: whole, or in the outermost braces of what surrounds it.

    Raises:
        ValueError: there is none.
    """
    try:
        return json.loads(text)
    except ValueError:
        start, stop = text.find("{"), text.rfind("}")
        if start < 0 or stop <= start:
            raise ValueError("no JSON object in the text") from None
        return json.loads(text[start : stop + 1])
