"""GET /health, /ping, /version: is it up, and what is it.

Owns nothing but these answers. Invariant: /health is 200 exactly while requests are served; the
port is open before that, so loading can be watched.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from ..engine.async_engine import EngineStatus
from .wire import NOT_READY_RETRY_AFTER_S, engine_of, json_response


class Health(msgspec.Struct, frozen=True):
    status: str  # loading | ok | draining | failed | closed
    detail: str  # how far loading is, or why it failed


class Version(msgspec.Struct, frozen=True):
    version: str


async def get_health(request: Request) -> Response:
    engine = engine_of(request)
    if engine.status is EngineStatus.READY:
        return json_response(Health("ok", engine.status_detail))
    headers = {"retry-after": str(NOT_READY_RETRY_AFTER_S)}
    return json_response(Health(engine.status, engine.status_detail), 503, headers)


async def get_version(request: Request) -> Response:
    return json_response(Version(__version__))


routes = [
    Route("/health", get_health, methods=["GET"]),
    Route("/ping", get_health, methods=["GET", "POST"]),  # SageMaker's name for it
    Route("/version", get_version, methods=["GET"]),
]
