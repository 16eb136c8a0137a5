"""A scripted server on the loopback: the chat completions protocol without a model, for evaluations and tests.

A script answers one request after another. It may answer with a message, with raw bytes, or break the connection; so
the wire, the budgets and the gates are exercised as they run, through the same client.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Request = dict[str, Any]


@dataclass(frozen=True)
class Raw:
    """An answer that is no completion."""

    body: bytes = b""
    status: int = 200
    pause_s: float = 0.0
    """Before each piece."""
    pieces: int = 1
    """How often the body is sent; zero breaks the connection before anything is."""
    promised_bytes: int | None = None
    """Content-Length where it differs from what is sent."""
    headers: tuple[tuple[str, str], ...] = ()


Answer = dict[str, Any] | Raw
Script = Callable[[Request], Answer]


def message(text: str = "", calls: Iterable[tuple[str, dict[str, Any]]] = (), usage: bool = True) -> dict[str, Any]:
    """A completion with text, or with tool calls."""
    asked = [
        {"id": f"call-{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for at, (name, arguments) in enumerate(calls)
    ]
    said: dict[str, Any] = {"role": "assistant", "content": text or None}
    if asked:
        said["tool_calls"] = asked
    body: dict[str, Any] = {"id": "scripted", "object": "chat.completion", "created": 0, "model": "scripted"}
    body["choices"] = [{"index": 0, "message": said, "finish_reason": "tool_calls" if asked else "stop"}]
    if usage:
        body["usage"] = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    return body


def ready(request: Request) -> dict[str, Any] | None:
    """The answer to a probe; ``None`` where the request is none."""
    if any(tool["function"]["name"] == "ready" for tool in request.get("tools", ())):
        return message(calls=[("ready", {"state": "ready"})])
    asked = request["messages"][-1].get("content") or ""
    return message('{"state": "ready"}') if "ready" in asked else None


def in_turn(answers: Iterable[Answer]) -> Script:
    """Answers the probe, then gives one answer after another, the last one for ever."""
    waiting = list(answers)

    def script(request: Request) -> Answer:
        probe = ready(request)
        if probe is not None:
            return probe
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    return script


@dataclass
class Served:
    """A running server."""

    base_url: str
    requests: list[Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@contextmanager
def serve(script: Script) -> Iterator[Served]:
    """Serve a script on 127.0.0.1 while open."""
    served = Served("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            served.bodies.append(body)
            request = json.loads(body)
            served.requests.append(request)
            answer = script(request)
            self._send(answer if isinstance(answer, Raw) else Raw(json.dumps(answer).encode()))

        def _send(self, raw: Raw) -> None:
            self.close_connection = True
            if raw.pieces == 0:
                return
            size = len(raw.body) * raw.pieces if raw.promised_bytes is None else raw.promised_bytes
            self.send_response(raw.status)
            named = {name.lower() for name, _ in raw.headers}
            own = (("content-type", "application/json"), ("content-length", str(size)))
            for name, value in (*raw.headers, *(one for one in own if one[0] not in named)):
                self.send_header(name, value)
            self.end_headers()
            try:
                for _ in range(raw.pieces):
                    time.sleep(raw.pause_s)
                    self.wfile.write(raw.body)
                    self.wfile.flush()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a server in a test has no log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served.base_url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
