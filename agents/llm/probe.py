"""What a server can do, found by asking it: at most five calls, kept in the plan's provenance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from shardwright.agents.llm.chat import Chat
from shardwright.agents.llm.reply import json_of
from shardwright.agents.llm.strict_schema import strict_schema
from shardwright.schemas.errors import LlmError
from shardwright.schemas.llm import Capabilities

NOTHING = Capabilities(schema_replies=False, tool_calls=False, usage=False, sampling=False)


TOKENS = 64
"""Longest reply: a small model that does not stop on its own must not spend a budget on saying ready."""


class Ready(BaseModel):
    """The smallest reply under a schema."""

    model_config = ConfigDict(extra="forbid")
    state: Literal["ready"]


def probe(chat: Chat) -> Capabilities:
    """Ask, and see.

    Raises:
        LlmError: the server answers nothing at all, or a budget is spent.
    """
    ask = [{"role": "user", "content": 'Reply with the JSON object {"state": "ready"}.'}]
    sampling, usage = True, False
    try:
        usage = replace_can(chat, sampling=True).send(ask, tokens=TOKENS).usage is not None
    except LlmError as error:
        if error.code != "advice/status":
            raise
        sampling = False
        usage = replace_can(chat, sampling=False).send(ask, tokens=TOKENS).usage is not None
    plain = replace_can(chat, sampling=sampling)
    named = {"name": "Ready", "strict": True, "schema": strict_schema(Ready)}
    schema = _follows(plain, ask, response_format={"type": "json_schema", "json_schema": named})
    tool = {"name": "ready", "description": "Say ready.", "parameters": strict_schema(Ready)}
    call = [{"role": "user", "content": 'Call the tool "ready" with state "ready".'}]
    return Capabilities(
        schema_replies=schema,
        tool_calls=_calls(plain, call, tools=[{"type": "function", "function": tool}]),
        usage=usage,
        sampling=sampling,
    )


def replace_can(chat: Chat, *, sampling: bool) -> Chat:
    """The same conversation partner, thought able of nothing but plain replies."""
    return replace(chat, can=NOTHING.model_copy(update={"sampling": sampling}))


def _follows(chat: Chat, messages: list[dict[str, Any]], **options: Any) -> bool:
    try:
        Ready.model_validate(json_of(chat.send(messages, tokens=TOKENS, **options).text))
    except (ValidationError, ValueError, RecursionError):
        return False
    except LlmError as error:
        return _only_this(error)
    return True


def _calls(chat: Chat, messages: list[dict[str, Any]], **options: Any) -> bool:
    try:
        return any(call.name == "ready" for call in chat.send(messages, tokens=TOKENS, **options).calls)
    except LlmError as error:
        return _only_this(error)


def _only_this(error: LlmError) -> bool:
    """False where a server turned the option down; what would stop every call goes on."""
    if error.code not in ("advice/status", "advice/bad-reply", "advice/not-json"):
        raise error
    return False
