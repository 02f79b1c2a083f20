"""Who may talk to the server: API keys, Host and Origin checks, as pure ASGI middleware.

Owns the decision to let a request or WebSocket upgrade in; knows nothing about endpoints.
Invariant: what is refused here never reached a handler, and no WebSocket is accepted first.

With --api-key, everything under /v1, /tokenize and /detokenize asks for `Authorization: Bearer
KEY`. Open stay /health, /ping, /version, /metrics and the chat page's own files: probes, scrapers
and a browser's first request carry no key, and none of them shows a prompt or an answer. Browsers
can't set headers on a WebSocket, so there the key may come as the subprotocol
`openai-insecure-api-key.KEY`.

A server on a loopback address answers only to loopback names in Host, so that a web page can't
reach it by rebinding its own name to 127.0.0.1. A page of another origin may neither open a
WebSocket (unless in --allowed-origins) nor send anything but GET, HEAD and OPTIONS (unless in
--cors-origin): the browser would send such requests even where it hides the answers.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..config import ServerConfig
from ..errors import AuthenticationError, ForbiddenError, StreamkvError
from .wire import error_response

KEY_SUBPROTOCOL = "openai-insecure-api-key."

_KEYED_PATHS = ("/v1", "/tokenize", "/detokenize")
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


class ApiKeyMiddleware:
    """Lets in whoever shows one of `keys`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and is_keyed(scope["path"]):
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
        self._http_origins = frozenset(config.cors_origin)
        self._websocket_origins = frozenset(config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            error = self._objection(scope)
            if error is not None:
                return await refuse(error, scope, receive, send)
        await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> ForbiddenError | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._loopback_only and not is_loopback(_split_host(host)[0]):
            return ForbiddenError(
                f"Host: expected localhost, 127.0.0.1 or [::1], got {host!r}; "
                "start the server with --host to serve other names"
            )
        if origin is None or is_same_origin(origin, host):
            return None
        if scope["type"] == "websocket":
            allowed, flag = self._websocket_origins, "--allowed-origins"
        elif scope["method"] in _SAFE_METHODS:
            return None
        else:
            allowed, flag = self._http_origins, "--cors-origin"
        if origin in allowed or "*" in allowed:
            return None
        return ForbiddenError(f"Origin: {origin!r} is not this server; allow it with {flag}")


def is_keyed(path: str) -> bool:
    """Whether --api-key protects this path."""
    return any(path == keyed or path.startswith(f"{keyed}/") for keyed in _KEYED_PATHS)


def presented_key(scope: Scope) -> str | None:
    """The API key a request or WebSocket upgrade carries, None if it has none."""
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    for subprotocol in scope.get("subprotocols", ()):
        if subprotocol.startswith(KEY_SUBPROTOCOL):
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
    try:
        parts = urlsplit(origin)
        default_port = _DEFAULT_PORTS.get(parts.scheme)
        origin_host, origin_port = parts.hostname, parts.port or default_port
    except ValueError:
        return False
    name, port = _split_host(host)
    return bool(origin_host) and (origin_host, origin_port) == (name, port or default_port)


def _split_host(host: str) -> tuple[str, int | None]:
    """A Host header as (name, port): lower case, no brackets; ("", None) if it makes no sense."""
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname or "", parts.port
    except ValueError:
        return "", None
