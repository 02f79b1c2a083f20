"""The lanes of one WebSocket: many responses at once, one after the other within a lane.

Owns which lanes there are, how their messages are served, and what follows a response that was
steered. Knows the engine only through `open_response` and Answer; how events travel is the
SocketWriter's. Invariants:

- A lane answers in the order asked, errors included. The successor of a response follows it before
  anything else in the lane.
- Everything is bounded: lanes, what waits in a lane, its bytes and those of steering.
- A response that was not admitted leaves nothing behind: no outlet, no record, no steering input.
- When the connection ends, nothing of it waits any more. A response that runs is cancelled if the
  client closed the connection on purpose (1000, or no code); if it was lost, it goes on as its
  policy says, by default for the resume window. `on_disconnect` decides in both cases.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..errors import InvalidRequestError, NotFoundError, OverloadedError, StreamkvError
from .answer import Answer, OnDisconnect
from .answers import answers_of
from .ids import RESPONSE
from .response_answer import SocketAnswer, lane_tail, open_successor
from .response_items import InputItem
from .response_lane import Create, Lane, Message, Refusal, Resume
from .response_opening import OpenedResponse, ask, open_response
from .response_request import SOCKET_ADVICE, SOCKET_NOT_HONOURED, ResponseRequest
from .response_steers import Steers
from .response_store import ResponseStore, response_not_found, shelves_of, store_of
from .steering import MAX_PENDING_STEERS, SteerCommand, read_command
from .streams import policy_of
from .wire import ErrorDetail, decode_body, encode, error_body, renaming_fields, status_of
from .ws_outlet import LaneOutlet, SocketWriter

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
        limit = self._max_pending_bytes
        self._steers = Steers(
            writer, self._shelves, limit, functools.partial(_find_response, websocket)
        )

    # --- what the client asks for ------------------------------------------------------------

    def create(self, message: Create, stream_id: str | None) -> None:
        """Make a response in that lane, in its turn. OverloadedError."""
        self._add(message, stream_id)

    def resume(self, message: Resume, stream_id: str | None) -> None:
        """Read a response on, in that lane or in the one it was in, in its turn.
        OverloadedError."""
        if stream_id is None:
            try:
                answer = _find_response(self._websocket, message.response_id)
            except NotFoundError:
                pass  # its lane will say so
            else:
                stream_id = answer.stream_id if isinstance(answer, SocketAnswer) else None
        self._add(message, stream_id)

    def _add(self, message: Create | Resume, stream_id: str | None) -> None:
        """Give it to its lane, which starts if there is none. OverloadedError if there can be
        none; a lane that has no room for it says so in its turn."""
        lane = self._lanes.get(stream_id)
        error = self._overload(message, lane)
        if lane is not None and error is not None:
            return lane.refuse(error)
        if error is not None:
            raise error
        if lane is None:
            lane = self._lanes[stream_id] = Lane(stream_id)
            lane.task = asyncio.create_task(self._run(lane))
        lane.queue.append(message)
        self._num_pending_bytes += message.num_bytes

    def _overload(self, message: Message, lane: Lane | None) -> OverloadedError | None:
        if self._num_pending_bytes + message.num_bytes > self._max_pending_bytes:
            limit = f"{self._max_pending_bytes} bytes of requests"
        elif lane is None and len(self._lanes) >= MAX_LANES:
            limit = f"{MAX_LANES} lanes"
        elif lane is not None and len(lane.queue) >= MAX_TURNS_PER_LANE:
            limit = f"{MAX_TURNS_PER_LANE} requests in a lane"
        else:
            return None
        return OverloadedError(
            f"expected at most {limit} at once on a connection; wait for a response to end",
            retry_after_s=RETRY_AFTER_S,
        )

    def steer(self, data: str) -> None:
        """`response.steer`: an event answers it in any case, once it is known what becomes of its
        response. InvalidRequestError for what is no input."""
        command = read_command(data)
        lanes = list(self._lanes.values())
        found = [one for one in lanes if one.response_id == command.previous_response_id]
        if not found or any(one.running is not None for one in found):
            return self._steer(command)
        num_bytes = self._num_pending_bytes + len(command.input)
        if len(found[0].steers) >= MAX_PENDING_STEERS or num_bytes > self._max_pending_bytes:
            return self._steers.refuse_one_too_many(command)
        self._num_pending_bytes = num_bytes
        found[0].steers.append(command)

    def _steer(self, command: SteerCommand) -> None:
        lanes = self._lanes.values()
        running = [lane.running.answer for lane in lanes if lane.running is not None]
        self._steers.take(command, running)

    def _steer_what_waited(self, lane: Lane) -> None:
        """What is served there runs now, or won't."""
        steers, lane.steers = lane.steers, []
        for command in steers:
            self._num_pending_bytes -= len(command.input)
            self._steer(command)

    def cancel(self, response_id: str | None, stream_id: str | None) -> None:
        """End the running response of that id, or else of that lane. NotFoundError."""
        self._find(response_id, stream_id, "response.cancel").cancel()

    def grant(self, response_id: str | None, stream_id: str | None, num: int) -> None:
        """So many more events of it may be written. NotFoundError; InvalidRequestError if it needs
        none."""
        self._find(response_id, stream_id, "response.grant").grant(num)

    def _find(self, response_id: str | None, stream_id: str | None, what: str) -> Lane:
        if response_id is None:
            lane = self._lanes.get(stream_id)
        else:
            lanes = [one for one in self._lanes.values() if one.response_id == response_id]
            lane = next((one for one in lanes if stream_id in (None, one.stream_id)), None)
        if lane is None:
            raise NotFoundError(
                f"{what}: no such response is running on this connection",
                param="stream_id" if response_id is None else "response_id",
                code="response_not_found",
            )
        return lane

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
            if running.outlet.done.is_set():
                continue  # it has been read, or is somebody else's to read
            running.outlet.detach()
            answer = running.answer
            if code in ON_PURPOSE and isinstance(answer, SocketAnswer):
                if answer.ends_with_connection:
                    answer.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._history.clear()  # records that others hold know it

    def send_error(self, error: Exception, stream_id: str | None) -> None:
        """Tell of it; what nobody foresaw goes to the log."""
        if not isinstance(error, StreamkvError):
            logger.error("a message on a WebSocket failed", exc_info=error)
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
                await self._serve(lane, lane.queue[0])
                self._num_pending_bytes -= lane.next().num_bytes
                self._steer_what_waited(lane)
                await asyncio.sleep(0)  # there may be many that are refused
        except WebSocketDisconnect:
            pass  # the reader sees it too, and ends the connection
        finally:
            del self._lanes[lane.stream_id]

    async def _serve(self, lane: Lane, message: Message) -> None:
        try:
            if isinstance(message, Refusal):
                return await self._refuse(lane, message)
            if isinstance(message, Create):
                answer = await self._create(lane, message)
            else:
                answer = await self._resume(lane, message)
            while answer is not None and answer.steers and not self._is_over:
                answer = await self._succeed(lane, answer)
        except WebSocketDisconnect:
            raise
        except Exception as error:
            self.send_error(error, lane.stream_id)

    async def _refuse(self, lane: Lane, refusal: Refusal) -> None:
        while refusal.num:
            refusal.num -= 1
            self.send_error(refusal.error, lane.stream_id)
            await self._writer.drain()
            await asyncio.sleep(0)  # there may be many

    async def _create(self, lane: Lane, message: Create) -> SocketAnswer | None:
        body = decode_body(
            message.data, _create_decoder, not_honoured=SOCKET_NOT_HONOURED, advice=SOCKET_ADVICE
        )
        waiting = self._steers.waiting_for(body.previous_response_id, lane.stream_id)
        if waiting is None:
            return await self._read(lane, await self._open(lane, body))
        with waiting.claimed():
            num, items = len(waiting.steers), waiting.steering_items
            answer = await self._open(lane, body, before=items)
            self._steers.settle(waiting, num)
        return await self._read(lane, answer)

    async def _open(
        self, lane: Lane, body: ResponseRequest, before: Sequence[InputItem] = ()
    ) -> SocketAnswer:
        asked = await ask(self._websocket, body, self._shelves, before=before)
        shared = store_of(self._websocket)
        store = shared if shared.takes(asked.turn, body.store) else self._history
        opened = await open_response(self._websocket, asked, self._shelves, store)
        return await self._begin(lane, opened, body.credits)

    def _store_for(self, wanted: bool | None) -> ResponseStore:
        shared = store_of(self._websocket)
        return shared if shared.is_on and wanted is not False else self._history

    async def _begin(self, lane: Lane, opened: OpenedResponse, credits: int | None) -> SocketAnswer:
        """Let it run in the lane, in the place of what has run there. Raises what keeps it from
        being admitted."""
        try:
            answer = self._new_answer(opened)
        except BaseException:
            opened.abandon()
            raise
        outlet = self._enter(lane, answer, -1, credits)
        try:
            await answer.start([opened.source])
            if answer.error is not None and not answer.num_events:
                raise answer.error  # nobody has been told
        except BaseException as error:
            outlet.detach()
            opened.abandon()
            answer.forget()
            self._steers.give_up(answer, error)
            raise
        return answer

    def _new_answer(self, opened: OpenedResponse) -> SocketAnswer:
        if self._is_over:
            raise WebSocketDisconnect
        body = opened.asked.body
        policy = policy_of(
            self._websocket,
            body.on_disconnect,
            None if body.stream_options is None else body.stream_options.resumable,
            default=OnDisconnect.CONTINUE,
        )
        answer = SocketAnswer(self._websocket, opened, policy)
        self._answers.add(answer)
        return answer

    def _enter(self, lane: Lane, answer: Answer, after: int, credits: int | None) -> LaneOutlet:
        """Read it in this lane from now on. Raises what Answer.attach does."""
        outlet = LaneOutlet(self._writer, tail=lane_tail(lane.stream_id), credits=credits)
        outlet.attach(answer, after=after)
        if isinstance(answer, SocketAnswer):
            answer.stream_id = lane.stream_id
        try:
            lane.run(answer, outlet)
        except InvalidRequestError as error:
            self.send_error(error, lane.stream_id)
        self._steer_what_waited(lane)
        return outlet

    async def _read(self, lane: Lane, answer: Answer) -> SocketAnswer | None:
        """Until its events have been written; None if nothing can follow it here. Raises why the
        rest of them is not for this lane, if somebody else reads it now."""
        assert lane.running is not None, "nothing runs in the lane"
        outlet = lane.running.outlet
        await outlet.done.wait()
        if outlet.error is not None:
            raise outlet.error
        return answer if outlet.has_read_all and isinstance(answer, SocketAnswer) else None

    async def _resume(self, lane: Lane, message: Resume) -> SocketAnswer | None:
        answer = _find_response(self._websocket, message.response_id)
        with renaming_fields({"after": "starting_after"}):
            self._enter(lane, answer, message.after, message.credits)
        self._answers.num_resumed += 1
        if isinstance(answer, SocketAnswer):
            record = answer.record
            if record.store not in (self._history, store_of(self._websocket)):
                record.move(self._history)
        return await self._read(lane, answer)

    # --- steering ----------------------------------------------------------------------------

    async def _succeed(self, lane: Lane, answer: SocketAnswer) -> SocketAnswer | None:
        """The successor of a response that was steered, once it has been read; None if there is
        none."""
        if answer.is_claimed or not self._steers.are_due(answer):
            return None
        try:
            with answer.claimed():
                opened, num = await self._open_successor(answer)
                assert lane.running is not None, "nothing ran in the lane"
                credits = lane.running.outlet.num_credits
                successor = await self._begin(lane, opened, credits)
                del answer.steers[:num]
        except WebSocketDisconnect:
            raise
        except Exception as error:
            if not isinstance(error, StreamkvError):
                logger.exception("a successor could not be made")
            self._steers.give_up(answer, error)
            return None
        return await self._read(lane, successor)

    async def _open_successor(self, answer: SocketAnswer) -> tuple[OpenedResponse, int]:
        """With all inputs that have come until it is made, and the number of them."""
        store = self._store_for(answer.is_to_be_stored)
        while True:
            num = len(answer.steers)
            opened = await open_successor(self._websocket, self._shelves, store, answer)
            if num == len(answer.steers):
                return opened, num
            opened.abandon()


def _find_response(websocket: WebSocket, response_id: str) -> Answer:
    """The answer of that very id, which is a response's. NotFoundError."""
    if not response_id.startswith(RESPONSE):
        raise response_not_found(response_id)
    try:
        answer = answers_of(websocket).find_answer(websocket, response_id, exact=True)
    except NotFoundError as error:
        if error.code == "request_not_found":
            raise response_not_found(response_id) from None
        error.param = "response_id"
        raise
    return answer
