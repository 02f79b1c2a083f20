"""What is written to one WebSocket by many answers at once.

Owns the order of text frames on a connection, its back-pressure, and the credits of its lanes.
Knows nothing about what the frames say. Frames go straight to the transport where the server
offers that; under another one a task sends them. Invariants: while the client is slow the lanes are
closed, so that their answers wait where deltas merge; when it reads again every lane has its turn,
beginning with another one each time; a lane with credits writes no event without one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

from starlette.websockets import WebSocket, WebSocketDisconnect

from ..errors import StreamkvError
from .answer import Answer
from .direct_write import direct_writer
from .event_log import Event
from .ws_protocol import FrameWriter


class SocketWriter:
    """The text frames of one accepted connection: enter it to write.

    `write` may be called at any time; who answers a client's messages waits for `drain` before
    reading the next one. Nothing is sent once the connection is lost.
    """

    def __init__(self, websocket: WebSocket) -> None:
        self.is_open = True
        self.is_lost = False
        self._websocket = websocket
        self._direct: FrameWriter | None = direct_writer(websocket.scope)
        self.write: Callable[[bytes], None]  # one text frame
        self.write = self._hold if self._direct is None else self._direct.write
        self._lanes: dict[LaneOutlet, None] = {}
        self._held: deque[bytes] = deque()  # for the task, without a direct writer
        self._changed = asyncio.Event()  # for the task
        self._opened = asyncio.Event()
        self._opened.set()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> SocketWriter:
        if self._direct is None:
            self._task = asyncio.create_task(self._send_held())
        else:
            self._direct.on_paused, self._direct.on_resumed = self._pause, self._resume
            self._direct.on_lost = self._lose
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lose()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _hold(self, data: bytes) -> None:
        if not self.is_lost:
            self._held.append(data)
            self._changed.set()

    async def drain(self) -> None:
        """Until the client has taken most of what was written. WebSocketDisconnect."""
        await self._opened.wait()
        if self.is_lost:
            raise WebSocketDisconnect

    async def flush(self) -> None:
        """Until all that was written is on its way, before the connection is closed."""
        if self._direct is not None:
            self._direct.flush()
        while self._direct is None and self._held and not self.is_lost:
            self._opened.clear()
            await self._opened.wait()

    # --- back-pressure -----------------------------------------------------------------------

    def add(self, lane: LaneOutlet) -> None:
        self._lanes[lane] = None

    def remove(self, lane: LaneOutlet) -> None:
        self._lanes.pop(lane, None)

    def _pause(self) -> None:
        self.is_open = False
        self._opened.clear()

    def _resume(self) -> None:
        if self.is_lost:
            return
        self.is_open = True
        self._opened.set()
        for lane in list(self._lanes):
            if not self.is_open:
                return
            if lane in self._lanes:  # who has had a turn is the last the next time
                self._lanes[lane] = self._lanes.pop(lane)
            lane.pump()

    def _lose(self) -> None:
        self.is_open = False
        self.is_lost = True
        self._held.clear()
        self._opened.set()

    async def _send_held(self) -> None:
        """Under a server without direct writes."""
        try:
            while True:
                while self._held:
                    self._pause()
                    await self._websocket.send_text(self._held.popleft().decode())
                self._changed.clear()
                self._resume()
                await self._changed.wait()
        except WebSocketDisconnect:
            self._lose()


class LaneOutlet:
    """Where one answer writes on a connection. With credits, each event takes one."""

    def __init__(
        self, writer: SocketWriter, *, tail: bytes = b"", credits: int | None = None
    ) -> None:
        """`tail` stands in the place of each event's last brace; if empty, the brace stays."""
        self.done = asyncio.Event()  # its answer has nothing more for it
        self.error: StreamkvError | None = None  # why, if there would have been more
        self.has_read_all = False  # nobody took over before the answer's end
        self.num_credits = credits  # None: as many as it likes
        self._writer = writer
        self._tail = tail
        self._answer: Answer | None = None

    def attach(self, answer: Answer, *, after: int = -1) -> None:
        """Read this answer, as Answer.attach does. It may not have been started yet."""
        self._answer = answer
        self._writer.add(self)
        try:
            answer.attach(self, after=after)
        except BaseException:
            self._writer.remove(self)
            raise

    @property
    def is_open(self) -> bool:
        return self._writer.is_open and self.num_credits != 0

    def grant(self, num: int) -> None:
        """So many more events may be written."""
        self.num_credits = (self.num_credits or 0) + num
        self.pump()

    def write(self, number: int, event: Event) -> None:
        if self.num_credits is not None:
            self.num_credits -= 1
        data, tail = event.data, self._tail
        self._writer.write(data[:-1] + tail if tail else data)

    def ended(self, error: StreamkvError | None = None) -> None:
        self.error = error
        self.has_read_all = error is None and self._answer is not None and self._answer.is_ended
        self._writer.remove(self)
        self.done.set()

    def pump(self) -> None:
        if self._answer is not None:
            self._answer.pump()

    def detach(self) -> None:
        """The connection is lost, or the client doesn't want to read on: what becomes of the
        answer is its policy's."""
        self._writer.remove(self)
        if self._answer is not None:
            self._answer.detach(self)
        self.done.set()
