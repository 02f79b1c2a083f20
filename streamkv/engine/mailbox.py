"""The place where the engine leaves one request's output and its reader picks it up.

Owns the request's choices, the order in which they have something new, and the reader's wake-up.
Where more are computed than are given (`best_of`), it gives the most likely once all have ended;
where a beam search finds fewer answers than choices, these are all. It must not know the scheduler
or the device. Used on the event-loop thread only, so it has no locks.

A reader waits (`wait`), or is called (`subscriber`): the engine does that once at the end of a turn
in which there was something to push.

Invariant: bounded by construction. Each choice has one slot in which deltas merge while the reader
is slow, and the queue holds each choice at most once; a slow reader costs its own tokens' memory
and never makes the engine wait. Nor does one that catches up: log-probabilities are described when
they are taken, and after LOGPROBS_PER_TURN of them the reader lets the event loop run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import GenerationError, StreamkvError
from ..protocol import FinishReason, RowLogprobs, SamplingParams
from .choice_output import ChoiceOutput
from .outputs import SoFar, TokenDelta
from .prompt_output import PromptOutput

LOGPROBS_PER_TURN = 64  # each with up to 20 others beside it: about a millisecond

if TYPE_CHECKING:
    from ..core.scheduler import TokenEvent
    from ..text.tokenizer import Tokenizer


class Mailbox:
    """One request's output: the engine pushes, the reader takes."""

    def __init__(
        self,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        wants_progress: bool = False,
    ) -> None:
        num_choices = sampling.n if sampling.use_beam_search else sampling.num_sequences
        after = prompt_token_ids[-1] if prompt_token_ids else None
        self.choices = tuple(
            ChoiceOutput(i, sampling, tokenizer, after=after) for i in range(num_choices)
        )
        self.prompt = PromptOutput(
            prompt_token_ids, sampling, tokenizer, wants_progress=wants_progress
        )
        self.error: StreamkvError | None = None
        self.num_cached_tokens = 0
        self.first_token_s: float | None = None
        self.finish_s: float | None = None
        self.subscriber: Callable[[], None] | None = None
        self.is_listed = False  # among those whose subscribers are to be called
        self._knows_prompt = False  # a step gave the first choice a token
        self._num_unfinished = num_choices
        self._num_best = sampling.n if sampling.n < num_choices else None  # to be given at the end
        self._ready: deque[ChoiceOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_all = False  # the waiter, for the end
        self.num_taken_logprobs = 0  # since the loop has run

    @property
    def done(self) -> bool:
        """Whether nothing more will be pushed (the reader may still have deltas to take)."""
        return self._num_unfinished == 0 or self.error is not None

    @property
    def has_delta(self) -> bool:
        """`take` would give one."""
        return bool(self._ready) or self.prompt.has_news

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    # --- the engine's side -------------------------------------------------------------------

    def push(self, event: TokenEvent) -> FinishReason | None:
        """Take one token; return how its choice ended, if it did (a stop string included)."""
        output = self.choices[event[0].choice]
        output.push(event)
        if not self._knows_prompt:
            self._note_prompt(event)
        if output.finish_reason is not None or self._num_best is not None:
            self._announce(output)
        elif not output.queued:
            output.queued = True
            self._ready.append(output)
        if self._waiter is not None:
            self._wake()
        return output.finish_reason

    def push_prompt(
        self, num_computed_tokens: int, num_cached_tokens: int, scores: Sequence[RowLogprobs]
    ) -> None:
        """A chunk of the prompt is computed, behind what was found in the cache."""
        self.num_cached_tokens = num_cached_tokens
        self.prompt.push(num_computed_tokens, scores)
        self._wake()

    def leave_out(self, choice: int) -> None:
        """A beam search has no answer for this choice, nor for any after it: those before it, which
        have ended, are all."""
        self._count_ends(len(self.choices) - choice)
        self.choices = self.choices[:choice]
        self._wake()

    def finish(self, reason: FinishReason) -> None:
        """End each choice that has not ended yet, with what it has."""
        for output in self.choices:
            self.finish_choice(output, reason)

    def finish_choice(self, output: ChoiceOutput, reason: FinishReason) -> None:
        """End it, if it has not ended yet, with what it has."""
        if output.finish_reason is None:
            output.finish(reason)
            self._announce(output)
            self._wake()

    def fail(self, error: StreamkvError) -> None:
        """The reader gets what is there, then `error`; nothing happens if all is done."""
        if not self.done:
            self.error = error
            self.finish_s = time.monotonic()
            self._wake()

    # --- the reader's side -------------------------------------------------------------------

    def take(self) -> TokenDelta | None:
        """The next delta, of the choice that has waited longest; None when there is none now. What
        is told of the prompt comes before all else.

        If the tokens can't be described there is nothing more to take, and `error` says so.
        """
        if self.prompt.has_news:
            delta = self.prompt.take()
            self.num_taken_logprobs += len(delta.prompt_logprobs) if delta is not None else 0
            return delta
        if not self._ready:
            return None
        output = self._ready.popleft()
        output.queued = False
        try:
            delta = output.take()
        except Exception as exc:  # as in EngineLoop: the fault of one request, told to its reader
            self._ready.clear()
            self.error = GenerationError(
                f"making text of the tokens failed: {type(exc).__name__}: {exc}"
            )
            return None
        if delta.logprobs:
            self.num_taken_logprobs += len(delta.logprobs)
            if output.has_more:
                output.queued = True
                self._ready.append(output)
        return delta

    async def pause(self) -> None:
        """Let the event loop run if much was taken since it has."""
        if self.num_taken_logprobs >= LOGPROBS_PER_TURN:
            self.num_taken_logprobs = 0
            await asyncio.sleep(0)

    async def wait(self, *, for_all: bool = False) -> None:
        """Until there is something to take, or all is done; `for_all`: until all is done, with one
        wake-up however many tokens come. One reader at a time."""
        if self._waiter is not None:
            raise RuntimeError("expected one reader per stream, got a second task in __anext__")
        if self.done or (self.has_delta and not for_all):
            return
        self._waits_for_all = for_all
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def so_far(self) -> list[SoFar]:
        """Of each choice that is given, all that came, taken or not."""
        return [output.so_far() for output in self._given]

    # --- between them ------------------------------------------------------------------------

    def _note_prompt(self, event: TokenEvent) -> None:
        """What a token says of the prompt. One that a grammar forces may come before anything was
        computed."""
        sequence = event.sequence
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
        if sequence.has_sampled:
            self.prompt.complete()
        if sequence.choice == 0:  # the others may find what it has computed
            self.num_cached_tokens = sequence.num_cached_tokens or 0
            self._knows_prompt = sequence.has_sampled

    def _announce(self, output: ChoiceOutput) -> None:
        if output.finish_reason is not None:
            self._count_ends(1)
        if self._num_best is None:
            self._offer(output)
        elif self._num_unfinished == 0:
            for choice, best in enumerate(self._given):
                best.choice = choice
                self._offer(best)

    @property
    def _given(self) -> Sequence[ChoiceOutput]:
        """Of `best_of` the best, once all have ended."""
        if self._num_best is None:
            return self.choices
        if self._num_unfinished:
            return ()
        return sorted(self.choices, key=_rank)[: self._num_best]

    def _count_ends(self, num: int) -> None:
        self._num_unfinished -= num
        if self._num_unfinished == 0:
            self.finish_s = time.monotonic()

    def _offer(self, output: ChoiceOutput) -> None:
        """It has something to take."""
        if not output.queued:
            output.queued = True
            self._ready.append(output)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None or (not self.done and (self._waits_for_all or not self.has_delta)):
            return
        # A reader that was left behind by a loop that is closed can't be woken. One that asyncio's
        # handler of Ctrl+C cancels, which may run between any two lines, is awake already.
        if not waiter.done() and not waiter.get_loop().is_closed():
            with suppress(asyncio.InvalidStateError):
                waiter.set_result(None)


def _rank(output: ChoiceOutput) -> tuple[bool, float]:
    """Lower is better: what has ended by itself, then what is more likely."""
    logprob = output.cumulative_logprob
    is_cut = output.finish_reason is FinishReason.ABORT
    return is_cut, math.inf if logprob is None else -logprob
