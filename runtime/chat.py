"""Conversations to token ids by the checkpoint's own chat template, and which tokens a completion-only loss counts.

Templates come with checkpoints. They are rendered in a sandbox, in a process of their own that ends itself when one of
them takes too long (``chat_render.py``).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.runtime.records import json_of, lines_of, messages_of
from shardwright.schemas.errors import RecipeError

MAX_TEMPLATE_BYTES = 1 << 20
SECONDS = 20.0
"""Processor time in which a template makes the texts of one conversation."""
RENDER_BYTES = 4 << 30
"""Memory of the process that renders."""
RENDERER = Path(__file__).with_name("chat_render.py")
Cut = tuple[int, bool]
"""How many messages of a conversation a text has, and whether an answer is to follow."""


@dataclass(frozen=True)
class Document:
    """Tokens that belong together.

    Attributes:
        ids: [n] int64.
        counted: [n] bool; whether the loss counts this token where it is predicted.
        where: the record that it comes from, where that is known.
    """

    ids: np.ndarray
    counted: np.ndarray
    where: str = ""


class ChatTemplate:
    """A checkpoint's chat template. Its process ends with :meth:`close`, with a ``with`` block, or with this object.

    Raises:
        RecipeError: ``no-chat-template``, ``bad-chat-template``, ``chat-template-time``.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.file, text, self.tokens = _template(checkpoint)
        # -P: the folder of the script is no place to import from.
        command = [sys.executable, "-P", str(RENDERER)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, text=True, encoding="utf-8")
        self.close = weakref.finalize(self, _end, self.process)
        self._ask({"template": text, "seconds": SECONDS, "bytes": RENDER_BYTES}, "the template itself")

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def render(self, messages: list[dict[str, Any]], where: str, *, open_turn: bool = False) -> str:
        """The text of a conversation; ``open_turn`` adds what stands before an answer.

        Raises:
            RecipeError: ``bad-chat-template`` when the template refuses or leaves the sandbox, ``chat-template-time``.
        """
        return self.texts(messages, [(len(messages), open_turn)], where)[0]

    def texts(self, messages: list[dict[str, Any]], cuts: list[Cut], where: str) -> list[str]:
        """The texts of a conversation and of its beginnings.

        Raises:
            RecipeError: as :meth:`render`.
        """
        found: list[str] = self._ask({"messages": messages, "tokens": self.tokens, "cuts": cuts}, where)["texts"]
        return found

    def _ask(self, question: dict[str, Any], where: str) -> dict[str, Any]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise self._ended(self.process.wait(), where)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _bad(self.file, f"{where}: {answer['error']}")
        return answer

    def _ended(self, status: int, where: str) -> RecipeError:
        if status != -signal.SIGPROF:
            return _bad(self.file, f"{where}: the process that renders it ended with status {status}")
        return RecipeError(
            "chat-template-time",
            f"{where}: the template took more than {SECONDS:g} s of processor time; it may have no end",
            where=str(self.file),
            next_action="shorten or remove this conversation, or use the template that belongs to the checkpoint",
        )

    def spans(self, messages: list[dict[str, Any]], where: str) -> tuple[str, list[tuple[int, int]]]:
        """The text, and (start, stop) characters of every answer of the assistant, its end mark included.

        Raises:
            RecipeError: ``template-not-incremental`` when a longer conversation changes what stood before.
        """
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        cuts = [cut for place in answers for cut in ((place, True), (place + 1, False))]
        whole, *parts = self.texts(messages, [(len(messages), False), *cuts], where)
        found = []
        for place, before, after in zip(answers, parts[::2], parts[1::2], strict=True):
            if not (after.startswith(before) and whole.startswith(after)):
                raise RecipeError(
                    "template-not-incremental",
                    f"the text up to answer {place} changes with what follows, so its tokens cannot be found",
                    where=where,
                    next_action="set recipe.data.completion_only: false, or give conversations of one answer each",
                )
            found.append((len(before), len(after)))
        return whole, found


def _end(process: subprocess.Popen[str]) -> None:
    """End a renderer, whatever it does, and wait for it."""
    process.kill()
    process.communicate()


def _template(checkpoint: Path) -> tuple[Path, str, dict[str, str]]:
    """The file that holds it, its text, and the special tokens that it may name."""
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
    file = plain if plain.is_file() else config_path
    if len(text) > MAX_TEMPLATE_BYTES:
        raise _bad(file, f"{len(text)} characters")
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        tokens[name] = value if isinstance(value, str) else ""
    return file, text, tokens


def _bad(file: Path, what: str) -> RecipeError:
    return RecipeError(
        "bad-chat-template",
        what[:500],
        where=str(file),
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
        RecipeError: as :class:`ChatTemplate` and :func:`require_calls`; ``no-completion`` for a conversation without a
            token that the loss would count: a step of such has no loss.
    """
    documents = []
    with ChatTemplate(checkpoint) as template:
        for messages, where in conversations:
            text, spans = template.spans(messages, where) if completion_only else (template.render(messages, where), [])
            require_calls(template, messages, text, where)
            encoded = tokenizer.encode(text, add_special_tokens=False)
            counted = np.ones(len(encoded.ids), dtype=bool)
            if completion_only:
                starts = [first for first, _ in encoded.offsets]
                counted = np.asarray([any(a <= start < b for a, b in spans) for start in starts], dtype=bool)
            if not counted[1:].any():
                raise RecipeError(
                    "no-completion",
                    f"of its {len(counted)} tokens none is an answer's that the loss could count",
                    where=where,
                    next_action="give it a message with role assistant, remove it, or set completion_only: false",
                )
            documents.append(Document(np.asarray(encoded.ids, dtype=np.int64), counted, where))
    return documents


def require_calls(template: ChatTemplate, messages: list[dict[str, Any]], text: str, where: str) -> None:
    """Refuse a template that leaves out what a message calls, or writes the word None for a text that is not there.

    Raises:
        RecipeError: ``template-without-tools``.
    """
    called = [call for message in messages for call in message.get("tool_calls") or ()]
    names = [(call.get("function") or call).get("name") for call in called if isinstance(call, dict)]
    lost = [name for name in names if isinstance(name, str) and name not in text]
    empty = [{**message, "content": message["content"] or ""} for message in messages]
    if lost or len(names) < len(called):
        what = f"the call of {lost[0]!r} is not in its text" if lost else "a tool call is no object"
    elif empty != messages and text.count("None") > template.render(empty, where).count("None"):
        what = "it writes None for a message without content"
    else:
        return
    raise RecipeError(
        "template-without-tools",
        f"{template.file.name}: {what}",
        where=where,
        next_action="use a template that knows tool calls, or write them into the content of the message",
    )
