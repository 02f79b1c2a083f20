"""One model's loop between its scheduler, its device and the readers of its streams.

Owns the Scheduler and when it is asked, and carries what the store is to do there, and its results
back. Which requests there are, `requests.py` knows; what grammars say of them, `bindings.py`. It
must not know sockets, prompts as text, or what device and store are. Everything here runs on the
event-loop thread, in plain callbacks: there is no task that a caller could cancel by accident, no
lock, and while nothing is to be done, no wake-up.

A turn takes in what has happened, tells the matchers of new tokens, feeds the device, and only then
the readers (of a beam search, which has all its tokens at the end, and of tokens that grammars
leave no choice for, some in each of several turns):

    on_output ─► commit ─► matchers' news ─► drain the queue ─► matchers ─► schedule, submit
    add ─► asyncio.Queue ──────────────────────▲                                 │
    matchers, store ─► news ──────▲              text, stop strings, mailboxes ◄─┘
                                                 subscribers, each once
                                                 (nothing left to do? the books are checked)

What arrives in one iteration of the event loop shares a turn, and so a step. An abort takes
effect at once: its blocks are free when the last step that names them is committed. A step may have
copies and no tokens, when blocks are loaded or kept while nothing else is to be done.

Invariants: at most depth + 1 steps are in flight; whenever there is something to run and room for
a step, a step is in flight, a turn is due, or the store or a matcher does something that ends in
one: nothing waits for ever. Whether the scheduler has got everything back is checked when the last
request has ended, so that books that are wrong end the engine instead of changing somebody's
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable

from ..core.scheduler import Scheduler, TokenEvent
from ..errors import EngineDeadError, OverloadedError, StreamkvError
from ..protocol import (
    BlockStore,
    MaskBoard,
    Request,
    StepInput,
    StepOutput,
    StoreResult,
    unpack_ints,
)
from .bindings import Bindings
from .entry import Entry
from .mailbox import Mailbox
from .matcher_slot import Slot
from .matchers import Matchers
from .requests import NOT_FINITE, Requests
from .stats import EngineStats, read_stats

logger = logging.getLogger(__name__)

ANSWERS_PER_TURN = 500  # tokens of beams: 3 ms
FORCED_PER_TURN = 64  # tokens that grammars leave no choice for: 0.3 ms
MAX_FAILED_STEPS = 3  # in a row; then the device is taken for broken
MAX_RETRY_AFTER_S = 60


class EngineLoop:
    """Feeds one device and fans its output out. Event-loop thread only."""

    def __init__(
        self,
        scheduler: Scheduler,
        submit: Callable[[StepInput], None],
        on_dead: Callable[[EngineDeadError], None],
        *,
        depth: int,
        num_host_slots: int,
        store: BlockStore | None,
        masks: MaskBoard | None,
    ) -> None:
        """`depth` steps may wait behind the running one; `on_dead` is called once, if ever. What
        is in the `store` can be found from now on."""
        self.scheduler = scheduler
        self._bindings = None if masks is None else Bindings(scheduler, masks, self._wake)
        self._requests = Requests(scheduler, self._bindings, self._wake)
        self._num_host_slots = num_host_slots
        self._submit = submit
        self._on_dead = on_dead
        self._depth = depth
        self._loop = asyncio.get_running_loop()
        self._arrivals: asyncio.Queue[Entry] = asyncio.Queue()  # bounded by `check_queue`
        self._turn_due = False
        self._num_failed_steps = 0
        self._stopped = False
        self._at_rest = asyncio.Event()  # nothing to do was left when it was last looked
        self._store = store
        self._store_results: list[StoreResult] = []  # for the next turn
        if store is not None:
            scheduler.insert_stored(store.index())
            store.on_result(self._post_store_result)

    # --- commands --------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Choices without a place on the device, in the queue or in the scheduler."""
        return self.scheduler.num_waiting + self._requests.num_arriving

    @property
    def is_idle(self) -> bool:
        """No request is there that has not ended and isn't paused."""
        return self._requests.num_live == 0

    @property
    def matchers(self) -> Matchers | None:
        """Of grammars that bind answers; None if the device knows no masks."""
        return None if self._bindings is None else self._bindings.matchers

    def add(self, request: Request, mailbox: Mailbox, slots: tuple[Slot, ...] = ()) -> Entry:
        """Queue a checked request for the next turn. `slots`: of its sequences, if a grammar binds
        them; they are given back when it has ended. EngineDeadError; InvalidRequestError for the id
        of another one."""
        if self._stopped:
            raise EngineDeadError("the engine has stopped: start a new one")
        entry = self._requests.add(request, mailbox, slots)
        self._arrivals.put_nowait(entry)
        self._wake()
        return entry

    def abort(self, entry: Entry) -> None:
        """End it with ABORT deltas; nothing happens if it has ended."""
        self._requests.abort(entry)

    def pause(self, entry: Entry) -> None:
        """Compute no more of it until `resume`; nothing happens if it has ended."""
        self._requests.pause(entry)

    def resume(self, entry: Entry) -> None:
        """Go on with it; nothing happens if it has ended or is not paused."""
        self._requests.resume(entry)

    def announce(self, entry: Entry) -> None:
        """Call its subscriber soon."""
        self._requests.list_news(entry)
        if self._stopped:
            self._call_last_subscribers()
        else:
            self._wake()

    def fail_all(self, error: StreamkvError) -> None:
        """End every request with an error; the loop goes on."""
        for entry in self._requests:
            self._requests.fail(entry, error)

    def check_queue(self, num_choices: int, limit: int) -> None:
        """Raise OverloadedError if more than `limit` choices would wait. An empty queue takes any
        number, so that no request is refused for ever; no choices always have a place."""
        if num_choices == 0 or self.num_waiting + num_choices <= limit:
            return
        if self._turn_due:
            self._turn()  # what came in this loop iteration may have a place already
        num_waiting = self.num_waiting
        if num_waiting and num_waiting + num_choices > limit:
            # A guess, for want of a better one: all that run now are done in a second.
            rounds = math.ceil(num_waiting / max(self.scheduler.num_running, 1))
            raise OverloadedError(
                f"the queue is full: {num_waiting} are waiting, at most {limit} may; try again",
                retry_after_s=min(rounds, MAX_RETRY_AFTER_S),
            )

    async def settle(self, limit_s: float) -> None:
        """End every request with ABORT, and give blocks that are to be kept so long to get to the
        store. Nothing may be added any more."""
        if self._store is None or self._stopped or self._loop is not asyncio.get_running_loop():
            return  # nothing to keep, or nobody who could: `stop` ends them
        for entry in self._requests:
            self._requests.abort(entry)
        self._at_rest.clear()
        self._wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._at_rest.wait()

    def stop(self) -> None:
        """End every request with ABORT; no step is sent, no output taken any more. Idempotent."""
        self._stop()
        self._requests.end_all(None)
        self._call_last_subscribers()

    def stats(self) -> EngineStats:
        """Counters, and gauges of this moment; the gauges are zero once it has stopped."""
        if not self._stopped:  # nobody may have had a turn since sessions expired
            self.scheduler.advance_clock(time.monotonic())
        stats = read_stats(
            self.scheduler,
            (sequence for entry in self._requests for sequence in entry.sequences),
            num_arriving=self._requests.num_arriving,
            num_host_slots=self._num_host_slots,
            prompt_tokens_total=self._requests.prompt_tokens_total,
            generation_tokens_total=self._requests.generation_tokens_total,
            request_success_total={str(k): num for k, num in self._requests.ended_total.items()},
        )
        return stats.counters() if self._stopped else stats

    # --- the turn --------------------------------------------------------------------------

    def on_output(self, output: StepOutput) -> None:
        """A step has ended: commit it, keep the device fed, then hand out the tokens."""
        if not self._stopped:
            self._turn(output)

    def _wake(self) -> None:
        """Have a turn in this loop iteration: whatever else arrives in it shares the step."""
        if self._loop.is_closed():  # a reader leaves after the end: nothing will ever run again
            return
        if not self._turn_due and not self._stopped:
            self._turn_due = True
            self._loop.call_soon(self._wake_turn)

    def _wake_turn(self) -> None:
        self._turn_due = False
        self._turn()

    def _post_store_result(self, result: StoreResult) -> None:
        """On the store's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._on_store_result, result)

    def _on_store_result(self, result: StoreResult) -> None:
        self._store_results.append(result)
        self._wake()

    def _turn(self, output: StepOutput | None = None) -> None:
        if self._stopped:
            return
        try:
            self.scheduler.advance_clock(time.monotonic())
            events = [] if output is None else self._commit(output)
            if self._bindings is not None:
                self._bindings.take_news(self._requests.end_bound)
            self._take_store_results()
            self._drain_arrivals()
            if self._bindings is not None:
                events += self.scheduler.take_forced(FORCED_PER_TURN)
                self._bindings.tell(events)
            self._feed()
            self._requests.fan_out(events, output.error if output is not None else "")
            if self.scheduler.has_answers:
                self._fan_out_answers(is_woken=output is None)
            self._requests.call_subscribers()
            if self._bindings is not None:
                self._bindings.give_back(-1)
                if self.scheduler.has_forced:
                    self._wake()
            self._settle()
        except Exception as exc:
            logger.exception("the engine loop failed")
            self.die(EngineDeadError(f"the engine has stopped: {type(exc).__name__}: {exc}"))

    def _commit(self, output: StepOutput) -> list[TokenEvent]:
        self._num_failed_steps = self._num_failed_steps + 1 if output.error else 0
        if output.error:
            logger.error("step %d failed on the device: %s", output.step_id, output.error)
        if output.failed:  # those rows' own failure: the device works
            num_failed = len(unpack_ints(output.failed))
            logger.error("step %d: logits of %d rows: %s", output.step_id, num_failed, NOT_FINITE)
        events = self.scheduler.commit(output)
        if self._bindings is not None:
            if output.deferred:
                self._bindings.note_gated()
            self._bindings.give_back(output.step_id)
        self._requests.fan_out_prompts(self.scheduler.take_prompt_events())
        return events

    def _take_store_results(self) -> None:
        results, self._store_results = self._store_results, []
        for result in results:
            self.scheduler.on_store_result(result)

    def _drain_arrivals(self) -> None:
        """Hand what has arrived to the scheduler, except what was aborted meanwhile."""
        while not self._arrivals.empty():
            entry = self._arrivals.get_nowait()
            if self._requests.enter(entry):
                if self._bindings is not None and entry.slots:
                    self._bindings.begin(entry)

    def _feed(self) -> None:
        """Send steps until depth + 1 are in flight or nothing can be scheduled, and what that asks
        of the store."""
        scheduler = self.scheduler
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            return
        while scheduler.num_in_flight_steps <= self._depth:
            scheduled = scheduler.schedule()
            if scheduled is None:
                break
            self._submit(scheduled.step)
        if self._store is not None:
            for op in scheduler.take_store_ops():
                self._store.submit(op)

    def _fan_out_answers(self, *, is_woken: bool) -> None:
        """Some tokens of beams, and others run before the next: steps may end several times in a
        loop iteration, it wakes itself once."""
        if is_woken:
            self._requests.fan_out(self.scheduler.take_answers(ANSWERS_PER_TURN), "")
        if self.scheduler.has_answers:
            self._wake()

    def _settle(self) -> None:
        """After a turn: die of a broken device, or rest if nothing is left to do."""
        scheduler = self.scheduler
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            num_failed = self._num_failed_steps
            self.die(EngineDeadError(f"the engine has stopped: {num_failed} steps failed in a row"))
        elif scheduler.num_in_flight_steps == 0:
            self._feed()  # what stop strings gave back may let others start
            if scheduler.num_in_flight_steps > 0 or scheduler.is_busy or scheduler.has_answers:
                return
            num_live = self._requests.num_live
            if scheduler.num_running or scheduler.num_waiting or num_live:
                raise RuntimeError(
                    f"nothing can be scheduled, yet {scheduler.num_running} sequences are running, "
                    f"{scheduler.num_waiting} waiting, and {num_live} requests not ended"
                )
            scheduler.check_at_rest()
            self._at_rest.set()

    # --- the ends --------------------------------------------------------------------------

    def die(self, error: EngineDeadError) -> None:
        """End every request with the error, and tell `on_dead`. Nothing happens once stopped."""
        if not self._stopped:
            self._stop()
            self._requests.end_all(error)
            self._call_last_subscribers()
            self._on_dead(error)

    def _stop(self) -> None:
        self._stopped = True
        self._at_rest.set()
        if self._bindings is not None:
            self._bindings.matchers.stop()

    def _call_last_subscribers(self) -> None:
        """There are no turns any more."""
        if not self._loop.is_closed():
            self._loop.call_soon(self._requests.call_subscribers)
