"""One running answer: from the engine's deltas to numbered events, and from there to a reader.

Owns the way between a request's TokenStreams and its reader: a writer makes events of deltas, the
answer numbers them and writes them to an outlet, a connection or a lane of one. It must not know
what events say (the writer does) nor how they travel (the outlet does). Everything happens in
callbacks on the event loop: of the engine, which has tokens, and of the outlet, which is open
again. There is no task, future or lock for each token.

Invariants:

- While the outlet is closed, nothing is taken from the streams: deltas merge there. So a slow
  reader costs bounded memory and keeps nobody waiting. What merged comes to the writer in pieces,
  with turns of the loop between them.
- The events of an answer have the numbers 0, 1, 2 ...; a reader gets each once, in order. Of
  `end` and `fail` of the writer exactly one is called, once, as the last; none if the answer
  failed before its first event (`error` says why).
- Whatever fails, the writer or the outlet, ends this answer alone, and its requests are aborted.
- Where there is no log, events wait only for the outlet that was attached when they were made, and
  never more of them than one piece of a delta brings.
- An answer that has ended holds its events, where it keeps them, and nothing that made them.
- When the reader is gone, `OnDisconnect` says what becomes of the request. Without a reader
  nothing is taken either, until all streams have ended; then the rest goes into the log.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence

from ..errors import InvalidRequestError, StreamkvError
from .answer_types import PLAIN, SPENT, AnswerWriter, OnDisconnect, Outlet, Policy, taken_over
from .deltas import is_long
from .event_log import Event, EventLog, LogBudget, not_kept
from .generation import Generation, Source
from .intake import Intake

__all__ = [
    "PLAIN",
    "Answer",
    "AnswerWriter",
    "Event",
    "Generation",
    "OnDisconnect",
    "Outlet",
    "Policy",
    "Source",
]

logger = logging.getLogger(__name__)

# Each about a millisecond; then others have a turn.
TAKES_PER_TURN = 64  # deltas, and as many log-probabilities
LEN_PER_TAKE = 8  # of characters and tokens, where a delta brings more than one
WRITES_PER_TURN = 512  # events that are made already


class Answer(Generation):
    """One streamed answer. Event-loop thread only."""

    def __init__(
        self,
        answer_id: str,
        writer: AnswerWriter,
        budget: LogBudget,
        *,
        policy: Policy,
        owner: bytes = b"",
    ) -> None:
        super().__init__(answer_id, owner=owner)
        self.policy = policy
        self.num_events = 0
        self.log = EventLog(budget) if policy.resumable else None
        self._writer = writer
        self._outlet: Outlet | None = None
        self._cursor = 0  # the number of the next event for the outlet
        self._waiting: deque[Event] = deque()  # for the outlet, where there is no log
        self._intake = Intake()
        self._is_pumping = False
        self._turn: asyncio.Handle | None = None  # when it goes on, after others had theirs
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    @property
    def has_reader(self) -> bool:
        return self._outlet is not None

    # --- its life ----------------------------------------------------------------------------

    async def start(self, sources: Sequence[Source]) -> None:
        """Admit all prompts or none, raising what a TokenStream does; then events begin."""
        try:
            await self.admit(sources)
        except BaseException:
            self.end()
            raise
        if self.is_paused:  # the reader has left meanwhile
            self._pause()
        if not self.is_ended:
            self._intake.begin(self.streams)
        self._guard(lambda: self._emit(self._writer.begin(self.streams)))
        if len(self.streams) == 1:
            self.streams[0].subscribe(self._on_only_stream)
            return
        for prompt, stream in enumerate(self.streams):
            stream.subscribe(functools.partial(self._on_stream, prompt))

    def end(self) -> None:
        """No event is made any more. Idempotent."""
        self._stop_timer()
        self._intake.clear()
        super().end()
        self._writer = SPENT
        self._ended.set()

    async def wait_ended(self) -> None:
        """Until all its events are made, which its reader may not have been given yet."""
        await self._ended.wait()

    def attach(self, outlet: Outlet, *, after: int = -1) -> None:
        """Write the events after number `after` to this outlet: those of the log, then the others
        as they come. There is one reader: a new one takes over.

        GoneError `events_dropped` if the log begins later, NotFoundError `not_resumable` if there
        is none; InvalidRequestError for a number that has not been reached.
        """
        self._check_after(after)
        before, self._outlet = self._outlet, outlet
        self._cursor = after + 1
        self._stop_timer()
        if self.is_paused:
            self.is_paused = False
            for stream in self.streams:
                stream.resume()
        if before is not None:
            self._tell_ended(before, taken_over(self.answer_id))
        self.pump()

    def _check_after(self, after: int) -> None:
        if self.log is not None:
            self.log.check_has(after + 1, self.answer_id)
        elif after >= 0 or self.num_events or self.is_ended:
            raise not_kept(self.answer_id)
        if after >= self.num_events:
            raise InvalidRequestError(
                f"after: expected at most {self.num_events - 1}, the number of the last event, got "
                f"{after}",
                param="after",
            )

    def detach(self, outlet: Outlet) -> None:
        """Its connection is lost. Nothing happens if it is not the present one."""
        if self._outlet is not outlet:
            return
        self._outlet = None
        self._waiting.clear()
        if self.is_ended:
            return self._give_back()
        if self.policy.on_disconnect is OnDisconnect.ABORT:
            self.cancel()
            return
        if self.policy.on_disconnect is OnDisconnect.PAUSE:
            self._guard(self._pause)
        if self.policy.window_s < float("inf"):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.policy.window_s, self.cancel)
        self._pump_soon()  # all may have come while it was slow

    def forget(self) -> None:
        """It can't be found any more: its log goes when it has ended, and its reader has it."""
        super().forget()
        self._give_back()

    def cancel(self) -> None:
        """End it soon, with what there is so far. Idempotent."""
        super().cancel()
        if self._intake.add_all():
            self.pump()

    def _pause(self) -> None:
        self.is_paused = True
        for stream in self.streams:
            stream.pause()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- events ------------------------------------------------------------------------------

    def add(self, event: Event) -> None:
        """One more after its end, of what followed from it: in order, and kept with the others."""
        self._emit((event,))
        self._give_back()

    def _on_only_stream(self) -> None:
        """As `_on_stream`; quick for a delta to a reader who has all before it."""
        outlet, intake = self._outlet, self._intake
        if (
            outlet is None
            or self._is_pumping
            or self._cursor != self.num_events
            or intake.pieces
            or not outlet.is_open
        ):
            return self._on_stream(0)
        self._is_pumping = True
        try:
            delta = self.streams[0].take()
            if delta is not None:
                if is_long(delta):
                    delta = intake.cut(delta)
                events = self._writer.push(0, delta)
                if len(events) == 1:
                    self._write(events[0], outlet)
                else:
                    self._emit(events)
        except Exception as exc:
            return self._fail(exc)
        finally:
            self._is_pumping = False
        if delta is None or delta.finish_reason is not None or intake.pieces or not intake.is_plain:
            self._on_stream(0)

    def _on_stream(self, prompt: int) -> None:
        """The engine has something for a prompt, or no more."""
        if self._intake.add(prompt):
            self.pump()

    def pump(self) -> None:
        """Write what there is while the outlet is open: called whenever there is more of either.
        While others have their turn it only sees what has ended."""
        if not self._is_pumping:
            self._is_pumping = True
            try:
                self._guard(self._pump if self._turn is None else self._see_ends)
            finally:
                self._is_pumping = False

    def _pump_soon(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._on_turn)

    def _on_turn(self) -> None:
        self._turn = None  # also after the end, when there may be more to write
        self.pump()

    def _guard(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as exc:
            self._fail(exc)

    def _pump(self) -> None:
        intake, num_left = self._intake, TAKES_PER_TURN
        while num_left > 0 and self._flows():
            prompt = intake.first
            if prompt is None:
                return
            delta = intake.take(prompt)
            if delta is not None:
                num_left -= 1 + len(delta.logprobs)
                num_left -= (len(delta.text) + len(delta.token_ids)) // LEN_PER_TAKE
                self._emit(self._writer.push(prompt, delta))
                continue
            self._see_end(prompt)
        self._see_ends()
        if num_left <= 0 and intake.first is not None:
            self._pump_soon()

    def _see_ends(self) -> None:
        """At once, whatever room and turn are left: a writer that is done takes nothing in."""
        while (prompt := self._intake.first_ended()) is not None:
            self._see_end(prompt)

    def _see_end(self, prompt: int) -> None:
        """Nothing of a prompt is left to take, for now or for ever."""
        stream = self._intake.pass_over(prompt)
        if stream.error is not None:
            self._fail(stream.error)
        elif self._intake.is_done:
            self._emit(self._writer.end())
            self._finish()

    def _flows(self) -> bool:
        """Whether more may be taken now. First what was made before is written."""
        outlet = self._outlet
        if outlet is None:  # there is time, until all has come
            return not self.is_ended and self._intake.all_have_come()
        last = self._cursor + WRITES_PER_TURN
        while outlet.is_open and self._cursor < self.num_events:
            number = self._cursor
            if number == last:
                self._pump_soon()
                return False
            event = self._waiting.popleft() if self.log is None else self.log[number]
            self._cursor = number + 1
            try:
                outlet.write(number, event)
            except Exception:
                self._drop_outlet()  # it is not told how the answer ends
                raise
        if self.is_ended and self._cursor == self.num_events:
            self._drop_outlet()
        return outlet.is_open and not self.is_ended

    def _write(self, event: Event, outlet: Outlet) -> None:
        """Number an event, and write it to an outlet that is open and has all before it."""
        number = self.num_events
        self.num_events = self._cursor = number + 1
        if self.log is not None:
            self.log.append(event, keep_from=number + 1)
        try:
            outlet.write(number, event)
        except Exception:
            self._drop_outlet()  # it is not told how the answer ends
            raise

    def _emit(self, events: Sequence[Event]) -> None:
        """Number these events, and write or keep them."""
        for event in events:
            number, outlet = self.num_events, self._outlet
            if outlet is not None and self._cursor == number and outlet.is_open:
                self._write(event, outlet)
                continue
            self.num_events = number + 1
            if self.log is not None:
                self.log.append(event, keep_from=number + 1 if outlet is None else self._cursor)
            elif outlet is not None:
                self._waiting.append(event)

    def _fail(self, error: BaseException) -> None:
        """End with an error: as an event, unless there has been none."""
        if not isinstance(error, StreamkvError):
            logger.error("answer %s failed", self.answer_id, exc_info=error)
        if self.is_ended:  # what failed is the outlet
            return self._drop_outlet()
        self.error = error
        try:
            if self.num_events:
                self._emit(self._writer.fail(error))
        except Exception:
            logger.exception("answer %s: telling of its failure failed", self.answer_id)
            self._drop_outlet()
        self._finish()

    def _finish(self) -> None:
        """All events are made."""
        self.end()
        self._guard(self._flows)
        self._give_back()

    def _drop_outlet(self) -> None:
        """It gets nothing more."""
        outlet, self._outlet = self._outlet, None
        if outlet is not None:
            self._tell_ended(outlet)
        self._give_back()

    def _give_back(self) -> None:
        if self.is_forgotten and self.is_ended and self._outlet is None and self.log is not None:
            self.log.clear()

    def _tell_ended(self, outlet: Outlet, error: StreamkvError | None = None) -> None:
        try:
            outlet.ended(error)
        except Exception:
            logger.exception("answer %s: an outlet failed at the end", self.answer_id)
