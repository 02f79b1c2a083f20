"""Who may talk to the server: API keys, Host and Origin checks, as pure ASGI middleware.

Owns the decision to let a request or WebSocket upgrade in; knows nothing about endpoints.
Invariant: what is refused here never reached a handler, and no WebSocket is accepted first.

With --api-key, every path asks for `Authorization: Bearer KEY`, except the few that are named
open: /health, /ping, /version, /metrics and the chat page's own files. Probes, scrapers and a
browser's first request carry no key, and none of them shows a prompt or an answer. Browsers can't
set headers on a WebSocket, so there the key may come as the subprotocol
`openai-insecure-api-key.KEY`. A path with a control character is nobody's (404): to a router's
pattern, `/tokenize` and a newline is `/tokenize`.

A Host header that is no name or address is refused. A server on a loopback address answers only
to loopback names, so that a web page can't reach it by rebinding its own name to 127.0.0.1. A page
of another origin that isn't in --allowed-origins may neither open a WebSocket nor send anything but
GET, HEAD and OPTIONS: the browser would send such requests even where it hides the answers.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..config import ServerConfig
from ..errors import AuthenticationError, ForbiddenError, NotFoundError, StreamkvError
from .wire import error_response

KEY_SUBPROTOCOL = "openai-insecure-api-key."

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# RFC 3986, section 3.2, without userinfo; names are those of DNS, and _ for containers.
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{0,5}))?", re.IGNORECASE)
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


class PathGuard:
    """Refuses paths that mean one thing to a comparison and another to a router's pattern."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and _CONTROL_CHARACTER.search(scope["path"]):
            error = NotFoundError(
                f"{scope['path']!r}: expected a path without control characters; there is nothing"
            )
            return await refuse(error, scope, receive, send)
        await self._app(scope, receive, send)


class ApiKeyMiddleware:
    """Lets in whoever shows one of `keys`, and everybody to exactly the `open_paths`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] not in self._open_paths:
            shown = presented_key(scope)
            if shown is None or not self._accepts(shown):
                error = AuthenticationError(
                    "missing API key; send Authorization: Bearer KEY"
                    if shown is None
                    else "wrong API key; send Authorization: Bearer KEY with a key of this server"
                )
                return await refuse(error, scope, receive, send)
        await self._app(scope, receive, send)

    def _accepts(self, shown: str) -> bool:
        # Compares with every key, each in constant time: timing tells nothing.
        presented = shown.encode("latin-1", "replace")  # the bytes sent: headers are read so
        return any([hmac.compare_digest(presented, key) for key in self._keys])


class BrowserGuard:
    """Refuses what only a browser driven by a foreign page would send."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._loopback_only = is_loopback(config.bind_host)
        self._allowed_origins = frozenset(config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            error = self._objection(scope)
            if error is not None:
                return await refuse(error, scope, receive, send)
        await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> ForbiddenError | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        name, _ = _split_host(host)
        if host and not name:
            return ForbiddenError(
                f"Host: expected a name or address and perhaps a port, got {host!r}"
            )
        if self._loopback_only and not is_loopback(name):
            return ForbiddenError(
                f"Host: expected localhost, 127.0.0.1 or [::1], got {host!r}; "
                "start the server with --host to serve other names"
            )
        if origin is None or is_same_origin(origin, host):
            return None
        if scope["type"] == "http" and scope["method"] in _SAFE_METHODS:
            return None
        if origin in self._allowed_origins or "*" in self._allowed_origins:
            return None
        return ForbiddenError(
            f"Origin: {origin!r} is not this server; allow it with --allowed-origins"
        )


def presented_key(scope: Scope) -> str | None:
    """The API key a request or WebSocket upgrade carries, None if it has none."""
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    for subprotocol in scope.get("subprotocols", ()):
        if subprotocol.startswith(KEY_SUBPROTOCOL) and subprotocol != KEY_SUBPROTOCOL:
            return str(subprotocol.removeprefix(KEY_SUBPROTOCOL))
    return None


def accepted_subprotocol(scope: Scope) -> str | None:
    """What to accept a WebSocket with: the first subprotocol offered that isn't a key.

    A browser that offered some fails unless one is chosen; if it offered only its key, that one.
    """
    offered: list[str] = list(scope.get("subprotocols", ()))
    plain = [name for name in offered if not name.startswith(KEY_SUBPROTOCOL)]
    return next(iter(plain or offered), None)


async def refuse(exc: StreamkvError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the exception's status; on a WebSocket before it is accepted.

    A server without the denial extension closes instead, which clients see as a plain 403.
    """
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            return await send({"type": "websocket.close", "code": 1008, "reason": exc.message})
        response = error_response(exc)
        start = {"status": response.status_code, "headers": response.raw_headers}
        await send({"type": "websocket.http.response.start", **start})
        return await send({"type": "websocket.http.response.body", "body": response.body})
    await error_response(exc)(scope, receive, send)


def is_loopback(hostname: str) -> bool:
    """localhost, 127.0.0.0/8 or ::1, with or without brackets."""
    name = hostname.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_same_origin(origin: str, host: str) -> bool:
    """Whether an Origin header names the host and port that the Host header does."""
    scheme, _, authority = origin.partition("://")
    default_port = _DEFAULT_PORTS.get(scheme)
    origin_name, origin_port = _split_host(authority)
    name, port = _split_host(host)
    if default_port is None or not name:
        return False
    return (origin_name, origin_port or default_port) == (name, port or default_port)


def _split_host(host: str) -> tuple[str, int | None]:
    """A Host header as (name, port): lower case, no brackets; ("", None) if it makes no sense."""
    matched = _AUTHORITY.fullmatch(host)
    if matched is None or int(matched[2] or 0) > 65535:
        return "", None
    return matched[1].strip("[]").lower(), int(matched[2]) if matched[2] else None
