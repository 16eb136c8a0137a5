"""Conversations to token ids by the checkpoint's own chat template, and which tokens a completion-only loss counts.

Templates come with checkpoints, so they are rendered in jinja2's immutable sandbox: no attribute that starts with an
underscore, no call that changes a value, nothing of the machine in reach.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.runtime.records import json_of, lines_of, messages_of
from shardwright.schemas.errors import RecipeError

MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """Tokens that belong together.

    Attributes:
        ids: [n] int64.
        counted: [n] bool; whether the loss counts this token where it is predicted.
    """

    ids: np.ndarray
    counted: np.ndarray


class ChatTemplate:
    """A checkpoint's chat template.

    Raises:
        RecipeError: ``no-chat-template``, ``bad-chat-template``.
    """

    def __init__(self, checkpoint: Path) -> None:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.checkpoint = checkpoint
        text, self.tokens = _template(checkpoint)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _tojson
        try:
            self.template = environment.from_string(text)
        except TemplateError as error:
            raise _bad(checkpoint, str(error)) from error

    def render(self, messages: list[dict[str, Any]], where: str, *, open_turn: bool = False) -> str:
        """The text of a conversation; ``open_turn`` adds what stands before an answer.

        Raises:
            RecipeError: ``bad-chat-template`` when the template refuses or leaves the sandbox.
        """
        from jinja2.exceptions import TemplateError

        try:
            return self.template.render(messages=messages, add_generation_prompt=open_turn, **self.tokens)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise _bad(self.checkpoint, f"{where}: {type(error).__name__}: {error}") from error

    def spans(self, messages: list[dict[str, Any]], where: str) -> tuple[str, list[tuple[int, int]]]:
        """The text, and (start, stop) characters of every answer of the assistant, its end mark included.

        Raises:
            RecipeError: ``template-not-incremental`` when a longer conversation changes what stood before.
        """
        whole, found = self.render(messages, where), []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:place], where, open_turn=True)
            after = self.render(messages[: place + 1], where)
            if not (after.startswith(before) and whole.startswith(after)):
                raise RecipeError(
                    "template-not-incremental",
                    f"the text up to answer {place} changes with what follows, so its tokens cannot be found",
                    where=where,
                    next_action="set recipe.data.completion_only: false, or give conversations of one answer each",
                )
            found.append((len(before), len(after)))
        return whole, found


def _raise(text: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(text)


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=options.get("indent"))


def _template(checkpoint: Path) -> tuple[str, dict[str, str]]:
    config_path, plain = checkpoint / "tokenizer_config.json", checkpoint / "chat_template.jinja"
    config = json_of(config_path, "bad-chat-template") if config_path.is_file() else {}
    text = plain.read_text("utf-8") if plain.is_file() else config.get("chat_template")
    if isinstance(text, list):
        named = (one for one in text if isinstance(one, dict))
        text = next((one.get("template") for one in named if one.get("name") == "default"), None)
    if not isinstance(text, str):
        raise RecipeError(
            "no-chat-template",
            "neither chat_template.jinja nor tokenizer_config.json holds one",
            where=str(checkpoint),
            next_action="add the template of this checkpoint, or give data of format jsonl-text",
        )
    if len(text) > MAX_TEMPLATE_BYTES:
        raise _bad(checkpoint, f"{len(text)} characters")
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        tokens[name] = value if isinstance(value, str) else ""
    return text, tokens


def _bad(checkpoint: Path, what: str) -> RecipeError:
    return RecipeError(
        "bad-chat-template",
        what[:500],
        where=str(checkpoint),
        next_action="correct this conversation, or use the template that belongs to the checkpoint",
    )


def read_conversations(path: Path, field: str) -> list[tuple[list[dict[str, Any]], str]]:
    """(messages, where) of each line; every message has a role and text content.

    Raises:
        RecipeError: ``missing-data``, ``bad-record``, ``empty-data``.
    """
    found = [(messages_of(line, field, where), where) for where, line in lines_of(path)]
    if not found:
        raise RecipeError(
            "empty-data", "the file holds no conversation", where=str(path), next_action="give at least one"
        )
    return found


def tokenise_conversations(
    conversations: list[tuple[list[dict[str, Any]], str]], checkpoint: Path, tokenizer: Any, completion_only: bool
) -> list[Document]:
    """One document a conversation.

    Raises:
        RecipeError: as :class:`ChatTemplate`; ``no-completion`` when no answer has a token.
    """
    template = ChatTemplate(checkpoint)
    documents = []
    for messages, where in conversations:
        text, spans = template.spans(messages, where) if completion_only else (template.render(messages, where), [])
        encoded = tokenizer.encode(text, add_special_tokens=False)
        counted = np.ones(len(encoded.ids), dtype=bool)
        if completion_only:
            starts = [first for first, _ in encoded.offsets]
            counted = np.asarray([any(a <= start < b for a, b in spans) for start in starts], dtype=bool)
        if len(encoded.ids):
            documents.append(Document(np.asarray(encoded.ids, dtype=np.int64), counted))
    if not any(bool(document.counted[1:].any()) for document in documents):
        raise RecipeError(
            "no-completion",
            f"{len(documents)} conversations hold no token of an answer",
            where="recipe.data",
            next_action="give messages with role assistant, or set completion_only: false",
        )
    return documents
