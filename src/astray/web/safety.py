"""Which requests are answered: a token, known host names, small bodies, and headers that restrict the browser.

A page of another site cannot read answers (same origin), cannot send the cookie (SameSite), cannot post JSON (its
origin and content type are checked), and cannot reach the server by a name of its own that resolves to it (Host is
checked).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
_ANY = ("", "0.0.0.0", "::")


class AccessToken:
    """The token of a server, and the cookie that stands for it once it was shown."""

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

    def give(self, response: Response) -> None:
        """Set the cookie."""
        response.set_cookie(self.name, self.token, httponly=True, samesite="strict", path="/")


def names_of(host: str) -> set[str]:
    """By which names a server may be called that listens on this address."""
    names = {*_LOOPBACK}
    if host in _ANY:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    elif host not in _LOOPBACK:
        names.add(host.lower())
    return names


class CheckedApplication:
    """An application behind all checks. `/` needs no cookie: it checks the token itself."""

    def __init__(self, app: ASGIApp, keyring: AccessToken, host: str) -> None:
        self._app = app
        self._keyring = keyring
        self._names = names_of(host)
        self._any = host in _ANY

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # web sockets are not served

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, answer)
            return
        body = await _body(receive)
        if body is None:
            await _refused(413, f"A request has at most {MOST_BODY:,} bytes.")(scope, receive, answer)
            return
        await self._app(scope, _replayed(body, receive), answer)

    def _refusal(self, scope: Scope) -> Response | None:
        """Why a request is not answered; None when it is."""
        headers = Headers(scope=scope)
        if not self._is_known(headers.get("host", "")):
            return _refused(
                403, "This server is not called by that name. Use the address that astray view has printed."
            )
        if len(scope["query_string"]) > MOST_QUERY or len(scope["path"]) > MOST_PATH:
            return _refused(
                414, f"An address has at most {MOST_PATH:,} bytes, and {MOST_QUERY:,} behind the question mark."
            )
        if scope["path"] != "/" and not self._keyring.is_shown_by(headers):
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
    """The body of a request; None as soon as it is too long."""
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
    """A body that was read, to be read again."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status)
