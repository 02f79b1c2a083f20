"""Reception: from a stream that is entered to a request in the engine's loop.

Owns the order of the checks, what is done to a request in threads before it is taken in, and the
streams that were admitted and not left. It must not know HTTP, nor whether the engine may be used:
it is told. Event-loop thread only, but for `close`.

Invariant: a request is taken in whole or not at all; what was held for one that isn't, a grammar's
slots, is given back, also when its reader goes while it is checked.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from ..config import EngineConfig
from ..errors import InvalidRequestError
from ..protocol import Request, RunnerInfo, SamplingParams
from ..text.tokenizer import Tokenizer
from .admission import (
    bad_word_tokens,
    build_request,
    check_name,
    check_priority,
    check_prompt,
    check_session,
    num_kept_tokens,
)
from .encoding import Encoder
from .engine_loop import EngineLoop
from .grammars import GrammarCompilations
from .mailbox import Mailbox
from .matcher_slot import Slot
from .stream import Admission, TokenStream

FEW_CHARS = 512  # of bad words: more are tokenized in a thread
# An engine that has been idle for a moment prepares for grammars, so that the first answer that
# wants one doesn't hold up others.
WARM_UP_S = 3.0


class Reception:
    """Of an engine that is ready."""

    def __init__(
        self,
        config: EngineConfig,
        info: RunnerInfo,
        tokenizer: Tokenizer,
        encoder: Encoder,
        loop: EngineLoop,
        draw_seed: Callable[[], int],
        check_ready: Callable[[], None],
    ) -> None:
        """`check_ready` raises if the engine takes no more; it is asked after each wait."""
        self._config = config
        self._info = info
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._loop = loop
        self._draw_seed = draw_seed
        self._check_ready = check_ready
        self._streams: dict[str, TokenStream] = {}  # admitted and not left
        self._grammars: GrammarCompilations | None = None
        if loop.matchers is not None:
            self._grammars = GrammarCompilations(
                tokenizer, info.vocab_size, loop.matchers, check_ready
            )
        self._warm_up_timer: asyncio.TimerHandle | None = None
        if self._grammars is not None:
            self._wait_to_warm_up()

    def find(self, request_id: str) -> TokenStream | None:
        """The stream of that id that was admitted and not left."""
        return self._streams.get(request_id)

    def stop(self) -> None:
        """Nothing is prepared any more, and nobody waits for it. Event-loop thread only.
        Idempotent."""
        if self._warm_up_timer is not None:
            self._warm_up_timer.cancel()
            self._warm_up_timer = None
        if self._grammars is not None:
            self._grammars.stop()

    @property
    def has_threads(self) -> bool:
        """Whether grammars were compiled or prepared for: `close` has something to wait for."""
        return self._grammars is not None and self._grammars.has_begun

    def close(self) -> None:
        """Join the threads that compile and follow grammars. Any thread may do this. Idempotent."""
        if self._grammars is not None:
            self._grammars.close()
        if self._loop.matchers is not None:
            self._loop.matchers.close()

    async def check(
        self, prompt_token_ids: tuple[int, ...], sampling: SamplingParams
    ) -> SamplingParams:
        """Raise what `admit` would, and take nothing in. Returns the sampling with a seed."""
        request = build_request(
            prompt_token_ids,
            sampling,
            self._info,
            self._draw_seed,
            model="",
            bad_words=await self._bad_words(sampling),
        )
        self._loop.scheduler.check_admissible(request)
        if sampling.structured_outputs is not None:
            await self._grammars_or_refuse().check(sampling)
        return sampling.clone(seed=request.seed)

    async def admit(self, stream: TokenStream) -> Admission:
        """Check a request and take it in; errors name what was wrong."""
        check_name("request_id", stream.request_id)
        check_name("cache_salt", stream.cache_salt)
        can_keep = self._config.enable_prefix_caching
        ttl_s = check_session(stream.session_id, stream.session_ttl_s, can_keep=can_keep)
        check_priority(stream.priority)
        prompt = await self._prompt(stream)
        bad_words = await self._bad_words(stream.sampling)
        slots: tuple[Slot, ...] = ()
        if stream.sampling.structured_outputs is not None:
            grammars = self._grammars_or_refuse()
            # Where others of its kind have asked for its place, it is not refused one.
            waits = stream.queue_places == 0
            slots = await grammars.open(stream.sampling, len(prompt), waits=waits)
        try:
            self._check_ready()
            request = build_request(
                prompt,
                stream.sampling,
                self._info,
                self._draw_seed,
                request_id=stream.request_id,
                model=stream.model,
                arrival_s=stream.arrival_s or 0.0,
                priority=stream.priority,
                cache_salt=stream.cache_salt,
                session_id=stream.session_id,
                session_ttl_s=ttl_s,
                bad_words=bad_words,
                mask_slots=tuple(slot.number for slot in slots),
                wants_progress=stream.wants_progress,
            )
            self._loop.scheduler.check_admissible(request)
            self._loop.check_queue(stream.queue_places, self._config.max_num_queued_reqs)
            return self._take_in(stream, request, slots)
        except BaseException:
            if slots and self._loop.matchers is not None:
                self._loop.matchers.give_back(slots)
            raise

    def _wait_to_warm_up(self) -> None:
        loop = asyncio.get_running_loop()
        self._warm_up_timer = loop.call_later(WARM_UP_S, self._warm_up)

    def _warm_up(self) -> None:
        self._warm_up_timer = None
        if self._grammars is None or self._grammars.has_begun:
            return
        if self._loop.is_idle:
            self._grammars.warm_up()
        else:
            self._wait_to_warm_up()

    async def _prompt(self, stream: TokenStream) -> tuple[int, ...]:
        num_kept = num_kept_tokens(stream.sampling, self._info)
        prompt = check_prompt(stream.prompt, self._info, num_kept)
        if isinstance(prompt, tuple):
            return prompt
        token_ids = await self._encoder.encode(
            self._tokenizer, prompt, self._info, must_fit=num_kept is None
        )
        return tuple(token_ids if num_kept is None else token_ids[-num_kept:])

    async def _bad_words(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        words = sampling.bad_words
        if sum(map(len, words)) <= FEW_CHARS:
            return bad_word_tokens(words, self._tokenizer)
        return await asyncio.to_thread(bad_word_tokens, words, self._tokenizer)

    def _grammars_or_refuse(self) -> GrammarCompilations:
        if self._grammars is None:
            raise InvalidRequestError(
                "structured_outputs: expected none, as answers can't be bound to a grammar on "
                f"{self._info.device}; leave it out",
                param="structured_outputs",
            )
        return self._grammars

    def _take_in(self, stream: TokenStream, request: Request, slots: tuple[Slot, ...]) -> Admission:
        mailbox = Mailbox(
            stream.sampling,
            self._tokenizer,
            prompt_token_ids=request.prompt_token_ids,
            wants_progress=stream.wants_progress,
        )
        loop = self._loop
        entry = loop.add(request, mailbox, slots)
        self._streams[stream.request_id] = stream
        if stream.cancelled:
            loop.abort(entry)
        return Admission(
            prompt_token_ids=request.prompt_token_ids,
            mailbox=mailbox,
            abort=functools.partial(loop.abort, entry),
            pause=functools.partial(loop.pause, entry),
            resume=functools.partial(loop.resume, entry),
            announce=functools.partial(loop.announce, entry),
            leave=functools.partial(self._leave, stream),
        )

    def _leave(self, stream: TokenStream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
