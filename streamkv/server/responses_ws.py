"""The WebSocket at /v1/responses: many responses at once on one connection.

Speaks OpenAI's Responses WebSocket mode as the official `openai` package types it
(`responses_client_event.py`, `responses_server_event.py`). A `response.create` names a lane by
`stream_id`, or belongs to the unnamed one: first in, first out within a lane, errors included
(only what a full queue refuses is refused at once); lanes run in parallel. `previous_response_id`
goes on from a finished response of this connection, whatever its lane. Our extension
`response.cancel` {response_id | stream_id} ends a running response; with neither, the one that
runs in the unnamed lane.

Owns the connection: its lanes, its history, its one writer. Knows the engine only through
`open_response` and TokenStream. Invariants:

- Whatever a client sends in a text or binary frame is answered by events; only a message beyond
  `max_body_bytes` closes the connection (1009), and text that is not UTF-8 does, which RFC 6455
  asks for (1007; the protocol below sees to it).
- Everything is bounded: lanes, turns that wait in a lane, their bytes, the history's bytes; and
  a slow reader has one pending event per lane, since a TokenStream merges its deltas.
- When the connection ends, all its responses are aborted before `run` returns.
- When the engine is draining, responses that run go on to their end and new ones are refused;
  the connection is closed (1012) once none is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from ..config import ServerConfig
from ..engine.stream import TokenStream
from ..errors import InvalidRequestError, NotFoundError, OverloadedError, StreamkvError
from .auth import accepted_subprotocol
from .request_fields import Name
from .response_events import Event, response_events
from .response_history import ResponseHistory
from .response_request import NOT_HONOURED, ResponseRequest
from .responses import open_response
from .wire import ErrorDetail, decode_body, encode, engine_of, error_body, server_config, status_of

logger = logging.getLogger(__name__)

MAX_LANES = 256
MAX_TURNS_PER_LANE = 64  # the running one included
MESSAGE_TOO_BIG = 1009  # RFC 6455, section 7.4.1
SERVICE_RESTART = 1012  # from IANA's registry; reconnecting makes sense
RETRY_AFTER_S = 1


class ClientEvent(Struct, frozen=True, kw_only=True):
    """What all client events share, and all there is to `response.cancel`."""

    type: str
    stream_id: Name | None = None
    response_id: str | None = None


class ErrorEvent(Struct, frozen=True, kw_only=True, tag="error"):
    """OpenAI's ResponseWsError: an error that is not the end of a response that was created."""

    status: int
    error: ErrorDetail
    stream_id: str | UnsetType = UNSET


_client_event_decoder = msgspec.json.Decoder(ClientEvent)
_create_decoder = msgspec.json.Decoder(ResponseRequest)
# A socket always streams and always generates.
_NOT_HONOURED = {**NOT_HONOURED, "stream": (True,), "generate": (True,)}


class Turn:
    """One `response.create` from its arrival to its last event. Owner: its lane."""

    def __init__(self, data: str, num_bytes: int) -> None:
        self.data = data  # decoded when its turn comes, so that its errors keep the order
        self.num_bytes = num_bytes
        self.response_id: str | None = None  # until it is opened
        self._stream: TokenStream | None = None
        self._cancelled = False

    def attach(self, response_id: str, stream: TokenStream) -> None:
        """Take its stream, not yet entered, and hand on a cancellation that came before."""
        self.response_id = response_id
        self._stream = stream
        if self._cancelled:
            stream.cancel()

    def cancel(self) -> None:
        """End it soon, even if it is not opened yet; idempotent."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()


class Lane:
    """Turns that run one after the other; `turns[0]` is the running one. It ends when empty."""

    def __init__(self, stream_id: str | None) -> None:
        self.stream_id = stream_id
        self.turns: deque[Turn] = deque()
        self.task: asyncio.Task[None] | None = None


class ResponsesSocket:
    """One connection. Owner: the event-loop thread."""

    def __init__(self, websocket: WebSocket, config: ServerConfig) -> None:
        self._websocket = websocket
        self._max_message_bytes = config.max_body_bytes
        self._max_pending_bytes = 2 * config.max_body_bytes  # one runs while one waits
        self._num_pending_bytes = 0
        self._history = ResponseHistory(config.max_body_bytes)
        self._lanes: dict[str | None, Lane] = {}
        self._writer = asyncio.Lock()

    async def run(self) -> None:
        """Accept the connection and serve it until it ends."""
        websocket = self._websocket
        await websocket.accept(subprotocol=accepted_subprotocol(websocket.scope))
        too_big = False
        drainer = asyncio.create_task(self._close_when_drained())
        try:
            too_big = await self._read_until_closed()
        except WebSocketDisconnect:
            pass
        finally:
            tasks = [drainer, *self._lane_tasks()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if too_big:
            reason = f"expected at most {self._max_message_bytes} bytes a message"
            with suppress(WebSocketDisconnect):
                await websocket.close(MESSAGE_TOO_BIG, reason)

    async def _close_when_drained(self) -> None:
        await engine_of(self._websocket).wait_draining()
        while tasks := self._lane_tasks():
            await asyncio.wait(tasks)
        with suppress(WebSocketDisconnect):
            async with self._writer:
                await self._websocket.close(SERVICE_RESTART, "the server is shutting down")

    def _lane_tasks(self) -> list[asyncio.Task[None]]:
        return [lane.task for lane in self._lanes.values() if lane.task is not None]

    async def _read_until_closed(self) -> bool:
        """Handle messages until the client is gone (False) or sent too large a one (True)."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return False
            text: str | None = message.get("text")
            num_bytes = len(message.get("bytes") or b"") if text is None else len(text.encode())
            if num_bytes > self._max_message_bytes:
                return True
            await self._handle(text, num_bytes)

    async def _handle(self, text: str | None, num_bytes: int) -> None:
        stream_id: str | None = None
        try:
            if text is None:
                raise InvalidRequestError("expected JSON in a text frame, got a binary frame")
            event = decode_body(text, _client_event_decoder)
            stream_id = event.stream_id
            match event.type:
                case "response.create":
                    self._enqueue(Turn(text, num_bytes), stream_id)
                case "response.cancel":
                    self._cancel(event)
                case "response.steer":
                    raise InvalidRequestError(
                        "response.steer: not supported by this server; cancel the response and "
                        "create one that goes on from it",
                        param="type",
                        code="unsupported",
                    )
                case _:
                    raise InvalidRequestError(
                        "type: expected 'response.create' or 'response.cancel', "
                        f"got {event.type!r}",
                        param="type",
                    )
        except StreamkvError as error:
            await self._send_error(error, stream_id)

    def _enqueue(self, turn: Turn, stream_id: str | None) -> None:
        """Give a turn to its lane, which starts if there is none. OverloadedError if full."""
        if self._num_pending_bytes + turn.num_bytes > self._max_pending_bytes:
            raise self._overloaded(f"{self._max_pending_bytes} bytes of requests")
        lane = self._lanes.get(stream_id)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                raise self._overloaded(f"{MAX_LANES} lanes")
            lane = self._lanes[stream_id] = Lane(stream_id)
            lane.task = asyncio.create_task(self._run_lane(lane))
        elif len(lane.turns) >= MAX_TURNS_PER_LANE:
            raise self._overloaded(f"{MAX_TURNS_PER_LANE} requests in a lane")
        lane.turns.append(turn)
        self._num_pending_bytes += turn.num_bytes

    def _overloaded(self, limit: str) -> OverloadedError:
        return OverloadedError(
            f"expected at most {limit} at once on a connection; wait for a response to end",
            retry_after_s=RETRY_AFTER_S,
        )

    def _cancel(self, event: ClientEvent) -> None:
        """Cancel the running response of that id, or else of that lane."""
        if event.response_id is None:
            lane = self._lanes.get(event.stream_id)
            turn = None if lane is None else lane.turns[0]
        else:
            running = (lane.turns[0] for lane in self._lanes.values())
            turn = next((turn for turn in running if turn.response_id == event.response_id), None)
        if turn is None:
            raise NotFoundError(
                "response.cancel: no such response is running on this connection",
                param="stream_id" if event.response_id is None else "response_id",
                code="response_not_found",
            )
        turn.cancel()

    async def _run_lane(self, lane: Lane) -> None:
        try:
            while lane.turns:
                turn = lane.turns[0]
                await self._run_turn(turn, lane.stream_id)
                lane.turns.popleft()
                self._num_pending_bytes -= turn.num_bytes
        except WebSocketDisconnect:
            pass  # the reader sees it too, and ends the connection
        finally:
            del self._lanes[lane.stream_id]

    async def _run_turn(self, turn: Turn, stream_id: str | None) -> None:
        try:
            await self._respond(turn, stream_id)
        except StreamkvError as error:
            await self._send_error(error, stream_id)
        except WebSocketDisconnect:
            raise
        except Exception as error:
            logger.exception("response %s failed", turn.response_id)
            await self._send_error(error, stream_id)

    async def _respond(self, turn: Turn, stream_id: str | None) -> None:
        body = decode_body(turn.data, _create_decoder, not_honoured=_NOT_HONOURED)
        opened = await open_response(
            self._websocket,
            body,
            previous=self._history.conversation(body.previous_response_id),
            stream_id=stream_id,
        )
        builder = opened.builder
        turn.attach(builder.response.id, opened.stream)
        async with opened.source as stream:
            async for events in response_events(stream, builder):
                # Kept before the last event is sent: the client may go on from it at once.
                if builder.response.status not in ("in_progress", "failed"):
                    self._history.add(builder.response, opened.conversation)
                for event in events:
                    await self._send(event)

    async def _send_error(self, error: Exception, stream_id: str | None) -> None:
        await self._send(
            ErrorEvent(
                status=status_of(error),
                error=error_body(error).error,
                stream_id=UNSET if stream_id is None else stream_id,
            )
        )

    async def _send(self, event: Event | ErrorEvent) -> None:
        """Write one event. Waits while the client is slow; WebSocketDisconnect if it is gone."""
        async with self._writer:
            if self._websocket.application_state is not WebSocketState.CONNECTED:
                raise WebSocketDisconnect
            await self._websocket.send_text(encode(event).decode())


async def serve_socket(websocket: WebSocket) -> None:
    await ResponsesSocket(websocket, server_config(websocket)).run()


routes: list[BaseRoute] = [WebSocketRoute("/v1/responses", serve_socket)]
