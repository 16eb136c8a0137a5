"""A chat completion as it came over the wire, read without trust."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from shardwright.schemas.errors import LlmError

MOST_TOKENS = 1 << 40
"""A count above it is no count; the reply is then charged by its size."""


def strict_json(text: str | bytes) -> Any:
    """JSON without what only Python takes: no NaN, no infinity (``1e400`` too), no name twice in an object.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_once)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is out of range")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


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
            ToolCall(*map(encodable, (str(one.get("id") or f"call-{at}"), str(one["function"]["name"]), _text(one))))
            for at, one in enumerate(message.get("tool_calls") or ())
        )
        if not isinstance(text, str):
            raise TypeError("content is no text")
        text = encodable(text)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise LlmError(
            "bad-reply",
            f"the body is no chat completion: {type(error).__name__}",
            where="choices[0].message",
            next_action="use a server that speaks the chat completions protocol",
        ) from error
    return Reply(text, calls, _usage(body), bool(message.get("refusal")), choice.get("finish_reason") == "length")


def encodable(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can name and no file or request can hold."""
    return text.encode("utf-8", "replace").decode()


def _text(call: dict[str, Any]) -> str:
    arguments = call["function"].get("arguments") or "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _usage(body: dict[str, Any]) -> tuple[int, int] | None:
    found = body.get("usage")
    if not isinstance(found, dict):
        return None
    counts = (found.get("prompt_tokens"), found.get("completion_tokens"))
    if all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MOST_TOKENS for n in counts):
        return int(counts[0] or 0), int(counts[1] or 0)
    return None


def json_of(text: str) -> Any:
    """The JSON value in a model's text: whole, or in the outermost braces of what surrounds it.

    Raises:
        ValueError: there is none.
    """
    try:
        return strict_json(text)
    except ValueError:
        start, stop = text.find("{"), text.rfind("}")
        if start < 0 or stop <= start:
            raise ValueError("no JSON object in the text") from None
        return strict_json(text[start : stop + 1])
