"""Who may talk to the review page: one browser, on this machine, that was given the one-time token."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # under no-referrer a form sent without scripts names the origin "null"
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
LARGEST_FORM_BYTES = 64 * 1024
MOST_FIELDS = 64


@dataclass
class Guard:
    """The secrets of one server: a token that opens it once, the session's cookie, the forms' CSRF token."""

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    cookie: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    _used: bool = False

    @property
    def cookie_name(self) -> str:
        """One name a port: cookies of one host are shared by its ports."""
        return f"shardwright_review_{self.port}"

    @property
    def hosts(self) -> tuple[str, ...]:
        return (f"127.0.0.1:{self.port}", f"localhost:{self.port}")

    def open(self, token: str) -> bool:
        """Whether this token opens the session. It does once."""
        if self._used or not hmac.compare_digest(token.encode(), self.token.encode()):
            return False
        self._used = True
        return True

    def refuses(self, method: str, headers: dict[str, str], cookie: str | None) -> str:
        """Why a request is refused, in words; empty where it is not.

        Args:
            headers: names in lower case.
            cookie: the session cookie's value.
        """
        host = headers.get("host", "")
        if host not in self.hosts:
            return f"Host {host!r} is not this server"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and method != "GET":
            return "a request from another site"
        origin = headers.get("origin")
        if origin is not None and origin not in tuple(f"http://{name}" for name in self.hosts):
            return f"Origin {origin!r} is not this server"
        if cookie is None or not hmac.compare_digest(cookie.encode(), self.cookie.encode()):
            return "no session: open the address that `shardwright review` printed, it works once"
        return ""

    def form(self, body: bytes) -> dict[str, str] | None:
        """The fields of a URL-encoded form; ``None`` where it is too large or its CSRF token is wrong."""
        if len(body) > LARGEST_FORM_BYTES:
            return None
        try:
            fields = dict(
                parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=True, max_num_fields=MOST_FIELDS)
            )
        except (UnicodeDecodeError, ValueError):
            return None
        return fields if hmac.compare_digest(fields.get("csrf", "").encode(), self.csrf.encode()) else None
