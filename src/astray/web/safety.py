"""Which requests are answered: a token, known host names, small bodies, and headers that restrict the browser.

A page of another site cannot read answers (same origin), cannot send the cookie (SameSite), cannot post JSON (its
origin and content type are checked), and cannot reach the server by a name of its own that resolves to it (Host is
checked). A client that sends nothing, or too slowly, does not keep others out (`Connection`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import socket
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_BODY = 64 << 10
MOST_QUERY = 8 << 10
MOST_PATH = 1 << 10
"""Bytes of a request: options and filters are typed by hand."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ANY_ADDRESS = ("", "0.0.0.0", "::")


class AccessToken:
    """The token of a server, and the cookie that holds it once a client has shown the token."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(32)
        # Cookies are shared by all ports: two servers on one machine need different names.
        self.name = f"astray-{hashlib.sha256(self.token.encode()).hexdigest()[:12]}"

    def fits(self, token: str) -> bool:
        """Whether this is the token, compared in constant time."""
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())

    def is_shown_by(self, headers: Headers) -> bool:
        """Whether a request brings the cookie."""
        pairs = (cookie.strip().partition("=") for cookie in headers.get("cookie", "").split(";"))
        return any(name == self.name and self.fits(value) for name, _, value in pairs)

    def set_cookie(self, response: Response) -> None:
        """Adds the cookie to a response."""
        response.set_cookie(self.name, self.token, httponly=True, samesite="strict", path="/")


def names_of(host: str) -> set[str]:
    """The host names by which a server that listens on this address may be called."""
    names = {*_LOOPBACK}
    if host in _ANY_ADDRESS:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    elif host not in _LOOPBACK:
        names.add(host.lower())
    return names


class CheckedApplication:
    """An application with all checks in front of it. `/` needs no cookie: it checks the token itself."""

    def __init__(self, app: ASGIApp, token: AccessToken, host: str) -> None:
        self._app = app
        self._token = token
        self._names = names_of(host)
        self._any = host in _ANY_ADDRESS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # web sockets are not served

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send_with_headers)
            return
        body = await _body(receive)
        if body is None:
            await _refused(413, f"A request has at most {MOST_BODY:,} bytes.")(scope, receive, send_with_headers)
            return
        await self._app(scope, _replayed(body, receive), send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """The refusal of a request; None when it is answered."""
        headers = Headers(scope=scope)
        if not self._is_known(headers.get("host", "")):
            return _refused(
                403, "This server is not called by that name. Use the address that astray view has printed."
            )
        if len(scope["query_string"]) > MOST_QUERY or len(scope["path"]) > MOST_PATH:
            return _refused(
                414, f"An address has at most {MOST_PATH:,} bytes, and {MOST_QUERY:,} behind the question mark."
            )
        if scope["path"] != "/" and not self._token.is_shown_by(headers):
            return _refused(403, "The token is missing. Open the address that astray view has printed.")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return _refused(405, "Only GET and POST are answered.")
        return self._refused_post(headers) if scope["method"] == "POST" else None

    def _refused_post(self, headers: Headers) -> Response | None:
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return _refused(403, "Another site's page asks for this; only astray's own may.")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _refused(415, "A request is JSON.")
        if headers.get("x-astray") is None:
            return _refused(403, "The header X-Astray is missing, by which the page shows that it asks by itself.")
        return None

    def _is_known(self, host: str) -> bool:
        """Whether a Host header names this server. The port is not looked at: it may have been forwarded."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        return name in self._names or (self._any and _is_address(name))


def _is_address(name: str) -> bool:
    """Whether it is a plain IP address, which no DNS entry can point elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _body(receive: Receive) -> bytes | None:
    """The body of a request; None when it is too long."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""  # the client has gone
        parts.append(message.get("body", b""))
        if sum(map(len, parts)) > MOST_BODY:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns a body that was read already."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status)


# -- connections -------------------------------------------------------------------------------------------------------


REQUEST_SECONDS = 20.0
"""From the first byte to the last of a request. A browser on the same machine, or behind a tunnel, takes a few."""

FIRST_BYTE_SECONDS = 1.0
"""From the connection to the first byte: a younger connection is not dropped for a new one."""

MOST_OPEN = 256
"""Connections at a time, or half of the files that the process may open if that is less. A browser opens six. While all
of them are younger than `FIRST_BYTE_SECONDS`, there may be half as many more."""


def most_open() -> int:
    """How many connections there may be at a time."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY:
            return max(8, min(MOST_OPEN, files // 2))
    return MOST_OPEN


class Connection(H11Protocol):
    """One connection; there are at most about `most` of them.

    It waits while its request is not complete, or while its client does not read the answer. One that waits for long is
    closed; and where there are many, the one that has waited the longest is dropped for a new one.
    """

    most = MOST_OPEN
    _last_activity = 0.0  # when data last came or an answer was complete
    _timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._last_activity = self.loop.time()
        self._start_timeout()
        if len(self.connections) > self.most:
            self._drop_longest_waiting()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._last_activity = self.loop.time()
        if not self.is_waiting:
            self._cancel_timeout()

    def on_response_complete(self) -> None:
        self._last_activity = self.loop.time()
        super().on_response_complete()
        if not self.transport.is_closing():
            self._start_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timeout()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """Whether the server waits for its client."""
        has_request = self.cycle is not None and not self.cycle.response_complete
        return not has_request or self.cycle.more_body or self.flow.write_paused

    def _drop_longest_waiting(self) -> None:
        """Drops the connection that has waited the longest; while there is room, only one that has waited a while."""
        waiting = [
            each for each in self.connections if isinstance(each, Connection) and each.is_waiting and each is not self
        ]
        if len(self.connections) <= self.most + self.most // 2:
            waiting = [each for each in waiting if self.loop.time() - each._last_activity > FIRST_BYTE_SECONDS]
        if waiting:
            min(waiting, key=lambda each: each._last_activity).drop()

    def drop(self) -> None:
        """Closes it at once, also with data still to be sent."""
        self.connections.discard(self)
        self.transport.abort()

    def _start_timeout(self) -> None:
        self._cancel_timeout()
        self._timeout = self.loop.call_later(REQUEST_SECONDS, self._on_timeout)

    def _on_timeout(self) -> None:
        self._timeout = None
        if self.is_waiting:
            self.drop()

    def _cancel_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
