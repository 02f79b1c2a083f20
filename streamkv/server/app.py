"""The application: routes, middleware, error handlers and the engine's life, put together.

Owns nothing else. `create_app` takes built objects; there is no module-level application.
Invariant: whatever goes wrong, the answer has OpenAI's error shape.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..config import ServerConfig
from ..engine.async_engine import AsyncEngine
from ..errors import NotFoundError, StreamkvError
from . import (
    chat,
    completions,
    health,
    metrics,
    models,
    streams,
    tokenize,
)
from .answers import Answers
from .auth import ApiKeyMiddleware, BrowserGuard, PathGuard, refuse
from .page import find_folder, page_routes
from .responses import endpoint as responses
from .responses import retrieval as response_retrieval
from .responses import websocket as responses_ws
from .responses.store import ResponseStore
from .sse import REQUEST_ID
from .wire import error_response, http_error_body, json_response

# Open to all even with --api-key, and the page's own files with them: see auth.py.
OPEN_PATHS = ("/health", "/ping", "/version", "/metrics")


def create_app(engine: AsyncEngine, config: ServerConfig) -> Starlette:
    """The ASGI application. It starts `engine` with its lifespan and closes it at the end; the
    engine loads while the application already answers (/health says 503 until it is ready)."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.close()
            await app.state.answers.close()

    pages = page_routes(find_folder())
    app = Starlette(
        routes=[
            *chat.routes,
            *completions.routes,
            *responses.routes,
            *response_retrieval.routes,
            *responses_ws.routes,
            *streams.routes,
            *models.routes,
            *tokenize.routes,
            *health.routes,
            *metrics.routes,
            *pages,
        ],
        middleware=_middleware(config, {*OPEN_PATHS, *(page.path for page in pages)}),
        exception_handlers={
            StreamkvError: _on_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_disconnect,
            Exception: _on_error,  # re-raised by Starlette after the answer: the server logs it
        },
        lifespan=lifespan,
    )
    app.router.default = _no_route
    app.state.engine = engine
    app.state.config = config
    app.state.answers = Answers(config)
    app.state.responses = ResponseStore.of(config)
    app.state.metrics = metrics.ServerMetrics(engine, app.state.answers)
    return app


def _middleware(config: ServerConfig, open_paths: set[str]) -> list[Middleware]:
    """Outermost first. CORS answers preflights, which carry no key, and marks refusals too."""
    stack = [Middleware(PathGuard), Middleware(BrowserGuard, config=config)]
    if config.allowed_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID],
            )
        )
    if config.api_key:
        keys = Middleware(ApiKeyMiddleware, keys=config.api_key, open_paths=open_paths)
        stack.append(keys)
    return stack


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        error = NotFoundError(f"{scope['path']}: no WebSocket is here; /v1/responses is one")
        return await refuse(error, scope, receive, send)
    raise HTTPException(404)


async def _on_error(request: Request, exc: Exception) -> Response:
    return error_response(exc)


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    detail = f"{request.method} {request.scope['path']}: {exc.detail}"
    body = http_error_body(exc.status_code, detail)
    return json_response(body, exc.status_code, exc.headers)


async def _on_disconnect(request: Request, exc: Exception) -> Response:
    return Response(status_code=400)  # the client left while sending; nobody reads this
