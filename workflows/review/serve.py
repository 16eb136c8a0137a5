"""Start the review page on this machine and keep it up until it is stopped or the plan has its verdict."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import uvicorn

from shardwright.schemas.errors import ShardwrightError
from shardwright.schemas.policy import Policy
from shardwright.workflows.review.app import ReviewServer, build_app
from shardwright.workflows.review.guard import Guard
from shardwright.workflows.review.session import ReviewSession


def serve(
    session: ReviewSession,
    *,
    policy: Policy | None = None,
    policy_name: str = "",
    port: int = 0,
    announce: Callable[[str], None],
) -> None:
    """Serve until interrupted.

    Args:
        policy: shown, and applied to every edit; it does not decide here.
        policy_name: how the page names it.
        port: 0 takes a free one.
        announce: told the address with the one-time token, once the page answers.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    guard = Guard(listener.getsockname()[1])
    server = ReviewServer(session, guard, policy, policy_name)
    server.ready.clear()
    threading.Thread(target=_warm, args=(server,), daemon=True).start()
    config = uvicorn.Config(
        build_app(server), log_level="warning", access_log=False, server_header=False, lifespan="off"
    )
    announce(f"http://127.0.0.1:{guard.port}/open?token={guard.token}")
    host = uvicorn.Server(config)
    server.stopping = lambda: host.should_exit
    host.run(sockets=[listener])


def _warm(server: ReviewServer) -> None:
    """Load what the first edit would wait for: seconds of imports."""
    try:
        now = server.session.plan.decision.strategy.checkpointing
        server.trial({"checkpointing": "full" if now == "none" else "none"})
    except ShardwrightError:
        return
    finally:
        server.ready.set()
