"""One message of a lane in its turn: what it asks for is made, read to its end, and followed.

Owns how a `response.create` or `response.resume` becomes what runs in its lane, and the successors
of what was steered. Knows no other lane and no bounds of theirs. Invariants: a response that was
not admitted leaves nothing behind, no outlet, no record, no steering input; the successor of a
response follows it before anything else in the lane.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.websockets import WebSocket, WebSocketDisconnect

from ...errors import InvalidRequestError, NotFoundError, StreamkvError
from ..answer import Answer, OnDisconnect
from ..answers import answers_of
from ..ids import RESPONSE
from ..streams import policy_of
from ..wire import ErrorDetail, decode_body, encode, error_body, renaming_fields, status_of
from ..ws_outlet import LaneOutlet, SocketWriter
from .answer import SocketAnswer, lane_tail, open_successor
from .items import InputItem
from .lane import Create, Lane, Refusal, Resume, Turn
from .opening import OpenedResponse, ask, open_response
from .request import SOCKET_ADVICE, SOCKET_NOT_HONOURED, ResponseRequest
from .steers import Steers
from .store import ResponseStore, response_not_found, shelves_of, store_of

logger = logging.getLogger(__name__)

_create_decoder = msgspec.json.Decoder(ResponseRequest)


class ErrorEvent(Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """OpenAI's ResponseWsError: an error that is not the end of a response that was created."""

    status: int
    error: ErrorDetail
    stream_id: str | UnsetType = UNSET


def write_error(writer: SocketWriter, error: Exception, stream_id: str | None) -> None:
    """Tell of it; what nobody foresaw goes to the log."""
    if not isinstance(error, StreamkvError):
        logger.error("a message on a WebSocket failed", exc_info=error)
    event = ErrorEvent(
        status=status_of(error),
        error=error_body(error).error,
        stream_id=UNSET if stream_id is None else stream_id,
    )
    writer.write(encode(event))


def find_response(websocket: WebSocket, response_id: str) -> Answer:
    """The answer of that very id, which is a response's. NotFoundError."""
    if not response_id.startswith(RESPONSE):
        raise response_not_found(response_id)
    try:
        return answers_of(websocket).find_answer(websocket, response_id, exact=True)
    except NotFoundError as error:
        if error.code == "request_not_found":
            raise response_not_found(response_id) from None
        error.param = "response_id"
        raise


class Turns:
    """Those of one connection. `is_over` is the lanes' to set: the connection has ended."""

    def __init__(self, websocket: WebSocket, writer: SocketWriter, max_bytes: int) -> None:
        """`max_bytes`: of what the connection remembers, and of a message."""
        self.is_over = False
        self._websocket = websocket
        self._writer = writer
        self._answers = answers_of(websocket)
        self._history = ResponseStore(max_bytes)  # of `store: false`
        self._shelves = shelves_of(websocket, self._history)
        find = functools.partial(find_response, websocket)
        self.steers = Steers(writer, self._shelves, 2 * max_bytes, find)

    def forget(self) -> None:
        """What only this connection remembers. Records that others hold know it."""
        self._history.clear()

    # --- a message ---------------------------------------------------------------------------

    async def serve(self, lane: Lane, turn: Turn | Refusal) -> None:
        """Until its events are written; an error is one of them. WebSocketDisconnect."""
        try:
            if isinstance(turn, Refusal):
                return await self._refuse(lane, turn)
            message = turn.message
            if isinstance(message, Create):
                answer = await self._create(lane, message)
            else:
                answer = await self._resume(lane, message)
            while answer is not None and answer.steers and not self.is_over:
                answer = await self._succeed(lane, answer)
        except WebSocketDisconnect:
            raise
        except Exception as error:
            write_error(self._writer, error, lane.stream_id)

    async def _refuse(self, lane: Lane, refusal: Refusal) -> None:
        while refusal.num:
            refusal.num -= 1
            write_error(self._writer, refusal.error, lane.stream_id)
            await self._writer.drain()
            await asyncio.sleep(0)  # there may be many

    async def _create(self, lane: Lane, message: Create) -> SocketAnswer | None:
        body = decode_body(
            message.data, _create_decoder, not_honoured=SOCKET_NOT_HONOURED, advice=SOCKET_ADVICE
        )
        waiting = self.steers.waiting_for(body.previous_response_id, lane.stream_id)
        if waiting is None:
            return await self._read(lane, await self._open(lane, body))
        with waiting.claimed():
            num, items = len(waiting.steers), waiting.steering_items
            answer = await self._open(lane, body, before=items)
            self.steers.settle(waiting, num)
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
            self.steers.give_up(answer, error)
            raise
        return answer

    def _new_answer(self, opened: OpenedResponse) -> SocketAnswer:
        if self.is_over:
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
            write_error(self._writer, error, lane.stream_id)
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
        answer = find_response(self._websocket, message.response_id)
        with renaming_fields({"after": "starting_after"}):
            self._enter(lane, answer, message.after, message.credits)
        self._answers.num_resumed += 1
        if isinstance(answer, SocketAnswer):
            record = answer.record
            if record.store not in (self._history, store_of(self._websocket)):
                record.move(self._history)
        return await self._read(lane, answer)

    # --- what was steered --------------------------------------------------------------------

    async def _succeed(self, lane: Lane, answer: SocketAnswer) -> SocketAnswer | None:
        """The successor of a response that was steered, once it has been read; None if there is
        none."""
        if answer.is_claimed or not self.steers.are_due(answer):
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
            self.steers.give_up(answer, error)
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
