"""The lanes of one WebSocket: many responses at once, one after the other within a lane.

Owns what waits in a lane, what runs there, and what follows a response that was steered. Knows the
engine only through `open_response` and Answer; how events travel is the SocketWriter's. Invariants:

- A lane answers in the order asked, errors included. The successor of a response follows it before
  anything else in the lane.
- Everything is bounded: lanes, what waits in a lane, its bytes and those of steering.
- When the connection ends, nothing of it waits any more. A response that runs is cancelled if the
  client closed the connection on purpose (1000, or no code); if it was lost, it goes on as its
  policy says, by default for the resume window. `on_disconnect` decides in both cases.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..errors import InvalidRequestError, NotFoundError, OverloadedError, StreamkvError
from .answer import Answer, OnDisconnect
from .answers import answers_of
from .response_answer import LaneWriter, SocketAnswer, open_successor
from .response_opening import OpenedResponse, ask, open_response
from .response_request import SOCKET_NOT_HONOURED, ResponseRequest
from .response_steers import Steers
from .response_store import ResponseStore, shelves_of, store_of
from .streams import policy_of
from .wire import ErrorDetail, decode_body, encode, error_body, renaming_fields, status_of
from .ws_outlet import SocketWriter

logger = logging.getLogger(__name__)

MAX_LANES = 256
MAX_TURNS_PER_LANE = 64  # the running one included
RETRY_AFTER_S = 1
ON_PURPOSE = (1000, 1005)  # how a client closes that wants no more

_create_decoder = msgspec.json.Decoder(ResponseRequest)


class ErrorEvent(Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """OpenAI's ResponseWsError: an error that is not the end of a response that was created."""

    status: int
    error: ErrorDetail
    stream_id: str | UnsetType = UNSET


class Create(NamedTuple):
    """A `response.create`; decoded when its turn comes, so that its errors keep the order."""

    data: str
    num_bytes: int


class Resume(NamedTuple):
    """A response to be read on, from the event after that number."""

    answer: Answer
    after: int
    credits: int | None
    num_bytes: int


class Running(NamedTuple):
    """What a lane's events come from."""

    answer: Answer
    outlet: LaneWriter


class Lane:
    """Messages that are served one after the other; the first is the one being served."""

    def __init__(self, stream_id: str | None) -> None:
        self.stream_id = stream_id
        self.queue: deque[Create | Resume] = deque()
        self.is_cancelled = False  # what is being served, whatever of it runs
        self.running: Running | None = None
        self.task: asyncio.Task[None] | None = None


class Lanes:
    """Those of one connection. Owner: the event-loop thread."""

    def __init__(self, websocket: WebSocket, writer: SocketWriter, max_message_bytes: int) -> None:
        self._websocket = websocket
        self._writer = writer
        self._answers = answers_of(websocket)
        self._max_pending_bytes = 2 * max_message_bytes  # one runs while one waits
        self._num_pending_bytes = 0
        self._history = ResponseStore(max_message_bytes)  # of `store: false`
        self._shelves = shelves_of(websocket, self._history)
        self._lanes: dict[str | None, Lane] = {}
        self._is_over = False
        self._steers = Steers(
            writer,
            self._shelves,
            self._max_pending_bytes,
            lambda: [running.answer for _, running in self._all_running()],
        )

    # --- what the client asks for ------------------------------------------------------------

    def add(self, message: Create | Resume, stream_id: str | None) -> None:
        """Give it to its lane, which starts if there is none. OverloadedError if full."""
        if self._num_pending_bytes + message.num_bytes > self._max_pending_bytes:
            raise _overloaded(f"{self._max_pending_bytes} bytes of requests")
        lane = self._lanes.get(stream_id)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                raise _overloaded(f"{MAX_LANES} lanes")
            lane = self._lanes[stream_id] = Lane(stream_id)
            lane.task = asyncio.create_task(self._run(lane))
        elif len(lane.queue) >= MAX_TURNS_PER_LANE:
            raise _overloaded(f"{MAX_TURNS_PER_LANE} requests in a lane")
        lane.queue.append(message)
        self._num_pending_bytes += message.num_bytes

    def resume(
        self,
        response_id: str,
        *,
        after: int,
        stream_id: str | None,
        credits: int | None,
        num_bytes: int,
    ) -> None:
        """Read a response on, in that lane or in the one it was in. NotFoundError."""
        try:
            answer = self._answers.find_answer(self._websocket, response_id)
        except NotFoundError as error:
            error.param = "response_id"
            raise
        if stream_id is None and isinstance(answer, SocketAnswer):
            stream_id = answer.stream_id
        self.add(Resume(answer, after, credits, num_bytes), stream_id)

    def steer(self, data: str) -> None:
        """`response.steer`: an event answers it in any case. InvalidRequestError where there is
        no input to give back."""
        self._steers.take(data)

    def cancel(self, response_id: str | None, stream_id: str | None) -> None:
        """End the running response of that id, or else of that lane. NotFoundError."""
        lane = self._find(response_id, stream_id, "response.cancel")
        lane.is_cancelled = True
        if lane.running is not None:
            lane.running.answer.cancel()

    def grant(self, response_id: str | None, stream_id: str | None, num: int) -> None:
        """So many more events of it may be written. NotFoundError."""
        lane = self._find(response_id, stream_id, "response.grant")
        running = lane.running
        if running is None or running.outlet.num_credits is None:
            raise InvalidRequestError(
                "credits: expected a response that was created with credits; it needs none",
                param="credits",
            )
        running.outlet.grant(num)

    def _find(self, response_id: str | None, stream_id: str | None, what: str) -> Lane:
        if response_id is None:
            lane = self._lanes.get(stream_id)
        else:
            lane = next(
                (lane for lane, one in self._all_running() if one.answer.answer_id == response_id),
                None,
            )
        if lane is None:
            raise NotFoundError(
                f"{what}: no such response is running on this connection",
                param="stream_id" if response_id is None else "response_id",
                code="response_not_found",
            )
        return lane

    def _all_running(self) -> Iterator[tuple[Lane, Running]]:
        for lane in self._lanes.values():
            if lane.running is not None:
                yield lane, lane.running

    # --- the connection ----------------------------------------------------------------------

    def tasks(self) -> list[asyncio.Task[None]]:
        return [lane.task for lane in self._lanes.values() if lane.task is not None]

    async def leave(self, code: int) -> None:
        """The connection has ended."""
        self._is_over = True
        tasks = self.tasks()
        for lane in list(self._lanes.values()):
            running = lane.running
            if running is None:
                if lane.task is not None:
                    lane.task.cancel()
                continue
            running.outlet.detach()
            answer = running.answer
            if code in ON_PURPOSE and isinstance(answer, SocketAnswer):
                if answer.opened.asked.body.on_disconnect is None:
                    answer.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def send_error(self, error: Exception, stream_id: str | None) -> None:
        event = ErrorEvent(
            status=status_of(error),
            error=error_body(error).error,
            stream_id=UNSET if stream_id is None else stream_id,
        )
        self._writer.write(encode(event))

    # --- a lane ------------------------------------------------------------------------------

    async def _run(self, lane: Lane) -> None:
        try:
            while lane.queue and not self._is_over:
                message = lane.queue[0]
                await self._serve(lane, message)
                lane.running = None
                lane.is_cancelled = False
                lane.queue.popleft()
                self._num_pending_bytes -= message.num_bytes
        except WebSocketDisconnect:
            pass  # the reader sees it too, and ends the connection
        finally:
            del self._lanes[lane.stream_id]

    async def _serve(self, lane: Lane, message: Create | Resume) -> None:
        try:
            if isinstance(message, Create):
                answer: Answer | None = await self._create(lane, message)
            else:
                answer = await self._resume(lane, message)
            while isinstance(answer, SocketAnswer) and answer.steers and not self._is_over:
                answer = await self._succeed(lane, answer)
        except StreamkvError as error:
            self.send_error(error, lane.stream_id)
        except WebSocketDisconnect:
            raise
        except Exception as error:
            logger.exception("a lane's request failed")
            self.send_error(error, lane.stream_id)

    async def _create(self, lane: Lane, message: Create) -> SocketAnswer:
        body = decode_body(message.data, _create_decoder, not_honoured=SOCKET_NOT_HONOURED)
        waiting = self._steers.waiting_for(body.previous_response_id, lane.stream_id)
        before = [] if waiting is None else waiting.steering_items
        asked = await ask(self._websocket, body, self._shelves, before=before)
        opened = await open_response(
            self._websocket, asked, self._shelves, self._store_for(body.store)
        )
        answer = await self._begin(lane, opened, body.credits)
        if waiting is not None:
            self._steers.settle(waiting)
        return await self._read(lane, answer)

    def _store_for(self, wanted: bool | None) -> ResponseStore:
        shared = store_of(self._websocket)
        return shared if shared.is_on and wanted is not False else self._history

    async def _begin(self, lane: Lane, opened: OpenedResponse, credits: int | None) -> SocketAnswer:
        """Let it run in the lane, in the place of what has run there. Raises what keeps it from
        being admitted."""
        body = opened.asked.body
        try:
            if self._is_over:
                raise WebSocketDisconnect
            options = body.stream_options
            policy = policy_of(
                self._websocket,
                body.on_disconnect,
                None if options is None else options.resumable,
                default=OnDisconnect.CONTINUE,
            )
            answer = SocketAnswer(self._websocket, opened, policy)
            self._answers.add(answer)
            answer.stream_id = lane.stream_id
            outlet = LaneWriter(self._writer, lane.stream_id, credits=credits)
            outlet.attach(answer)
            lane.running = Running(answer, outlet)
            if lane.is_cancelled:
                answer.cancel()
            await answer.start([opened.source])
        except BaseException:
            opened.abandon()
            raise
        return answer

    async def _read(self, lane: Lane, answer: SocketAnswer) -> SocketAnswer:
        """Until its events have been written, or are somebody else's to read."""
        assert lane.running is not None, "nothing runs in the lane"
        await lane.running.outlet.done.wait()
        return answer

    async def _resume(self, lane: Lane, message: Resume) -> Answer:
        answer = message.answer
        outlet = LaneWriter(self._writer, lane.stream_id, credits=message.credits)
        lane.running = Running(answer, outlet)
        if isinstance(answer, SocketAnswer):
            answer.stream_id = lane.stream_id
        try:
            with renaming_fields({"after": "starting_after"}):
                outlet.attach(answer, after=message.after)
        except StreamkvError:
            outlet.detach()
            raise
        if isinstance(answer, SocketAnswer):
            record = answer.opened.record
            if record.store not in (self._history, store_of(self._websocket)):
                record.move(self._history)
        await outlet.done.wait()
        return answer

    # --- steering ----------------------------------------------------------------------------

    async def _succeed(self, lane: Lane, answer: SocketAnswer) -> SocketAnswer | None:
        """The successor of a response that was steered, once it has been read; None if there is
        none."""
        if not self._steers.are_due(answer):
            return None
        assert lane.running is not None, "nothing ran in the lane"
        credits = lane.running.outlet.num_credits
        try:
            successor = await self._begin(lane, await self._open_successor(answer), credits)
        except StreamkvError as error:
            self._steers.give_up(answer, error)
            return None
        answer.steers.clear()
        return await self._read(lane, successor)

    async def _open_successor(self, answer: SocketAnswer) -> OpenedResponse:
        """With all inputs that have come until it is made."""
        store = self._store_for(answer.opened.asked.body.store)
        while True:
            num_steers = len(answer.steers)
            opened = await open_successor(self._websocket, self._shelves, store, answer)
            if num_steers == len(answer.steers):
                return opened
            opened.abandon()


def _overloaded(limit: str) -> OverloadedError:
    return OverloadedError(
        f"expected at most {limit} at once on a connection; wait for a response to end",
        retry_after_s=RETRY_AFTER_S,
    )
