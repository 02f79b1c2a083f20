"""TokenStream: one request as its reader sees it.

Owns the request's life from the reader's side: entering the context admits it, leaving early
aborts it. It must not know how tokens are made. Used on the event-loop thread only. Who reads many
streams subscribes to them, and takes what there is when called; others iterate.

Invariant: exactly one terminal delta per choice (of which a beam search may have fewer than `n`),
then the iteration ends; or the stream raises one error. Whatever way the reader goes (break,
exception, cancelled task), the request is over once the context is left.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NamedTuple

import msgspec

from ..errors import StreamkvError
from ..protocol import SamplingParams
from .mailbox import LOGPROBS_PER_TURN, Mailbox
from .outputs import Completion, SoFar, TokenDelta, TokenLogprob, TopLogprob, Usage

__all__ = [
    "Completion",
    "SoFar",
    "TokenDelta",
    "TokenLogprob",
    "TokenStream",
    "TopLogprob",
    "Usage",
]


class Admission(NamedTuple):
    """What the engine hands over when it takes a request in."""

    prompt_token_ids: tuple[int, ...]
    mailbox: Mailbox
    abort: Callable[[], None]
    pause: Callable[[], None]  # compute no more of it until `resume`
    resume: Callable[[], None]
    announce: Callable[[], None]  # have the subscriber called soon
    leave: Callable[[], None]  # nobody reads any more


class TokenStream:
    """An async context manager and iterator over one request's deltas; usable once.

        async with engine.generate("Once upon a time") as stream:
            async for delta in stream:
                print(delta.text, end="")

    Entering raises InvalidRequestError, ContextLengthError, CapacityError, UnknownModelError,
    OverloadedError, EngineNotReadyError or EngineDeadError; iterating raises GenerationError or
    EngineDeadError. Deltas of one choice are merged while the reader is slow.
    """

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        prompt: object,
        sampling: SamplingParams,
        priority: int,
        cache_salt: str,
        session_id: str,
        session_ttl_s: float | None,
        queue_places: int | None,
        wants_progress: bool,
        admit: Callable[[TokenStream], Awaitable[Admission]],
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.prompt = prompt
        self.sampling = sampling
        self.priority = priority
        self.cache_salt = cache_salt
        self.session_id = session_id
        self.session_ttl_s = session_ttl_s
        self.queue_places = sampling.num_sequences if queue_places is None else queue_places
        self.wants_progress = wants_progress
        self.arrival_s: float | None = None  # monotonic; None before the context is entered
        self.cancelled = False
        self._admit: Callable[[TokenStream], Awaitable[Admission]] | None = admit
        self._admission: Admission | None = None
        self._mailbox: Mailbox | None = None  # while the context is open

    async def __aenter__(self) -> TokenStream:
        """Admit the request."""
        if self._admit is None:
            raise RuntimeError("a TokenStream is used once: call generate() for another one")
        admit, self._admit = self._admit, None
        self.arrival_s = time.monotonic()
        self._admission = await admit(self)
        self._mailbox = self._admission.mailbox
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abort what has not finished."""
        self._mailbox = None
        self.cancel()
        if self._admission is not None:
            self._admission.mailbox.subscriber = None
            self._admission.leave()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenDelta:
        """The next delta, without awaiting when one is ready (but after many log-probabilities)."""
        mailbox = self._open_mailbox()
        await mailbox.pause()
        while True:
            delta = mailbox.take()
            if delta is not None:
                return delta
            if mailbox.error is not None:
                raise mailbox.error
            if mailbox.done:
                raise StopAsyncIteration
            await mailbox.wait()

    async def collect(
        self, take_logprobs: Callable[[TokenDelta], None] | None = None
    ) -> list[Completion]:
        """All choices, complete; enters the context itself if that has not been done.

        Deltas already taken by iterating are not repeated. Log-probabilities are large: who wants
        them in another form can have each delta as it comes by `take_logprobs`, and the
        completions have none.
        """
        if self._admission is not None:
            return await self._collect(take_logprobs)
        async with self:
            return await self._collect(take_logprobs)

    def cancel(self) -> None:
        """End the request now: each unfinished choice ends with an ABORT delta. Idempotent.

        Before the context is entered it makes entering end the request at once.
        """
        self.cancelled = True
        if self._admission is not None:
            self._admission.abort()

    def pause(self) -> None:
        """Compute no more of it until `resume`: its row and blocks are given back, cached. Nothing
        happens before the context is entered, and once the request has ended."""
        if self._admission is not None:
            self._admission.pause()

    def resume(self) -> None:
        """Go on with it. Nothing happens if it isn't paused, or has ended."""
        if self._admission is not None:
            self._admission.resume()

    # --- reading without waiting -------------------------------------------------------------

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have it called, instead of iterating: on the event loop, at most once a turn of the
        engine, when there is something to `take`, or it is `done`; also soon if there already is.

        An exception of it ends this request only, with a GenerationError that nobody is told.
        """
        mailbox = self._open_mailbox()
        mailbox.subscriber = callback
        if mailbox.has_delta or mailbox.done:
            self._announce()

    def take(self) -> TokenDelta | None:
        """The next delta, if there is one now. After many log-probabilities a subscriber gets None
        though there are more, and is called again soon."""
        mailbox = self._mailbox
        if mailbox is None:
            raise self._misuse()
        if mailbox.num_taken_logprobs >= LOGPROBS_PER_TURN and mailbox.subscriber is not None:
            self._announce()
            return None
        return mailbox.take()

    @property
    def done(self) -> bool:
        """Nothing more will come, and all was taken."""
        mailbox = self._open_mailbox()
        return mailbox.done and not mailbox.has_delta

    @property
    def error(self) -> StreamkvError | None:
        """Why there is no more, once all was taken; None if it ended as it should."""
        mailbox = self._open_mailbox()
        return None if mailbox.has_delta else mailbox.error

    def so_far(self) -> list[SoFar]:
        """All choices as they stand, with what waits to be taken; empty before the context is
        entered."""
        return [] if self._admission is None else self._admission.mailbox.so_far()

    # --- facts -------------------------------------------------------------------------------

    @property
    def progress(self) -> tuple[int, int]:
        """Tokens of the prompt that are computed, as far as is known, and all of them."""
        if self._admission is None:
            return (0, 0)
        prompt = self._admission.mailbox.prompt
        return prompt.num_computed, len(prompt.token_ids)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """Of each token of the prompt, None of the first, where `prompt_logprobs` asked for them;
        () until the prompt is computed. Describes them all: long prompts are better read in parts.
        """
        num_tokens = len(self.prompt_token_ids)
        if self._admission is None or self._admission.mailbox.prompt.num_known < num_tokens:
            return ()
        return self.describe_prompt(0, num_tokens)

    def describe_prompt(self, start: int, stop: int) -> tuple[TokenLogprob | None, ...]:
        """A part of `prompt_logprobs`, as far as it is computed: up to 20 us for each."""
        if self._admission is None or self.sampling.prompt_logprobs is None:
            return ()
        return self._admission.mailbox.prompt.describe(start, stop)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt; empty before the context is entered."""
        return self._admission.prompt_token_ids if self._admission is not None else ()

    @property
    def usage(self) -> Usage:
        """Token counts so far; zeros before the context is entered."""
        if self._admission is None:
            return Usage(0, 0, 0)
        mailbox = self._admission.mailbox
        return Usage(
            len(self.prompt_token_ids), mailbox.num_cached_tokens, mailbox.num_generated_tokens
        )

    @property
    def first_token_s(self) -> float | None:
        """When the first token came (monotonic); one that a grammar forces may come before the
        prompt is computed."""
        return self._admission.mailbox.first_token_s if self._admission is not None else None

    @property
    def finish_s(self) -> float | None:
        """When the last choice ended (monotonic)."""
        return self._admission.mailbox.finish_s if self._admission is not None else None

    def _open_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            raise self._misuse()
        return self._mailbox

    def _misuse(self) -> RuntimeError:
        if self._admission is None:
            return RuntimeError("expected `async with stream:` around the iteration, got none")
        return RuntimeError("the stream's context was left: read inside `async with stream:`")

    def _announce(self) -> None:
        """Have the subscriber called soon."""
        if self._admission is not None:
            self._admission.announce()

    async def _collect(
        self, take_logprobs: Callable[[TokenDelta], None] | None
    ) -> list[Completion]:
        mailbox = self._open_mailbox()
        if take_logprobs is None or self.sampling.logprobs is None:  # nothing is wanted before
            await mailbox.wait(for_all=True)
        if take_logprobs is None:
            mailbox.prompt.skip_scores()  # `prompt_logprobs` has them
        parts: list[list[TokenDelta]] = [[] for _ in range(self.sampling.n)]
        async for delta in self:
            if take_logprobs is not None and (delta.logprobs or delta.prompt_logprobs):
                take_logprobs(delta)
                delta = msgspec.structs.replace(delta, logprobs=(), prompt_logprobs=())
            parts[delta.choice].append(delta)
        return [_join(deltas) for deltas in parts if deltas]


def _join(deltas: list[TokenDelta]) -> Completion:
    """One choice's deltas as a whole; the last of them is terminal."""
    last = deltas[-1]
    assert last.finish_reason is not None, "the iteration ended before a terminal delta"
    return Completion(
        last.choice,
        "".join(delta.text for delta in deltas),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
        last.finish_reason,
        last.stop_reason,
        last.cumulative_logprob,
    )
