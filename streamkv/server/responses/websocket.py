"""The WebSocket at /v1/responses: many responses at once on one connection.

Speaks OpenAI's Responses WebSocket mode as the official `openai` package types it
(`responses_client_event.py`, `responses_server_event.py`). A `response.create` names a lane by
`stream_id`, or belongs to the unnamed one (see `lanes`); `response.steer` gives input to a
response that runs (see `steering`). `previous_response_id` goes on from a response that is stored,
or, with `store: false`, from one of this connection. Our extensions:

- `response.cancel` {response_id | stream_id} ends a running response; with neither, the one that
  runs in the unnamed lane.
- `response.resume` {response_id, starting_after, stream_id, credits} goes on with a response after
  an event, on any connection of the same key.
- `response.create` with `credits`: so many events may be sent; meanwhile deltas merge.
  `response.grant` {response_id | stream_id, credits} allows more.

Owns the connection and the reading of it. Invariants:

- Whatever a client sends in a text or binary frame is answered by events; only a message beyond
  `max_body_bytes` closes the connection (1009), and text that is not UTF-8 does, which RFC 6455
  asks for (1007; the protocol below sees to it).
- A client that doesn't read what it asked for is not read from.
- When the engine is draining, responses that run go on to their end and new ones are refused;
  the connection is closed (1012) once none is left.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ...errors import InvalidRequestError
from ..auth import accepted_subprotocol
from ..request_fields import Name
from ..wire import decode_body, engine_of, server_config
from ..ws_outlet import SocketWriter
from ..ws_protocol import MESSAGE_TOO_BIG
from .lane import Create, Resume, requested_id
from .lanes import Lanes
from .turns import write_error

SERVICE_RESTART = 1012  # from IANA's registry; reconnecting makes sense
LOST = 1006
MAX_MESSAGES = 8  # in a turn of the loop

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class ClientEvent(Struct, frozen=True, kw_only=True):
    """What all client events share: enough to know whose they are."""

    type: Name
    stream_id: Name | None = None
    request_id: Raw = Raw(b"null")  # of a response.create, which says so itself if it is wrong


class Command(ClientEvent, frozen=True, kw_only=True):
    """What our own have."""

    response_id: Name | None = None
    starting_after: Annotated[int, Meta(ge=-1, le=2**53)] | None = None
    credits: Count | None = None


_decoder = msgspec.json.Decoder(ClientEvent)
_command_decoder = msgspec.json.Decoder(Command)


class ResponsesSocket:
    """One connection. Owner: the event-loop thread."""

    def __init__(self, websocket: WebSocket, writer: SocketWriter) -> None:
        self._websocket = websocket
        self._writer = writer
        self._max_message_bytes = server_config(websocket).max_body_bytes
        self._lanes = Lanes(websocket, writer, self._max_message_bytes)

    async def run(self) -> None:
        """Serve it until it ends."""
        drainer = asyncio.create_task(self._close_when_drained())
        code = LOST
        try:
            code = await self._read_until_closed()
        except WebSocketDisconnect:
            pass
        finally:
            drainer.cancel()
            await self._lanes.leave(code)
            await asyncio.gather(drainer, return_exceptions=True)
        if code == MESSAGE_TOO_BIG:
            reason = f"expected at most {self._max_message_bytes} bytes a message"
            await self._close(code, reason)

    async def _close_when_drained(self) -> None:
        await engine_of(self._websocket).wait_draining()
        while tasks := self._lanes.tasks():
            await asyncio.wait(tasks)
        await self._close(SERVICE_RESTART, "the server is shutting down")

    async def _close(self, code: int, reason: str) -> None:
        with suppress(WebSocketDisconnect):
            await self._writer.flush()
            await self._websocket.close(code, reason)

    async def _read_until_closed(self) -> int:
        """Handle messages until the client is gone or sent too large a one: the closing code."""
        for number in itertools.count(1):
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                code: int = message.get("code", LOST)
                return code
            text: str | None = message.get("text")
            num_bytes = len(message.get("bytes") or b"") if text is None else _num_bytes(text)
            if num_bytes > self._max_message_bytes:
                return MESSAGE_TOO_BIG
            self._handle(text, num_bytes)
            with suppress(WebSocketDisconnect):  # what was sent before it ended is read first
                await self._writer.drain()
            if number % MAX_MESSAGES == 0:
                await asyncio.sleep(0)
        raise AssertionError("a connection has an end")

    def _handle(self, text: str | None, num_bytes: int) -> None:
        stream_id: str | None = None
        try:
            if text is None:
                raise InvalidRequestError("expected JSON in a text frame, got a binary frame")
            event = decode_body(text, _decoder)
            stream_id = event.stream_id
            self._dispatch(event, text, num_bytes)
        except Exception as error:
            write_error(self._writer, error, stream_id)

    def _dispatch(self, event: ClientEvent, text: str, num_bytes: int) -> None:
        match event.type:
            case "response.create":
                message = Create(text, num_bytes, requested_id(event.request_id))
                self._lanes.create(message, event.stream_id)
            case "response.steer":
                self._lanes.steer(text)
            case "response.cancel" | "response.grant" | "response.resume":
                self._obey(decode_body(text, _command_decoder), num_bytes)
            case other:
                raise InvalidRequestError(
                    "type: expected response.create, response.steer, response.cancel, "
                    f"response.grant or response.resume, got {other!r:.100}",
                    param="type",
                )

    def _obey(self, command: Command, num_bytes: int) -> None:
        response_id, stream_id = command.response_id, command.stream_id
        match command.type:
            case "response.cancel":
                self._lanes.cancel(response_id, stream_id)
            case "response.grant":
                self._lanes.grant(response_id, stream_id, _given(command, "credits"))
            case _:
                after = -1 if command.starting_after is None else command.starting_after
                given: str = _given(command, "response_id")
                self._lanes.resume(Resume(given, after, command.credits, num_bytes), stream_id)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _given(command: Command, name: str) -> Any:
    value = getattr(command, name)
    if value is None:
        raise InvalidRequestError(f"{name}: required field is missing", param=name)
    return value


async def serve_socket(websocket: WebSocket) -> None:
    await websocket.accept(subprotocol=accepted_subprotocol(websocket.scope))
    async with SocketWriter(websocket) as writer:
        await ResponsesSocket(websocket, writer).run()


routes: list[BaseRoute] = [WebSocketRoute("/v1/responses", serve_socket)]
