"""The chat page: static files at /, with a strict Content-Security-Policy.

Owns where the files are and the headers they go out with. Knows nothing about their names.
Invariant: only files that were in the folder at start are served, each at its own path, so an
unknown path stays an API 404 and a wrong method an API 405.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # ask again each time; unchanged files cost a 304
}


def find_folder() -> Path | None:
    """The page's folder: package data of an installed wheel, or the checkout's web/."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "web", package.parent / "web")
    return next((path for path in candidates if (path / "index.html").is_file()), None)


def page_routes(folder: Path | None) -> list[Route]:
    """A route for each file of the folder and its subfolders, and / for index.html."""
    if folder is None:
        return []
    files = _WithHeaders(StaticFiles(directory=folder, html=True))
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    return [Route("/", files), *(Route(f"/{path.as_posix()}", files) for path in visible)]


class _WithHeaders:
    """ASGI wrapper that adds HEADERS to each answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)
