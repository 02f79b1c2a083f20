"""Server-sent events: the answer of one HTTP request that streams.

Owns frames, the life of a streaming answer on its connection (its head, its events, keep-alive
comments, its end), and watching for the client's leaving. Knows nothing about what the events
say. Events go straight to the transport where the server offers that, by `send` elsewhere.
Invariant: nothing is sent before the answer gave its first event (or KEEP_ALIVE_S passed), so
whatever goes wrong until then is an ordinary HTTP error; afterwards an error is an event, and a
stream that ended in one has no `[DONE]`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine.stream import TokenStream
from ..errors import InvalidRequestError, StreamkvError
from .answer import PLAIN, Answer, AnswerWriter, OnDisconnect, Policy
from .answers import answers_of
from .direct_write import direct_writer
from .event_log import Event
from .generation import Generation, Source
from .http_protocol import BodyWriter
from .wire import encode, error_body, json_response

KEEP_ALIVE_S = 15.0  # the longest silence

DONE_EVENT = Event("", b"[DONE]")
_COMMENT = b": keep-alive\n\n"
REQUEST_ID = "x-request-id"  # the header: of an answer, its id
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


async def stream_answer(
    request: Request,
    answer_id: str,
    sources: Sequence[Source],
    writer: AnswerWriter,
    *,
    policy: Policy = PLAIN,
) -> ASGIApp:
    """The response that streams a new answer; what keeps it from being admitted is raised.

    A request that shows the number of the last event it got goes on with the answer it names.
    """
    after = last_event_id(request)
    answers = answers_of(request)
    if after is not None:
        answer = answers.find_answer(request, answer_id, exact=True)
        return resume_answer(answer, request, after)
    answer = answers.new(request, answer_id, writer, policy)
    stream = _EventStream(answer, request.receive, is_open=True)
    answer.attach(stream)
    try:
        await answer.start(sources)
    except BaseException:
        stream.stop_watching()
        raise
    return stream


def resume_answer(answer: Answer, request: Request, after: int) -> ASGIApp:
    """The response with the events after that number: 204 if all have been read, which tells a
    browser's EventSource not to come again."""
    if answer.error is not None and not answer.num_events:
        raise answer.error
    if answer.is_ended and after == answer.num_events - 1:
        return Response(status_code=204)
    if request.method == "HEAD":  # it is there; reading it is somebody else's
        return functools.partial(_send_head, answer.answer_id)
    stream = _EventStream(answer, request.receive, is_open=False)
    try:
        answer.attach(stream, after=after)
    except StreamkvError:
        stream.stop_watching()
        raise
    answers_of(request).num_resumed += 1
    return stream


async def collect_answer(
    request: Request,
    answer_id: str,
    sources: Sequence[Source],
    collect: Callable[[Sequence[TokenStream]], Awaitable[Any]],
    *,
    policy: Policy = PLAIN,
) -> ASGIApp:
    """The response with the whole answer, as `collect` makes it (a Struct or a Response); aborted
    when the client leaves, unless the policy lets it go on."""
    answers = answers_of(request)
    generation = Generation(answer_id, owner=answers.owner_of(request))
    answers.add(generation)

    def on_lost() -> None:
        if policy.on_disconnect is OnDisconnect.ABORT:
            generation.cancel()

    watcher = asyncio.create_task(_watch(request.receive, on_lost))
    try:
        await generation.admit(sources)
        content = await collect(generation.streams)
    except BaseException as error:
        generation.error = error
        raise
    finally:
        watcher.cancel()
        generation.end()
    response = content if isinstance(content, Response) else json_response(content)
    response.headers[REQUEST_ID] = answer_id
    return response


def last_event_id(request: HTTPConnection, parameter: str = "") -> int | None:
    """The number of the last event that a client has got, by the header Last-Event-ID or else by
    that parameter of the query; None without them. InvalidRequestError if it is no number.

    An EventSource that connects again sends the header, to the same address as before.
    """
    name, text = "Last-Event-ID", request.headers.get("last-event-id", "")
    if not text:
        name, text = parameter, request.query_params.get(parameter, "")
    return event_number(text, name) if text else None


def event_number(text: str, param: str) -> int:
    """The number of an event that a client has got. InvalidRequestError."""
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequestError(
            f"{param}: expected the id of an event, a number, got {text[:40]!r}", param=param
        )
    return int(text)


def frame(number: int, event: Event) -> bytes:
    """An event as it stands in the stream."""
    if event.name:
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, event.name.encode(), event.data)
    return b"id: %d\ndata: %b\n\n" % (number, event.data)


def error_frame(error: BaseException) -> bytes:
    """An error inside a stream, as OpenAI's clients read it."""
    return b"data: %b\n\n" % encode(error_body(error))


def _head(answer_id: str) -> dict[str, Any]:
    """What the response with an answer's events begins with."""
    headers = [*_HEADERS, (REQUEST_ID.encode(), answer_id.encode())]
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _send_head(answer_id: str, scope: Scope, receive: Receive, send: Send) -> None:
    """The response to a HEAD."""
    await send(_head(answer_id))
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _watch(receive: Receive, on_lost: Callable[[], None]) -> None:
    """Call it as soon as the client is gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_lost()


class _EventStream:
    """One answer on one connection: its Outlet, and the ASGI response."""

    def __init__(self, answer: Answer, receive: Receive, *, is_open: bool) -> None:
        """`is_open`: the head is sent with the first event; otherwise at once."""
        self.is_open = is_open
        self._answer = answer
        self._has_ids = answer.log is not None
        self._held = bytearray()  # for the task to send
        self._write: Callable[[bytes], None] = self._hold  # a BodyWriter's once the head is sent
        self._num_written = 0
        self._is_begun = False
        self._error: BaseException | None = None  # why it ends, if no event tells of that
        self._is_over = False
        self._is_lost = False
        self._changed = asyncio.Event()
        if not is_open:
            self._changed.set()
        self._watcher = asyncio.create_task(_watch(receive, self._lose))

    def stop_watching(self) -> None:
        self._watcher.cancel()

    # --- an Outlet ---------------------------------------------------------------------------

    def write(self, number: int, event: Event) -> None:
        self._num_written += 1
        # Some programs of the field read a block of an unnamed event as `data: ` and JSON, and
        # choke on an id before it: it stands only where it is of use.
        if self._has_ids or event.name:
            data = frame(number, event)
        else:
            data = b"data: %b\n\n" % event.data
        self._write(data)

    def ended(self, error: StreamkvError | None = None) -> None:
        self.is_open = False
        self._is_over = True
        answer = self._answer
        self._error = answer.error if error is None and not answer.num_events else error
        if self._error is not None and (self._is_begun or self._num_written):
            self._write(error_frame(self._error))
        self._changed.set()

    def _hold(self, data: bytes) -> None:
        self._held += data
        self._changed.set()

    def _lose(self) -> None:
        self.is_open = False
        self._is_lost = True
        self._changed.set()
        self._answer.detach(self)

    def _open(self) -> None:
        self.is_open = not (self._is_lost or self._is_over)
        self._answer.pump()

    def _close(self) -> None:
        self.is_open = False

    # --- the response ------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._tick()
        try:
            await self._changed.wait()
            if not self._is_lost:
                await self._respond(direct_writer(scope), send)
        finally:
            self.stop_watching()
            self._ticker.cancel()
            self._answer.detach(self)

    async def _respond(self, direct: BodyWriter | None, send: Send) -> None:
        if self._error is not None and not self._num_written:
            raise self._error
        self._is_begun = True
        self.is_open = False
        if direct is not None:
            direct.on_paused, direct.on_resumed = self._close, self._open
            direct.on_lost = self._lose
            direct.begin()
        await send(_head(self._answer.answer_id))
        if direct is not None:
            await self._write_directly(direct)
        else:
            await self._send_pieces(send)
        if not self._is_lost:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_directly(self, direct: BodyWriter) -> None:
        if self._held:
            direct.write(bytes(self._held))
            self._held.clear()
        self._write = direct.write
        if direct.is_writable:
            self._open()
        while not (self._is_over or self._is_lost):
            self._changed.clear()
            await self._changed.wait()
        direct.finish()

    async def _send_pieces(self, send: Send) -> None:
        while not self._is_lost:
            self._changed.clear()
            held, self._held = self._held, bytearray()
            if held:
                self._close()
                await send({"type": "http.response.body", "body": bytes(held), "more_body": True})
            elif self._is_over:
                return
            else:
                self._open()
                await self._changed.wait()

    def _tick(self, num_written: int = -1) -> None:
        """A comment, if nothing was written since the last time."""
        if num_written == self._num_written and self.is_open:
            self._write(_COMMENT)
        loop = asyncio.get_running_loop()
        self._ticker = loop.call_later(KEEP_ALIVE_S / 2, self._tick, self._num_written)
