"""The lanes of one WebSocket: many responses at once, one after the other within a lane.

Owns which lanes there are, what waits in them and for them, and their end. How a message is served
is `turns`'. Invariants:

- A lane answers in the order asked, errors included.
- Everything is bounded: lanes, what waits in a lane, its bytes and those of steering.
- When the connection ends, nothing of it waits any more. A response that runs is cancelled if the
  client closed the connection on purpose (1000, or no code); if it was lost, it goes on as its
  policy says, by default for the resume window. `on_disconnect` decides in both cases.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from starlette.websockets import WebSocket, WebSocketDisconnect

from ...errors import GoneError, NotFoundError, OverloadedError
from ..ws_outlet import SocketWriter
from .answer import SocketAnswer
from .lane import Create, Lane, Refusal, Resume, Turn
from .steering import MAX_PENDING_STEERS, SteerCommand, read_command
from .turns import Turns, find_response

MAX_LANES = 256
MAX_TURNS_PER_LANE = 64  # the running one included
RETRY_AFTER_S = 1
ON_PURPOSE = (1000, 1005)  # how a client closes that wants no more


class Lanes:
    """Those of one connection. Owner: the event-loop thread."""

    def __init__(self, websocket: WebSocket, writer: SocketWriter, max_message_bytes: int) -> None:
        self._websocket = websocket
        self._max_pending_bytes = 2 * max_message_bytes  # one runs while one waits
        self._num_pending_bytes = 0
        self._lanes: dict[str | None, Lane] = {}
        self._named: dict[str, deque[tuple[Lane, Turn]]] = {}  # by their responses, in order
        self._turns = Turns(websocket, writer, max_message_bytes)
        self._steers = self._turns.steers

    # --- what the client asks for ------------------------------------------------------------

    def create(self, message: Create, stream_id: str | None) -> None:
        """Make a response in that lane, in its turn. OverloadedError."""
        self._add(message, stream_id)

    def resume(self, message: Resume, stream_id: str | None) -> None:
        """Read a response on, in that lane or in the one it was in, in its turn.
        OverloadedError."""
        if stream_id is None:
            try:
                answer = find_response(self._websocket, message.response_id)
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
            lane = self._lanes[stream_id] = Lane(stream_id, self._steer_what_waited)
            lane.task = asyncio.create_task(self._run(lane))
        turn = Turn(message)
        lane.queue.append(turn)
        self._num_pending_bytes += turn.num_bytes
        if turn.response_id is not None:
            self._named.setdefault(turn.response_id, deque()).append((lane, turn))

    def _next(self, lane: Lane) -> None:
        """What was served there leaves."""
        turn = lane.next()
        self._num_pending_bytes -= turn.num_bytes
        if isinstance(turn, Refusal):
            return
        if turn.response_id is not None:
            same = self._named[turn.response_id]
            same.remove((lane, turn))
            if not same:
                del self._named[turn.response_id]
        self._steer_what_waited(turn)

    def _overload(self, message: Create | Resume, lane: Lane | None) -> OverloadedError | None:
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
        found = self._turn_of(command.previous_response_id)
        if found is None or self._runs(*found):
            return self._steer(command)
        _, turn = found
        num_bytes = self._num_pending_bytes + len(command.input)
        if len(turn.steers) >= MAX_PENDING_STEERS or num_bytes > self._max_pending_bytes:
            return self._steers.refuse_one_too_many(command)
        self._num_pending_bytes = num_bytes
        turn.steers.append(command)

    def _steer(self, command: SteerCommand) -> None:
        lanes = self._lanes.values()
        running = [lane.running.answer for lane in lanes if lane.running is not None]
        self._steers.take(command, running)

    def _steer_what_waited(self, turn: Turn) -> None:
        """What comes of it runs now, or won't."""
        steers, turn.steers = turn.steers, []
        for command in steers:
            self._num_pending_bytes -= len(command.input)
            self._steer(command)

    def cancel(self, response_id: str | None, stream_id: str | None) -> None:
        """End the response of that id, or else what is served in that lane. NotFoundError."""
        lane, turn = self._find(response_id, stream_id, "response.cancel")
        lane.cancel(turn)
        if response_id is not None and isinstance(turn.message, Resume):  # it runs, read or not
            with contextlib.suppress(NotFoundError, GoneError):
                find_response(self._websocket, response_id).cancel()

    def grant(self, response_id: str | None, stream_id: str | None, num: int) -> None:
        """So many more events of it may be written. NotFoundError; InvalidRequestError if it needs
        none."""
        lane, turn = self._find(response_id, stream_id, "response.grant")
        lane.grant(turn, num)

    def _find(self, response_id: str | None, stream_id: str | None, what: str) -> tuple[Lane, Turn]:
        if response_id is not None:
            found = self._turn_of(response_id, stream_id)
        else:
            lane = self._lanes.get(stream_id)
            turn = None if lane is None else lane.served
            found = None if lane is None or turn is None else (lane, turn)
        if found is None:
            raise NotFoundError(
                f"{what}: no such response is running on this connection",
                param="stream_id" if response_id is None else "response_id",
                code="response_not_found",
            )
        return found

    def _turn_of(self, response_id: str, stream_id: str | None = None) -> tuple[Lane, Turn] | None:
        """What runs under that id, or else what waits for its turn; in that lane, if one is
        named."""
        for lane in self._lanes.values():
            turn = lane.served
            if turn is None or lane.running is None or stream_id not in (None, lane.stream_id):
                continue
            if lane.running.answer.answer_id == response_id:
                return lane, turn
        for lane, turn in self._named.get(response_id, ()):
            if not self._runs(lane, turn) and stream_id in (None, lane.stream_id):
                return lane, turn
        return None

    @staticmethod
    def _runs(lane: Lane, turn: Turn) -> bool:
        return lane.running is not None and turn is lane.served

    # --- the connection ----------------------------------------------------------------------

    def tasks(self) -> list[asyncio.Task[None]]:
        return [lane.task for lane in self._lanes.values() if lane.task is not None]

    async def leave(self, code: int) -> None:
        """The connection has ended."""
        self._turns.is_over = True
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
        self._named.clear()
        self._turns.forget()

    # --- a lane ------------------------------------------------------------------------------

    async def _run(self, lane: Lane) -> None:
        try:
            while lane.queue and not self._turns.is_over:
                await self._turns.serve(lane, lane.queue[0])
                self._next(lane)
                await asyncio.sleep(0)  # there may be many that are refused
        except WebSocketDisconnect:
            pass  # the reader sees it too, and ends the connection
        finally:
            del self._lanes[lane.stream_id]
