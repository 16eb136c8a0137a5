"""The wire to an OpenAI-compatible server: one request, one bounded reply.

A body is read as it comes, by a thread that is left behind at the deadline, so that neither its size nor its slowness
is the server's choice: a server that drips header bytes resets every read's own time limit. Nothing is retried but what
a second try can mend: a lost connection, 408, 429 and 5xx.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from shardwright.agents.llm.reply import strict_json
from shardwright.schemas.errors import LlmError
from shardwright.schemas.llm import LlmEndpoint

TRIES = 3
PAUSE_S = 0.5
PLAIN = {"Accept-Encoding": "identity"}
"""A packed body would be unpacked whole before its size is seen: a few kilobytes can hold gigabytes."""
AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})


class Wire(Protocol):
    """Anything that answers a chat completion request."""

    def complete(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The decoded body of a reply, within so many seconds.

        Raises:
            LlmError: what failed; ``unreachable``, ``status``, ``too-slow``, ``too-large``, ``not-json``.
        """
        ...


class OpenAIWire:
    """The openai package's client, with its own retries off."""

    def __init__(self, endpoint: LlmEndpoint, key: str, sleep: Callable[[float], None] = time.sleep) -> None:
        from openai import DefaultHttpxClient, OpenAI

        self.endpoint, self.sleep = endpoint, sleep
        # A redirect would carry the prompt to an address that nobody named.
        http = DefaultHttpxClient(follow_redirects=False)
        self.client = OpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0, http_client=http)
        # The package reads these from the environment and would tell them to any server.
        self.client.organization = self.client.project = None

    def complete(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """See ``Wire``."""
        deadline = time.monotonic() + seconds
        for attempt in range(TRIES):
            try:
                return self._within(request, deadline)
            except LlmError as error:
                last = attempt == TRIES - 1 or time.monotonic() + PAUSE_S * 2**attempt >= deadline
                if last or not getattr(error, "again", False):
                    raise
            self.sleep(PAUSE_S * 2**attempt)
        raise AssertionError("the last try returns or raises")

    def _within(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        answers: queue.Queue[dict[str, Any] | BaseException] = queue.Queue(1)

        def work() -> None:
            try:
                answers.put(self._once(request, deadline))
            except BaseException as error:  # noqa: BLE001 handed over whole, the caller raises it
                answers.put(error)

        threading.Thread(target=work, daemon=True, name="llm-reply").start()
        try:
            found = answers.get(timeout=max(0.05, deadline - time.monotonic()))
        except queue.Empty:
            raise self._failed("too-slow", "no whole reply in time", False) from None
        if isinstance(found, BaseException):
            raise found
        return found

    def _once(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        import httpx2
        import openai

        left = max(0.05, deadline - time.monotonic())
        try:
            with self.client.chat.completions.with_streaming_response.create(
                **request, timeout=left, extra_headers=PLAIN
            ) as response:
                body = self._bounded(response.http_response.iter_raw(), deadline)
        except openai.APIStatusError as error:
            raise self._failed(
                "status", f"the server answered {error.status_code}", error.status_code in AGAIN
            ) from error
        except (openai.APITimeoutError, httpx2.TimeoutException) as error:
            raise self._failed("too-slow", "no whole reply in time", False) from error
        except (openai.APIConnectionError, httpx2.TransportError, httpx2.StreamError) as error:
            raise self._failed("unreachable", f"the connection failed: {type(error).__name__}", True) from error
        try:
            decoded = strict_json(body)
        except (ValueError, RecursionError) as error:
            raise self._failed("not-json", f"{len(body)} bytes that are no JSON", False) from error
        if not isinstance(decoded, dict):
            raise self._failed("not-json", "the body is no JSON object", False)
        return decoded

    def _bounded(self, pieces: Any, deadline: float) -> bytes:
        found, limit = bytearray(), self.endpoint.limits.reply_bytes
        for piece in pieces:
            found += piece
            if len(found) > limit:
                raise self._failed("too-large", f"the reply passes {limit} bytes", False)
            if time.monotonic() > deadline:
                raise self._failed("too-slow", f"{len(found)} bytes, and no end in time", False)
        return bytes(found)

    def _failed(self, code: str, what: str, again: bool) -> LlmError:
        error = LlmError(
            code, what, where=self.endpoint.model, next_action="check the server, or take the rules' result (--llm off)"
        )
        error.again = again  # type: ignore[attr-defined]
        return error
