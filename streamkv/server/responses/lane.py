"""One lane of a WebSocket: what waits in it, and what is served there now.

Owns the order within the lane, and what is said to a response that hasn't begun: the id that its
client chose is known, so that what comes behind a request means its response, however far that is,
and wherever in the lane it waits. Knows nothing of how a message is served. Invariants: what is
asked of a lane is answered in the order asked, a refusal too; however much is refused, it takes the
place of one message at most between two that wait.
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


class Turn:
    """A message, and what is said to its response before that runs."""

    def __init__(self, message: Create | Resume) -> None:
        self.message = message
        self.is_cancelled = False
        self.num_granted = 0
        self.steers: list[SteerCommand] = []

    @property
    def num_bytes(self) -> int:
        return self.message.num_bytes

    @property
    def response_id(self) -> str | None:
        return self.message.response_id


class Refusal:
    """So many messages in a row for which there was no room."""

    num_bytes = 0
    response_id = None

    def __init__(self, error: OverloadedError) -> None:
        self.error = error
        self.num = 1


class Running(NamedTuple):
    """What a lane's events come from."""

    answer: Answer
    outlet: LaneOutlet


class Lane:
    """Turns that are served one after the other; the first is the one being served."""

    def __init__(self, stream_id: str | None, on_running: Callable[[Turn], None]) -> None:
        """`on_running`: called when another answer runs in it, with the turn that it is of."""
        self.stream_id = stream_id
        self.queue: deque[Turn | Refusal] = deque()
        self.running: Running | None = None
        self.task: asyncio.Task[None] | None = None
        self._on_running = on_running

    @property
    def served(self) -> Turn | None:
        """What is being served, unless that is a refusal."""
        first = self.queue[0] if self.queue else None
        return first if isinstance(first, Turn) else None

    def refuse(self, error: OverloadedError) -> None:
        """Answer with an error in the turn of a message that can't wait here."""
        last = self.queue[-1] if self.queue else None
        if isinstance(last, Refusal):
            last.num += 1
        else:
            self.queue.append(Refusal(error))

    def run(self, answer: Answer, outlet: LaneOutlet) -> None:
        """This is what its events come from now. What was said before that counts for it.
        InvalidRequestError for credits that it can't take."""
        turn = self.served
        assert turn is not None, "nothing is served in the lane"
        self.running = Running(answer, outlet)
        if turn.is_cancelled:
            answer.cancel()
        num, turn.num_granted = turn.num_granted, 0
        try:
            if num:
                _grant(outlet, num)
        finally:
            self._on_running(turn)

    def cancel(self, turn: Turn) -> None:
        """End what comes of it."""
        turn.is_cancelled = True
        if self.running is not None and turn is self.served:
            self.running.answer.cancel()

    def grant(self, turn: Turn, num: int) -> None:
        """So many more of its events may be written. InvalidRequestError if it has no limit."""
        if self.running is not None and turn is self.served:
            _grant(self.running.outlet, num)
        else:
            turn.num_granted += num

    def next(self) -> Turn | Refusal:
        """What was served leaves."""
        self.running = None
        return self.queue.popleft()


def _grant(outlet: LaneOutlet, num: int) -> None:
    if outlet.num_credits is None:
        raise InvalidRequestError(
            "credits: expected a response that was created with credits; it needs none",
            param="credits",
        )
    outlet.grant(num)
