"""The answer of one completions request, as events or whole.

Owns the wire types of /v1/completions' answers, and how deltas of tokens become them. Knows no
transport. Invariants: choice indexes are prompt * n + choice, whatever order tokens come in; the
chunks of a choice, joined, are what the whole answer has; the plain delta of a text costs next to
nothing, for all of its chunk but the text was written before.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from ..engine.stream import Completion, TokenDelta, TokenStream
from ..text.tokenizer import Tokenizer
from .answer import Event
from .chat_objects import PromptProgress
from .json_list import JsonList
from .logprobs import (
    LogprobLists,
    Logprobs,
    LogprobWriter,
    PromptLogprob,
    prompt_logprobs,
)
from .prompt_echo import EchoedPrompt, EchoPiece, PromptEcho
from .request_fields import StreamOptions, Usage
from .sse import DONE_EVENT
from .wire import encode, error_body

_MARK = "\0"  # where the text of a chunk comes


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A whole choice, or what it gained since the last chunk."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None | UnsetType = UNSET  # not in chunks before a choice's last
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    # In a prompt's first choice; in a chunk those of more positions.
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | msgspec.Raw | UnsetType = UNSET


class CompletionObject(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and each of its chunks."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: Sequence[Choice]
    usage: Usage | None | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class CompletionOptions(NamedTuple):
    """What a client wants to see of an answer."""

    num_choices: int  # of each prompt
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    generates: bool  # if not, only the prompt is wanted: the one token that comes is hidden
    token_ids: bool
    tokens_as_ids: bool  # in log-probabilities
    stream: StreamOptions


class _Kept:
    """The log-probabilities of one prompt and its choices, while the answer is collected."""

    def __init__(self, num_choices: int) -> None:
        self.prompt = JsonList()
        self.choices = [LogprobLists() for _ in range(num_choices)]


class CompletionWriter:
    """Makes the events of one answer, or the whole."""

    def __init__(
        self,
        answer_id: str,
        options: CompletionOptions,
        tokenizer: Tokenizer,
        prompts: Sequence[EchoedPrompt],
    ) -> None:
        """`prompts`: what each choice begins with."""
        self._options = options
        self._shared: dict[str, Any] = {"id": answer_id, "created": int(time.time())}
        self._streams: Sequence[TokenStream] = ()
        self._echoes = [PromptEcho(prompt, tokenizer, self._echo_writer()) for prompt in prompts]
        # Plain chunks without their text, of the choices that have begun: before and behind it.
        self._frames: dict[int, list[bytes]] = {}
        self._writers: dict[int, LogprobWriter] = {}
        self._is_plain = not (
            options.token_ids
            or options.logprobs is not None
            or options.stream.continuous_usage_stats
            or not options.generates
        )

    def _echo_writer(self) -> LogprobWriter | None:
        options = self._options
        if not options.echo or options.logprobs is None:
            return None
        return LogprobWriter(options.logprobs, as_ids=options.tokens_as_ids)

    def _begin(self, streams: Sequence[TokenStream]) -> None:
        self._streams = streams
        self._shared["model"] = streams[0].model

    # --- events ------------------------------------------------------------------------------

    def begin(self, streams: Sequence[TokenStream]) -> Sequence[Event]:
        self._begin(streams)
        if self._options.stream.include_usage:
            self._shared["usage"] = None
        return ()

    def push(self, prompt: int, delta: TokenDelta) -> Sequence[Event]:
        index = prompt * self._options.num_choices + delta.choice
        frame = self._frames.get(index)
        if self._is_plain and frame is not None and delta.finish_reason is None:
            text = delta.text
            return (Event("", encode(text).join(frame)),) if text else ()
        if delta.progress is not None:
            return (self._progress_event(prompt, delta.progress),)
        if delta.prompt_logprobs:
            return (self._event(self._prompt_choice(prompt, delta)),)
        if frame is None:
            marked = Choice(index=index, text=_MARK, logprobs=None, finish_reason=None)
            self._frames[index] = self._event(marked).data.rsplit(encode(_MARK), 1)
        choice = self._choice(prompt, delta, is_first=frame is None)
        is_wanted = self._options.token_ids or self._options.logprobs is not None
        if choice.text or choice.finish_reason or is_wanted:
            return (self._event(choice),)
        return ()

    def end(self) -> Sequence[Event]:
        if not self._options.stream.include_usage:
            return (DONE_EVENT,)
        chunk = CompletionObject(**self._shared | {"usage": self._usage()}, choices=())
        return (Event("", encode(chunk)), DONE_EVENT)

    def fail(self, error: BaseException) -> Sequence[Event]:
        return (Event("", encode(error_body(error))),)

    def _prompt_choice(self, prompt: int, delta: TokenDelta) -> Choice:
        """More positions of the prompt, in its first choice."""
        options = self._options
        echo = self._push_scores(prompt, delta)
        scores: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET
        if options.prompt_logprobs is not None:
            scores = prompt_logprobs(delta.prompt_logprobs, options.prompt_logprobs)
        return Choice(
            index=prompt * options.num_choices,
            text=echo.text,
            logprobs=echo.logprobs,
            finish_reason=None,
            prompt_logprobs=scores,
        )

    def _push_scores(self, prompt: int, delta: TokenDelta) -> EchoPiece:
        token_ids = self._streams[prompt].prompt_token_ids
        return self._echoes[prompt].push(token_ids, delta.prompt_logprobs)

    def _choice(self, prompt: int, delta: TokenDelta, *, is_first: bool) -> Choice:
        """What a delta adds to its choice, which begins with the prompt where that is echoed."""
        options, stream = self._options, self._streams[prompt]
        index = prompt * options.num_choices + delta.choice
        text = delta.text if options.generates else ""
        logprobs = self._logprobs(prompt, delta)
        if is_first:
            echo = self._echoes[prompt]
            text = echo.rest(delta.choice) + text
            if delta.choice and logprobs is not None:
                logprobs = LogprobLists(logprobs).whole(echo.lists)
        return Choice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=self._finish_reason(delta),
            stop_reason=UNSET if delta.finish_reason is None else self._stop_reason(delta),
            token_ids=self._token_ids(delta),
            prompt_token_ids=stream.prompt_token_ids if options.token_ids and is_first else UNSET,
        )

    def _logprobs(self, prompt: int, delta: TokenDelta) -> Logprobs | None:
        """The entries of a delta's tokens."""
        options = self._options
        if options.logprobs is None:
            return None
        index = prompt * options.num_choices + delta.choice
        writer = self._writers.get(index)
        if writer is None:
            num_chars = len(self._echoes[prompt].text)
            as_ids = options.tokens_as_ids
            writer = LogprobWriter(options.logprobs, as_ids=as_ids, num_chars=num_chars)
            self._writers[index] = writer
        return writer.write(delta.logprobs if options.generates else ())

    def _finish_reason(self, item: TokenDelta | Completion) -> str | None:
        if item.finish_reason in (None, "abort") or self._options.generates:
            return item.finish_reason
        return "length"

    def _stop_reason(self, item: TokenDelta | Completion) -> int | str | None:
        return item.stop_reason if self._options.generates else None

    def _token_ids(self, item: TokenDelta | Completion) -> tuple[int, ...] | UnsetType:
        if not self._options.token_ids:
            return UNSET
        return item.token_ids if self._options.generates else ()

    def _progress_event(self, prompt: int, progress: tuple[int, int]) -> Event:
        processed, total = progress
        cached = self._streams[prompt].usage.num_cached_tokens
        index = prompt * self._options.num_choices
        choice = Choice(index=index, text="", logprobs=None, finish_reason=None)
        return self._event(choice, prompt_progress=PromptProgress(total, processed, cached))

    def _event(self, choice: Choice, **more: Any) -> Event:
        if self._options.stream.continuous_usage_stats:
            more["usage"] = self._usage()
        return Event("", encode(CompletionObject(**self._shared | more, choices=(choice,))))

    def _usage(self) -> Usage:
        return Usage.of(*self._streams, generates=self._options.generates)

    # --- whole -------------------------------------------------------------------------------

    async def whole(self, streams: Sequence[TokenStream]) -> CompletionObject:
        """The same answer, once all of it is there. The prompts run together; they are read one by
        one, since deltas merge."""
        self._begin(streams)
        choices: list[Choice] = []
        for prompt, stream in enumerate(streams):
            kept = _Kept(self._options.num_choices)
            completions = await stream.collect(functools.partial(self._keep, prompt, kept))
            for completion in completions:
                choices.append(self._whole_choice(prompt, completion, kept))
                await asyncio.sleep(0)
        return CompletionObject(**self._shared, choices=choices, usage=self._usage())

    def _keep(self, prompt: int, kept: _Kept, delta: TokenDelta) -> None:
        """Write a delta's log-probabilities down."""
        if delta.prompt_logprobs:
            self._push_scores(prompt, delta)
            if self._options.prompt_logprobs is not None:
                num_top = self._options.prompt_logprobs
                kept.prompt.extend(prompt_logprobs(delta.prompt_logprobs, num_top))
        entries = self._logprobs(prompt, delta)
        if entries is not None:
            kept.choices[delta.choice].extend(entries)

    def _whole_choice(self, prompt: int, completion: Completion, kept: _Kept) -> Choice:
        options, echo = self._options, self._echoes[prompt]
        logprobs: Logprobs | None = None
        if options.logprobs is not None:
            logprobs = kept.choices[completion.choice].whole(echo.lists)
        is_scored = options.prompt_logprobs is not None and completion.choice == 0
        ids = self._streams[prompt].prompt_token_ids if options.token_ids else UNSET
        return Choice(
            index=prompt * options.num_choices + completion.choice,
            text=echo.text + (completion.text if options.generates else ""),
            logprobs=logprobs,
            finish_reason=self._finish_reason(completion),
            stop_reason=self._stop_reason(completion),
            token_ids=self._token_ids(completion),
            prompt_token_ids=ids,
            prompt_logprobs=kept.prompt.raw() if is_scored else UNSET,
        )
