"""How the application is served: uvicorn, with the ends that streams need.

Owns the order of a shutdown. Knows nothing about endpoints. Invariants:

- A shutdown cuts nobody in silence. Nothing new is taken, nor what hasn't come whole; what runs may
  finish for `grace_s`; then the engine ends it, and `end_s` are left for readers to be told, over
  HTTP and WebSocket alike. Only who still doesn't read then is cut. The engine closes last, and
  keeps what it can for the next start. A second signal skips all waiting.
- What a client does wrong is told to the client, not to the log.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from ..config import ServerConfig
from ..engine.async_engine import AsyncEngine
from ..engine.life import EngineStatus
from ..words import counted
from .app import create_app
from .direct_write import Config
from .http_protocol import HttpProtocol
from .ws_protocol import WebSocketProtocol

logger = logging.getLogger(__name__)

GRACE_S = 7.0  # with the others, and the 2 s that the engine takes to close, 10 at most
END_S = 0.8
CUT_S = 0.2  # for tasks to notice that their connection is gone
CLOSING_HANDSHAKE_S = 0.2  # for the other side's half, while shutting down
_POLL_S = 0.02

_CLIENT_FAULTS = (  # what uvicorn logs as a warning, an error or with a traceback
    "Invalid HTTP request received.",
    "Invalid UTF-8 sequence received from client.",
    "Unsupported upgrade request.",
)


class Server(uvicorn.Server):
    """Serves the application of an engine. `grace_s` and `end_s` together bound a shutdown."""

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        *,
        grace_s: float = GRACE_S,
        end_s: float = END_S,
    ) -> None:
        self.app = create_app(engine, config)
        super().__init__(
            Config(
                _quiet_when_cancelled(self.app),
                http=HttpProtocol,
                ws=WebSocketProtocol,
                ws_max_size=config.max_body_bytes,
                ws_per_message_deflate=False,  # 10 µs a token, for frames of a hundred bytes
                lifespan="on",
                log_config=None,
                access_log=False,
            )
        )
        self._engine = engine
        self._grace_s = grace_s
        self._end_s = end_s
        uvicorn_logger = logging.getLogger("uvicorn.error")
        uvicorn_logger.setLevel(logging.WARNING)
        uvicorn_logger.addFilter(_is_no_clients_fault)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the shutdown, the second ends its waiting."""
        if self.should_exit:
            self.force_exit = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers finish, end what is left, and close; replaces uvicorn's own."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        is_planned = self._engine.status is not EngineStatus.FAILED
        self._engine.drain()
        if is_planned:
            logger.info("%s", self._goodbye())
        for connection in list(self.server_state.connections):
            if isinstance(connection, WebSocketProtocol):
                connection.close_timeout = CLOSING_HANDSHAKE_S  # its application closes it
            else:
                connection.shutdown()  # at once, or after the answer that is made or sent
        if not await self._wait_until(self._is_idle, self._grace_s):
            connections = counted(len(self.server_state.connections), "connection")
            logger.warning("shutting down: ending the answers on %s", connections)
            self._engine.end_requests()
            await self._wait_until(self._is_idle, self._end_s)
            await self._cut()
        closing = asyncio.create_task(self._engine.close())
        await self._wait_until(closing.done, math.inf)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await self.lifespan.shutdown()  # ends a close that was cut short
        if is_planned:
            logger.info("shut down")

    def _goodbye(self) -> str:
        stats = self._engine.stats()
        num_answers = stats.num_requests_running + stats.num_requests_waiting
        if not num_answers:
            return "shutting down"
        return (
            f"shutting down: waiting for {counted(num_answers, 'answer')}, {self._grace_s:g} s at "
            "most; a second signal cuts them"
        )

    async def _cut(self) -> None:
        """Drop every connection; tasks see that their client is gone, and end."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._wait_until(self._is_idle, CUT_S, even_if_forced=True)
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_idle(self) -> bool:
        return not self.server_state.connections and not self.server_state.tasks

    async def _wait_until(
        self, condition: Callable[[], bool], limit_s: float, *, even_if_forced: bool = False
    ) -> bool:
        """Whether the condition came true in time, and before a second signal."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + limit_s
        while not condition():
            if loop.time() >= deadline_s or (self.force_exit and not even_if_forced):
                return False
            await asyncio.sleep(_POLL_S)
        return True


def _is_no_clients_fault(record: logging.LogRecord) -> bool:
    return record.msg not in _CLIENT_FAULTS


def _quiet_when_cancelled(app: ASGIApp) -> ASGIApp:
    """Only a shutdown cancels a request's task, after its connection: no error to log."""

    async def quiet_app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] == "lifespan":
                raise

    return quiet_app
