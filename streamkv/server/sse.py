"""Server-sent events: frames, and the response that owns a stream while it is sent.

Owns the life of a streaming answer: entering its source, watching for the client's leaving,
keep-alive comments, and leaving the source in all cases. Knows nothing about what the frames
say. Invariant: nothing is sent before the source was entered and gave its first frame (or
KEEP_ALIVE_S passed), so whatever goes wrong until then is an ordinary HTTP error; afterwards an
error is an event, and a stream that ended in one has no `[DONE]`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from ..errors import StreamkvError
from .wire import encode, error_body

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0

DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


class Cancellable(Protocol):
    def cancel(self) -> None:
        """End it soon; idempotent, also after its end."""


S = TypeVar("S", bound=Cancellable)


def data_frame(content: Any) -> bytes:
    """One event without a name: `data: {...}`."""
    return b"data: " + encode(content) + b"\n\n"


def event_frame(event: str, content: Any) -> bytes:
    """One named event."""
    return b"event: " + event.encode() + b"\ndata: " + encode(content) + b"\n\n"


def error_frame(exc: BaseException) -> bytes:
    """An error inside a stream, as OpenAI's clients read it."""
    return data_frame(error_body(exc))


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive, stream: Cancellable) -> AsyncIterator[None]:
    """Call `stream.cancel()` as soon as the client is gone. The request's body must be read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class EventStream(Generic[S]):
    """An ASGI response: `async with source as stream`, then the frames of `frames(stream)`.

    `frames` yields whole events, one or several in each item, and ends by itself; when the client
    leaves, `stream.cancel()` makes it end. `on_error` writes the frame of an exception that came
    after the first byte.
    """

    def __init__(
        self,
        source: AbstractAsyncContextManager[S],
        frames: Callable[[S], AsyncIterator[bytes]],
        *,
        on_error: Callable[[BaseException], bytes] = error_frame,
    ) -> None:
        self._source = source
        self._frames = frames
        self._on_error = on_error
        self._started = False
        self._last_sent_s = 0.0
        self._lock = asyncio.Lock()  # one sender at a time: the stream or the keep-alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._source as stream, cancel_on_disconnect(receive, stream):
            self._last_sent_s = asyncio.get_running_loop().time()
            keep_alive = asyncio.create_task(self._keep_alive(send))
            try:
                await self._send_all(stream, send)
            finally:
                keep_alive.cancel()

    async def _send_all(self, stream: S, send: Send) -> None:
        try:
            async for frame in self._frames(stream):
                await self._send(frame, send)
        except Exception as exc:
            if not self._started:
                raise
            if not isinstance(exc, StreamkvError):
                logger.exception("a stream failed")
            await self._send(self._on_error(exc), send)
        await self._send(b"", send, more=False)

    async def _send(self, body: bytes, send: Send, *, more: bool = True) -> None:
        async with self._lock:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": body, "more_body": more})
            self._last_sent_s = asyncio.get_running_loop().time()

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            idle_s = loop.time() - self._last_sent_s
            if idle_s < KEEP_ALIVE_S:
                await asyncio.sleep(KEEP_ALIVE_S - idle_s)
            else:
                await self._send(_COMMENT, send)
