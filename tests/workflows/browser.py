"""Chromium through Playwright for tests of the review page, and the page itself in a thread of the test."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from shardwright.schemas.policy import Policy
from shardwright.workflows.review.app import ReviewServer, build_app
from shardwright.workflows.review.guard import Guard
from shardwright.workflows.review.session import ReviewSession
from shardwright.workflows.stages import Stages

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = tuple(
    f"--{word}"
    for word in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
    )
)


@dataclass
class Running:
    """A review page that answers."""

    server: ReviewServer
    guard: Guard

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.guard.port}"

    @property
    def address(self) -> str:
        return f"{self.base}/open?token={self.guard.token}"


@contextlib.contextmanager
def running(plan: Path, stages: Stages, policy: Policy | None = None, actor: str = "ada") -> Iterator[Running]:
    """Serve a plan's review until the block ends."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    guard = Guard(listener.getsockname()[1])
    server = ReviewServer(ReviewSession.open(plan, actor=actor, stages=stages), guard, policy, "policy.yaml")
    host = uvicorn.Server(uvicorn.Config(build_app(server), log_level="error", lifespan="off"))
    thread = threading.Thread(target=host.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not host.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield Running(server, guard)
    finally:
        host.should_exit = True
        thread.join(10)
        listener.close()


@dataclass
class Watched:
    """A browser page and what it asked for."""

    page: object
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextlib.contextmanager
def browser(width: int = 1360, height: int = 900, scripts: bool = True) -> Iterator[Watched]:
    """A fresh browser with one page; every request and console error is kept."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        page = chromium.new_page(viewport={"width": width, "height": height}, java_script_enabled=scripts)
        page.set_default_timeout(20_000)
        watched = Watched(page)
        page.on("request", lambda request: watched.requests.append(request.url))
        page.on("console", lambda m: watched.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: watched.errors.append(str(error)))
        yield watched
        chromium.close()
