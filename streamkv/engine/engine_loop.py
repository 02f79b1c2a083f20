"""One model's loop between its scheduler, its device and the readers of its streams.

Owns the Scheduler and the Mailbox of every request that has not ended, and carries what the store
is to do there, and its results back. It must not know sockets, prompts as text, or what device and
store are. Everything here runs on the event-loop thread, in plain callbacks: there is no task that
a caller could cancel by accident, no lock, and while nothing is to be done, no wake-up.

A turn takes in what has happened, feeds the device first and tells the readers after (of a beam
search, which has all its tokens at the end, some in each of several turns):

    on_output ─► commit ─► drain the queue ─► schedule, submit ─► text, stop strings, mailboxes
    add ─► asyncio.Queue ────────▲       │    (nothing left to do? the books are checked)
    store's result ──────────────▲       └─► store

What arrives in one iteration of the event loop shares a turn, and so a step. An abort takes
effect at once: its blocks are free when the last step that names them is committed. A step may have
copies and no tokens, when blocks are loaded or kept while nothing else is to be done.

Invariants: at most depth + 1 steps are in flight; whenever there is something to run and room for
a step, a step is in flight, a turn is due, or the store does something that ends in one: nothing
waits for ever; every request that was added gets its terminal deltas or one error. Whether
the scheduler has got everything back is checked when the last request has ended, so that books
that are wrong end the engine instead of changing somebody's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from ..core.scheduler import NO_TOKEN, Scheduler, TokenEvent
from ..core.sequence import Sequence
from ..errors import (
    EngineDeadError,
    GenerationError,
    InvalidRequestError,
    OverloadedError,
    StreamkvError,
)
from ..protocol import (
    BlockStore,
    FinishReason,
    Request,
    StepInput,
    StepOutput,
    StoreResult,
    unpack_ints,
)
from .mailbox import Mailbox
from .stats import EngineStats, read_stats

logger = logging.getLogger(__name__)

ANSWERS_PER_TURN = 500  # tokens of beams: 3 ms
MAX_FAILED_STEPS = 3  # in a row; then the device is taken for broken
NOT_FINITE = "not finite numbers; the model's weights may be broken"
MAX_RETRY_AFTER_S = 60


class Entry(NamedTuple):
    """A request that has not ended."""

    request: Request
    sequences: list[Sequence]  # empty until it leaves the queue
    mailbox: Mailbox


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
    ) -> None:
        """`depth` steps may wait behind the running one; `on_dead` is called once, if ever. What
        is in the `store` can be found from now on."""
        self.scheduler = scheduler
        self._num_host_slots = num_host_slots
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._ended_total = dict.fromkeys(FinishReason, 0)  # choices
        self._submit = submit
        self._on_dead = on_dead
        self._depth = depth
        self._loop = asyncio.get_running_loop()
        self._entries: dict[str, Entry] = {}
        self._arrivals: asyncio.Queue[Entry] = asyncio.Queue()  # bounded by `check_queue`
        self._num_arriving = 0  # choices of the entries in it
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
        return self.scheduler.num_waiting + self._num_arriving

    def add(self, request: Request, mailbox: Mailbox) -> None:
        """Queue a checked request for the next turn. EngineDeadError; InvalidRequestError for the
        id of another one."""
        if self._stopped:
            raise EngineDeadError("the engine has stopped: start a new one")
        if request.request_id in self._entries:
            raise InvalidRequestError(
                f"request_id: expected one that is not in use, got {request.request_id!r}",
                param="request_id",
            )
        self._prompt_tokens_total += len(request.prompt_token_ids)
        entry = Entry(request, [], mailbox)
        self._entries[request.request_id] = entry
        self._arrivals.put_nowait(entry)
        self._num_arriving += request.sampling.num_sequences
        self._wake()

    def abort(self, request_id: str) -> None:
        """End a request with ABORT deltas; nothing happens if it is not known."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._release(entry, FinishReason.ABORT)
            entry.mailbox.finish(FinishReason.ABORT)
            self._forget(entry)

    def fail_all(self, error: StreamkvError) -> None:
        """End every request with an error; the loop goes on."""
        for entry in list(self._entries.values()):
            self._fail(entry, error)

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
        for request_id in list(self._entries):
            self.abort(request_id)
        self._at_rest.clear()
        self._wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._at_rest.wait()

    def stop(self) -> None:
        """End every request with ABORT; no step is sent, no output taken any more. Idempotent."""
        self._stopped = True
        self._at_rest.set()
        for entry in self._entries.values():
            self._count_unfinished(entry, FinishReason.ABORT)
            entry.mailbox.finish(FinishReason.ABORT)
        self._entries.clear()

    def stats(self) -> EngineStats:
        """Counters, and gauges of this moment; the gauges are zero once it has stopped."""
        if not self._stopped:  # nobody may have had a turn since sessions expired
            self.scheduler.advance_clock(time.monotonic())
        stats = read_stats(
            self.scheduler,
            (sequence for entry in self._entries.values() for sequence in entry.sequences),
            num_arriving=self._num_arriving,
            num_host_slots=self._num_host_slots,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            request_success_total={str(key): value for key, value in self._ended_total.items()},
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
            self._take_store_results()
            self._drain_arrivals()
            self._feed()
            self._fan_out(events, output.error if output is not None else "")
            if self.scheduler.has_answers:
                self._fan_out_answers(is_woken=output is None)
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
        return self.scheduler.commit(output)

    def _take_store_results(self) -> None:
        results, self._store_results = self._store_results, []
        for result in results:
            self.scheduler.on_store_result(result)

    def _drain_arrivals(self) -> None:
        """Hand what has arrived to the scheduler, except what was aborted meanwhile."""
        while not self._arrivals.empty():
            entry = self._arrivals.get_nowait()
            if self._entries.get(entry.request.request_id) is entry:
                self._num_arriving -= entry.request.sampling.num_sequences
                entry.sequences.extend(self.scheduler.add(entry.request))

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

    def _fan_out(self, events: list[TokenEvent], step_error: str) -> None:
        for event in events:
            entry = self._entries.get(event.sequence.request.request_id)
            if entry is None:
                continue  # its request ended earlier in this step
            if event.finish_reason is FinishReason.ERROR:
                reason = step_error or f"the logits were {NOT_FINITE}"
                message = f"generation failed on the device: {reason}"
                self._fail(entry, GenerationError(message))
            elif event.token_id == NO_TOKEN:
                entry.mailbox.leave_out(event.sequence.choice)
                self.scheduler.finish(event.sequence, FinishReason.STOP)  # nor for those behind it
                self._forget(entry)
            else:
                self._push(entry, event)

    def _fan_out_answers(self, *, is_woken: bool) -> None:
        """Some tokens of beams, and others run before the next: steps may end several times in a
        loop iteration, it wakes itself once."""
        if is_woken:
            self._fan_out(self.scheduler.take_answers(ANSWERS_PER_TURN), "")
        if self.scheduler.has_answers:
            self._wake()

    def _push(self, entry: Entry, event: TokenEvent) -> None:
        try:
            reason = entry.mailbox.push(event)
        except Exception as exc:  # text of one request: the others go on
            logger.exception("request %s: making text failed", entry.request.request_id)
            message = f"making text of the tokens failed: {type(exc).__name__}: {exc}"
            self._fail(entry, GenerationError(message))
            return
        self._generation_tokens_total += 1
        if reason is None:
            return
        self._ended_total[reason] += 1
        if event.finish_reason is None:  # a stop string: only the text knew
            self.scheduler.finish(event.sequence, reason)
        if entry.mailbox.done:
            self._forget(entry)

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
            if scheduler.num_running or scheduler.num_waiting or self._entries:
                raise RuntimeError(
                    f"nothing can be scheduled, yet {scheduler.num_running} sequences are running, "
                    f"{scheduler.num_waiting} waiting, and {len(self._entries)} requests not ended"
                )
            scheduler.check_at_rest()
            self._at_rest.set()

    # --- the ends --------------------------------------------------------------------------

    def _fail(self, entry: Entry, error: StreamkvError) -> None:
        self._release(entry, FinishReason.ERROR)
        entry.mailbox.fail(error)
        self._forget(entry)

    def _release(self, entry: Entry, reason: FinishReason) -> None:
        """Give the sequences that have not ended back to the scheduler."""
        self._count_unfinished(entry, reason)
        if not entry.sequences:  # still in the queue: the scheduler has not seen it
            self._num_arriving -= entry.request.sampling.num_sequences
        for sequence in entry.sequences:
            self.scheduler.finish(sequence, reason)
        self._wake()

    def _count_unfinished(self, entry: Entry, reason: FinishReason) -> None:
        self._ended_total[reason] += sum(
            output.finish_reason is None for output in entry.mailbox.choices
        )

    def _forget(self, entry: Entry) -> None:
        request = entry.request
        del self._entries[request.request_id]
        logger.debug(
            "request %s ended: %d prompt tokens (%d cached), %d generated, %.3f s, %s",
            request.request_id,
            len(request.prompt_token_ids),
            entry.mailbox.num_cached_tokens,
            entry.mailbox.num_generated_tokens,
            time.monotonic() - request.arrival_s,
            [str(output.finish_reason) for output in entry.mailbox.choices],
        )

    def die(self, error: EngineDeadError) -> None:
        """End every request with the error, and tell `on_dead`. Nothing happens once stopped."""
        if self._stopped:
            return
        self._stopped = True
        self._at_rest.set()
        for entry in self._entries.values():
            self._count_unfinished(entry, FinishReason.ERROR)
            entry.mailbox.fail(error)
        self._entries.clear()
        self._on_dead(error)
