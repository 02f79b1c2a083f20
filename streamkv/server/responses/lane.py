"""One lane of a WebSocket: what waits in it, and what is served there now.

Owns the order within the lane, and what is said to a lane whose response hasn't begun: the id that
its client chose is known, so that what comes right behind a request means its response, however
far that is. Knows nothing of how a message is served. Invariants: what is asked of a lane is
answered in the order asked, a refusal too; however much is refused, it takes the place of one
message at most between two that wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ...errors import InvalidRequestError, OverloadedError
from ..answer import Answer
from ..ids import RESPONSE, answer_id_of
from ..request_fields import RequestId
from ..ws_outlet import LaneOutlet
from .steering import SteerCommand


class Create(NamedTuple):
    """A `response.create`; decoded when its turn comes, so that its errors keep the order."""

    data: str
    num_bytes: int
    response_id: str | None  # where its client chose it


_MAX_ID_BYTES = 1024  # as JSON, each character an escape
_id_decoder = msgspec.json.Decoder(RequestId)


def requested_id(request_id: msgspec.Raw) -> str | None:
    """The id of a response that is asked for under that name; None if it isn't one."""
    if len(request_id) > _MAX_ID_BYTES:
        return None
    try:
        return answer_id_of(RESPONSE, _id_decoder.decode(request_id))
    except (msgspec.DecodeError, UnicodeError):
        return None


class Resume(NamedTuple):
    """A response to be read on, from the event after that number; found when its turn comes."""

    response_id: str
    after: int
    credits: int | None
    num_bytes: int


class Refusal:
    """So many messages in a row for which there was no room."""

    num_bytes = 0

    def __init__(self, error: OverloadedError) -> None:
        self.error = error
        self.num = 1


Message = Create | Resume | Refusal


class Running(NamedTuple):
    """What a lane's events come from."""

    answer: Answer
    outlet: LaneOutlet


class Lane:
    """Messages that are served one after the other; the first is the one being served."""

    def __init__(self, stream_id: str | None, on_running: Callable[[Lane], None]) -> None:
        """`on_running`: called when another answer runs in it."""
        self.stream_id = stream_id
        self.on_running = on_running
        self.queue: deque[Message] = deque()
        self.running: Running | None = None
        self.is_cancelled = False  # what is being served, whatever of it runs
        self.task: asyncio.Task[None] | None = None
        self._num_granted = 0  # before it ran
        self.steers: list[SteerCommand] = []  # for it, before it ran

    @property
    def response_id(self) -> str | None:
        """Of what is being served, once that is known."""
        if self.running is not None:
            return self.running.answer.answer_id
        first = self.queue[0] if self.queue else None
        return None if first is None or isinstance(first, Refusal) else first.response_id

    def refuse(self, error: OverloadedError) -> None:
        """Answer with an error in the turn of a message that can't wait here."""
        last = self.queue[-1]
        if isinstance(last, Refusal):
            last.num += 1
        else:
            self.queue.append(Refusal(error))

    def run(self, answer: Answer, outlet: LaneOutlet) -> None:
        """This is what its events come from now. What was said before that counts for it.
        InvalidRequestError for credits that it can't take."""
        self.running = Running(answer, outlet)
        if self.is_cancelled:
            answer.cancel()
        num, self._num_granted = self._num_granted, 0
        if num:
            self.grant(num)

    def cancel(self) -> None:
        """End what is being served."""
        self.is_cancelled = True
        if self.running is not None:
            self.running.answer.cancel()

    def grant(self, num: int) -> None:
        """So many more of its events may be written. InvalidRequestError if it has no limit."""
        if self.running is None:
            self._num_granted += num
            return
        outlet = self.running.outlet
        if outlet.num_credits is None:
            raise InvalidRequestError(
                "credits: expected a response that was created with credits; it needs none",
                param="credits",
            )
        outlet.grant(num)

    def next(self) -> Message:
        """What was served leaves."""
        self.running = None
        self.is_cancelled = False
        self._num_granted = 0
        return self.queue.popleft()
