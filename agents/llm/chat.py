"""A conversation under budget: one request at a time, replies read without trust, a bad one sent back to be mended."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from shardwright.agents.llm.budget import Budget
from shardwright.agents.llm.recording import Recorder
from shardwright.agents.llm.reply import Reply, json_of, read_reply
from shardwright.agents.llm.strict_schema import strict_schema
from shardwright.schemas.errors import LlmError
from shardwright.schemas.llm import Capabilities
from shardwright.schemas.validation import explain

REPAIRS = 2
"""Times that a reply outside its schema is sent back."""

REPLY_TOKENS = 800
Message = dict[str, Any]
Shape = TypeVar("Shape", bound=BaseModel)

EVERYTHING = Capabilities(schema_replies=True, tool_calls=True, usage=True, sampling=True)


@dataclass
class Chat:
    """What an agent talks through.

    Args:
        wire: records every exchange.
        budget: charged by every exchange.
        can: what the server was seen to do.
    """

    wire: Recorder
    budget: Budget
    can: Capabilities = field(default=EVERYTHING)

    def send(self, messages: list[Message], *, tokens: int = REPLY_TOKENS, **options: Any) -> Reply:
        """One exchange.

        Args:
            tokens: longest reply.
            options: further fields of the request.

        Raises:
            LlmError: a spent budget, a failed wire, or a body that is no completion.
        """
        self.budget.open_call()
        request: dict[str, Any] = {"model": self.budget.endpoint.model, "messages": messages, **options}
        if self.can.sampling:
            request |= {"temperature": 0, "max_tokens": tokens}
        seconds = min(self.budget.endpoint.limits.reply_seconds, self.budget.seconds_left())
        body = self.wire.complete(request, seconds)
        reply = read_reply(body)
        self.budget.charge(len(json.dumps(request)), len(json.dumps(body)), reply.usage)
        return reply

    def ask(self, messages: list[Message], shape: type[Shape], *, tokens: int = REPLY_TOKENS) -> Shape:
        """A reply of one shape; a reply outside it is sent back with what is wrong, ``REPAIRS`` times.

        Raises:
            LlmError: as ``send``; ``refused``; ``off-schema`` after the last repair.
        """
        talk, options = list(messages), self._format(shape)
        if not options:
            talk[-1] = talk[-1] | {"content": f"{talk[-1]['content']}\n{schema_in_words(shape)}"}
        wrong = ""
        for _ in range(REPAIRS + 1):
            reply = self.send(talk, tokens=tokens, **options)
            if reply.refused:
                raise self._failed("refused", "the model refused to answer")
            try:
                return shape.model_validate(json_of(reply.text))
            except (ValidationError, ValueError, RecursionError) as error:
                wrong = explain(error) if isinstance(error, ValidationError) else "the reply holds no JSON object"
            talk = [*messages[:-1], talk[len(messages) - 1]]
            talk += [
                {"role": "assistant", "content": reply.text[:2000] or "(nothing)"},
                {"role": "user", "content": f"This does not fit the schema: {wrong[:400]}. Answer with JSON alone."},
            ]
        raise self._failed("off-schema", f"{REPAIRS + 1} replies outside the schema; the last: {wrong[:200]}")

    def _format(self, shape: type[BaseModel]) -> dict[str, Any]:
        if not self.can.schema_replies:
            return {}
        named = {"name": shape.__name__, "strict": True, "schema": strict_schema(shape)}
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    def _failed(self, code: str, what: str) -> LlmError:
        return LlmError(
            code, what, where=self.budget.endpoint.model, next_action="use another model, or the rules' result"
        )


def schema_in_words(shape: type[BaseModel]) -> str:
    """For servers without schema replies."""
    return f"Answer with one JSON object alone, of this schema: {json.dumps(strict_schema(shape), sort_keys=True)}"
