"""Requests: all that have not ended, and what their readers get.

Owns each one's Entry from arrival to end, the ends in all their forms, and who of their readers is
to be called. It must not know steps, the device or the store. Event-loop thread only.

Invariant: every request that was added gets its terminal deltas or one error, and its sequences are
given back to the scheduler; what a reader does ends its own request at most.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from ..core.scheduler import NO_TOKEN, PromptEvent, Scheduler, TokenEvent
from ..core.sequence import Sequence
from ..errors import GenerationError, InvalidRequestError, StreamkvError
from ..protocol import FinishReason, Request
from .bindings import Bindings
from .entry import Entry
from .mailbox import Mailbox
from .matcher_slot import Slot

logger = logging.getLogger(__name__)

NOT_FINITE = "not finite numbers; the model's weights may be broken"


class Requests:
    """Of one engine loop."""

    def __init__(
        self, scheduler: Scheduler, bindings: Bindings | None, wake: Callable[[], None]
    ) -> None:
        """`wake` is called when the loop must have a turn."""
        self.num_arriving = 0  # sequences that the scheduler doesn't know yet
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self.ended_total = dict.fromkeys(FinishReason, 0)  # choices
        self._scheduler = scheduler
        self._bindings = bindings
        self._wake = wake
        self._entries: dict[str, Entry] = {}
        self._with_news: list[Entry] = []  # whose subscribers are to be called

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    @property
    def num_live(self) -> int:
        """Those that are paused don't count."""
        return sum(not entry.is_paused for entry in self._entries.values())

    def _has(self, entry: Entry) -> bool:
        """Whether it has not ended."""
        return self._entries.get(entry.request.request_id) is entry

    # --- from arrival to end ---------------------------------------------------------------

    def add(self, request: Request, mailbox: Mailbox, slots: tuple[Slot, ...]) -> Entry:
        """InvalidRequestError for the id of another one."""
        if request.request_id in self._entries:
            raise InvalidRequestError(
                f"request_id: expected one that is not in use, got {request.request_id!r}",
                param="request_id",
            )
        entry = Entry(request, mailbox, slots)
        self._entries[request.request_id] = entry
        self.prompt_tokens_total += len(request.prompt_token_ids)
        self.num_arriving += request.sampling.num_sequences
        return entry

    def enter(self, entry: Entry) -> bool:
        """Hand it to the scheduler. False: it has ended."""
        request = entry.request
        if not self._has(entry):
            return False
        self.num_arriving -= request.sampling.num_sequences
        entry.sequences.extend(self._scheduler.add(request))
        if entry.is_paused:
            self._scheduler.pause(entry.sequences[0])
        return True

    def pause(self, entry: Entry) -> None:
        """Compute no more of it until `resume`; nothing happens if it has ended."""
        if self._has(entry) and not entry.is_paused:
            entry.is_paused = True
            if entry.sequences:
                self._scheduler.pause(entry.sequences[0])  # the others with it
            self._wake()

    def resume(self, entry: Entry) -> None:
        """Go on with it; nothing happens if it has ended or is not paused."""
        if self._has(entry) and entry.is_paused:
            entry.is_paused = False
            if entry.sequences:
                self._scheduler.resume(entry.sequences[0])
            self._wake()

    def abort(self, entry: Entry) -> None:
        """End it with ABORT deltas; nothing happens if it has ended."""
        if self._has(entry):
            self._release(entry, FinishReason.ABORT)
            entry.mailbox.finish(FinishReason.ABORT)
            self._forget(entry)

    def fail(self, entry: Entry, error: StreamkvError) -> None:
        """End it with an error."""
        self._release(entry, FinishReason.ERROR)
        entry.mailbox.fail(error)
        self._forget(entry)

    def end_all(self, error: StreamkvError | None) -> None:
        """With an error, or ABORT deltas. The scheduler and the device are done with."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        for entry in self._entries.values():
            self._count_unfinished(entry, reason)
            if error is None:
                entry.mailbox.finish(reason)
            else:
                entry.mailbox.fail(error)
            self.list_news(entry)
        self._entries.clear()

    def end_bound(self, sequence: Sequence, failure: str) -> None:
        """Its grammar leaves nothing, and the model has no token that ends an answer; or it can't
        be followed any further."""
        entry = self._entries[sequence.request.request_id]
        if failure:
            structured = entry.request.sampling.structured_outputs
            kind = "grammar" if structured is None else structured.kind
            message = f"the answer can't follow its {kind} any further: {failure}"
            logger.warning("%s: %s", sequence.request.request_id, message)
            self.fail(entry, GenerationError(message))
            return
        self._end(sequence, FinishReason.STOP)
        entry.mailbox.finish_choice(entry.mailbox.choices[sequence.choice], FinishReason.STOP)
        self.ended_total[FinishReason.STOP] += 1
        if entry.mailbox.done:
            self._forget(entry)
        else:
            self.list_news(entry)

    def _release(self, entry: Entry, reason: FinishReason) -> None:
        """Give the sequences that have not ended back to the scheduler."""
        self._count_unfinished(entry, reason)
        if not entry.sequences:  # still in the queue: the scheduler has not seen it
            self.num_arriving -= entry.request.sampling.num_sequences
        for sequence in entry.sequences:
            self._scheduler.finish(sequence, reason)
        self._wake()

    def _count_unfinished(self, entry: Entry, reason: FinishReason) -> None:
        self.ended_total[reason] += sum(
            output.finish_reason is None for output in entry.mailbox.choices
        )

    def _forget(self, entry: Entry) -> None:
        request = entry.request
        del self._entries[request.request_id]
        self.list_news(entry)  # whoever ends it has a turn, or is in one
        if self._bindings is not None:
            self._bindings.leave(entry)
        logger.debug(
            "request %s ended: %d prompt tokens (%d cached), %d generated, %.3f s, %s",
            request.request_id,
            len(request.prompt_token_ids),
            entry.mailbox.num_cached_tokens,
            entry.mailbox.num_generated_tokens,
            time.monotonic() - request.arrival_s,
            [str(output.finish_reason) for output in entry.mailbox.choices],
        )

    # --- to the readers --------------------------------------------------------------------

    def fan_out(self, events: list[TokenEvent], step_error: str) -> None:
        entries, with_news = self._entries, self._with_news
        for event in events:
            entry = entries.get(event[0].request.request_id)
            if entry is None:
                continue  # its request ended earlier in this step
            mailbox = entry.mailbox
            if event[1] == NO_TOKEN:
                self._fan_out_end(entry, event, step_error)
                continue
            if mailbox.choices[event[0].choice].finish_reason is not None:
                continue  # a stop string was in the text of the tokens before
            try:
                reason = mailbox.push(event)
            except Exception as exc:  # text of one request: the others go on
                logger.exception("request %s: making text failed", entry.request.request_id)
                message = f"making text of the tokens failed: {type(exc).__name__}: {exc}"
                self.fail(entry, GenerationError(message))
                continue
            self.generation_tokens_total += 1
            if reason is not None:
                self._note_end(entry, event, reason)
            elif mailbox.subscriber is not None and not mailbox.is_listed:
                mailbox.is_listed = True
                with_news.append(entry)

    def _fan_out_end(self, entry: Entry, event: TokenEvent, step_error: str) -> None:
        """It ends without a token."""
        if event.finish_reason is FinishReason.ERROR:
            reason = step_error or f"the logits were {NOT_FINITE}"
            self.fail(entry, GenerationError(f"generation failed on the device: {reason}"))
            return
        entry.mailbox.leave_out(event.sequence.choice)
        self._scheduler.finish(event.sequence, FinishReason.STOP)  # nor for those behind it
        self._forget(entry)

    def _note_end(self, entry: Entry, event: TokenEvent, reason: FinishReason) -> None:
        """A choice has ended with this token."""
        self.ended_total[reason] += 1
        if event.finish_reason is None:  # a stop string: only the text knew
            self._end(event.sequence, reason)
        if entry.mailbox.done:
            self._forget(entry)
        else:
            self.list_news(entry)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """From outside the scheduler."""
        self._scheduler.finish(sequence, reason)
        if self._bindings is not None:
            self._bindings.end(sequence)

    def list_news(self, entry: Entry) -> None:
        """Its subscriber, if it has one, is to be called at the end of the turn."""
        if not entry.mailbox.is_listed:
            entry.mailbox.is_listed = True
            self._with_news.append(entry)

    def call_subscribers(self) -> None:
        """Each once, whose mailbox has something; what they do may be news for others."""
        entries, self._with_news = self._with_news, []
        for entry in entries:
            mailbox = entry.mailbox
            mailbox.is_listed = False
            if mailbox.subscriber is None or not (mailbox.has_delta or mailbox.done):
                continue
            mailbox.num_taken_logprobs = 0
            try:
                mailbox.subscriber()
            except Exception as exc:  # a reader's fault ends what it reads
                logger.exception("request %s: its reader failed", entry.request.request_id)
                mailbox.subscriber = None
                if self._has(entry):
                    message = f"reading the tokens failed: {type(exc).__name__}: {exc}"
                    self.fail(entry, GenerationError(message))

    def fan_out_prompts(self, events: Iterable[PromptEvent]) -> None:
        for sequence, num_computed_tokens, scores in events:
            entry = self._entries.get(sequence.request.request_id)
            if entry is not None:
                num_cached = sequence.num_cached_tokens or 0
                entry.mailbox.push_prompt(num_computed_tokens, num_cached, scores)
                self.list_news(entry)
