"""Record and replay: every exchange of a run as JSON lines, so that a plan can be made again without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.agents.llm.wire import Wire
from shardwright.schemas.canonical import canonical_bytes, sha256_of
from shardwright.schemas.errors import LlmError
from shardwright.schemas.files import write_atomic


def request_digest(request: dict[str, Any]) -> str:
    """Hash of what was asked."""
    return sha256_of(request)


def trimmed(body: dict[str, Any]) -> dict[str, Any]:
    """What is read of a reply; ids, clocks and everything else a server adds are left out."""
    kept: dict[str, Any] = {key: body[key] for key in ("choices", "usage") if key in body}
    choices = kept.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        kept["choices"] = [{key: choices[0][key] for key in ("message", "finish_reason") if key in choices[0]}]
    return kept


class Recorder:
    """A wire that remembers what passed, failures too."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.exchanges: list[dict[str, Any]] = []

    def complete(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """See ``Wire``."""
        entry: dict[str, Any] = {"request": request, "request_sha256": request_digest(request)}
        try:
            entry["reply"] = trimmed(self.wire.complete(request, seconds))
        except LlmError as error:
            entry["failure"] = {"code": error.code.rpartition("/")[2], "what": error.what, "where": error.where}
            raise
        finally:
            self.exchanges.append(entry)
        reply: dict[str, Any] = entry["reply"]
        return reply

    @property
    def sha256(self) -> str:
        """Hash of all exchanges so far."""
        return exchanges_digest(self.exchanges)

    def save(self, path: Path) -> None:
        """Write the exchanges, one a line."""
        write_atomic(path, b"".join(canonical_bytes(entry) + b"\n" for entry in self.exchanges))


class Replay:
    """A wire that gives recorded replies, to the same requests in the same order only."""

    def __init__(self, exchanges: list[dict[str, Any]]) -> None:
        self.exchanges, self.at = exchanges, 0

    @classmethod
    def load(cls, path: Path) -> Replay:
        """Read a recording.

        Raises:
            LlmError: ``bad-recording`` where the file is not one.
        """
        try:
            found = [json.loads(line) for line in path.read_text().splitlines()]
            if not all(entry["request_sha256"] == request_digest(entry["request"]) for entry in found):
                raise ValueError("a request does not hash to what is recorded")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LlmError(
                "bad-recording",
                str(error),
                where=path.name,
                next_action="plan again with --llm advise: it writes a new recording",
            ) from error
        return cls(found)

    def complete(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """See ``Wire``.

        Raises:
            LlmError: ``replay-differs`` where something else is asked than was recorded; or the recorded failure.
        """
        entry = self.exchanges[self.at] if self.at < len(self.exchanges) else None
        if entry is None or entry["request_sha256"] != request_digest(request):
            raise LlmError(
                "replay-differs",
                f"exchange {self.at + 1} of the recording is not what is asked now",
                where=f"exchange {self.at + 1} of {len(self.exchanges)}",
                next_action="use the checkpoint, recipe, cluster and version of the recording, or record again",
            )
        self.at += 1
        if "failure" in entry:
            raise LlmError(**entry["failure"], next_action="record again, or use --llm off")
        reply: dict[str, Any] = entry["reply"]
        return reply


def exchanges_digest(exchanges: list[dict[str, Any]]) -> str:
    """Hash of exchanges by what they hold."""
    return sha256_of([canonical_bytes(entry).decode() for entry in exchanges])
