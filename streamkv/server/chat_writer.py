"""The answer of one chat completion, as events or whole.

Owns how deltas of tokens become chunks, and choices messages. Knows no transport. Invariants: the
chunks of a choice, joined, are the message that the whole answer has; the plain delta of a text
costs next to nothing, for all of its chunk but the text was written before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

from ..engine.stream import Completion, TokenDelta, TokenStream
from ..protocol import MAX_LOGPROBS, FinishReason
from ..text.answer_parts import ContentPart, Part, ReasoningPart, ToolCallPart
from .answer import Event
from .answer_format import AnswerPlan, AnswerReader
from .chat_objects import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    FunctionCall,
    FunctionDelta,
    MessageDelta,
    PromptProgress,
    ToolCall,
    ToolCallDelta,
)
from .deltas import cut
from .json_list import JsonList
from .logprobs import ChatLogprobs, content_logprobs, prompt_logprobs
from .request_fields import StreamOptions, Usage
from .sse import DONE_EVENT
from .wire import encode, error_body

_MARK = "\0"  # where the text of a chunk comes
_ENCODED_MARK = encode(_MARK)


class ChatOptions(NamedTuple):
    """What a client wants to see of an answer."""

    token_ids: bool
    logprobs: bool
    tokens_as_ids: bool  # in log-probabilities
    reasoning: bool
    stream: StreamOptions
    echo: str  # what each choice begins with


class _Frames(NamedTuple):
    """A choice's plain chunks without their text: what comes before, between and behind."""

    content: list[bytes]
    reasoning: list[bytes]
    reader: AnswerReader | None


class ChatWriter:
    """Makes the events of one answer, or the whole."""

    def __init__(self, answer_id: str, options: ChatOptions, plan: AnswerPlan) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._options = options
        self._plan = plan
        self._readers: dict[int, AnswerReader] = {}
        self._frames: dict[int, _Frames] = {}  # of the choices that have begun
        self._is_plain = not (
            options.token_ids or options.logprobs or options.stream.continuous_usage_stats
        )
        self._stream: TokenStream
        self._shared: dict[str, Any] = {}

    # --- events ------------------------------------------------------------------------------

    def begin(self, streams: Sequence[TokenStream]) -> Sequence[Event]:
        (self._stream,) = streams
        self._shared = {"id": self._id, "created": self._created, "model": self._stream.model}
        if self._options.stream.include_usage:
            self._shared["usage"] = None
        return ()

    def push(self, prompt: int, delta: TokenDelta) -> Sequence[Event]:
        frames = self._frames.get(delta.choice)
        if self._is_plain and frames is not None and delta.finish_reason is None:
            text, reader = delta.text, frames.reader
            if reader is not None:
                return self._plain_events(frames, reader, delta)
            return (Event("", encode(text).join(frames.content)),) if text else ()
        if delta.progress is not None:
            return (self._progress_event(delta.progress),)
        if delta.prompt_logprobs:
            more = prompt_logprobs(delta.prompt_logprobs, MAX_LOGPROBS)
            return (self._event(ChunkChoice(index=0, delta=MessageDelta()), prompt_logprobs=more),)
        events = self._opening(delta.choice) if frames is None else []
        return events + list(map(self._event, self._chunk_choices(delta)))

    def end(self) -> Sequence[Event]:
        if not self._options.stream.include_usage:
            return (DONE_EVENT,)
        chunk = ChatCompletionChunk(**self._shared | {"usage": self._usage()}, choices=())
        return (Event("", encode(chunk)), DONE_EVENT)

    def fail(self, error: BaseException) -> Sequence[Event]:
        return (Event("", encode(error_body(error))),)

    def _opening(self, choice: int) -> list[Event]:
        """A choice's role; the first one's chunk has the prompt's ids too."""
        ids: tuple[int, ...] | UnsetType = UNSET
        if self._options.token_ids and not self._frames:
            ids = self._stream.prompt_token_ids
        reader = self._plan.reader()
        if reader is not None:
            self._readers[choice] = reader
        marked = (MessageDelta(content=_MARK), _message_delta(ReasoningPart(_MARK)))
        content, reasoning = (self._frame(choice, message) for message in marked)
        self._frames[choice] = _Frames(content, reasoning, reader)
        opening = ChunkChoice(index=choice, delta=MessageDelta(role="assistant", content=""))
        events = [self._event(opening, prompt_token_ids=ids)]
        if self._options.echo:
            echo = ChunkChoice(index=choice, delta=MessageDelta(content=self._options.echo))
            events.append(self._event(echo))
        return events

    def _frame(self, choice: int, message: MessageDelta) -> list[bytes]:
        """A chunk without its text: what comes between."""
        data = self._event(ChunkChoice(index=choice, delta=message)).data
        # What a client chose, the names of model and request, stands before it.
        num_marks = 1 if message.content is not UNSET else 2
        return data.rsplit(_ENCODED_MARK, num_marks)

    def _plain_events(
        self, frames: _Frames, reader: AnswerReader, delta: TokenDelta
    ) -> Sequence[Event]:
        events = []
        for part in reader.push(delta.text, delta.token_ids):
            if isinstance(part, ContentPart):
                events.append(Event("", encode(part.text).join(frames.content)))
            elif isinstance(part, ToolCallPart):
                choice = ChunkChoice(index=delta.choice, delta=_message_delta(part))
                events.append(self._event(choice))
            elif self._options.reasoning:
                events.append(Event("", encode(part.text).join(frames.reasoning)))
        return events

    def _chunk_choices(self, delta: TokenDelta) -> list[ChunkChoice]:
        """What a delta adds to its choice: log-probabilities and ids come with the first of
        several, the end with the last."""
        reader, ended = self._readers.get(delta.choice), delta.finish_reason is not None
        messages = self._messages(reader, delta)
        token_ids = delta.token_ids if self._options.token_ids else ()
        if not messages and (ended or token_ids or delta.logprobs):
            messages = [MessageDelta()]
        choices = []
        for number, message in enumerate(messages):
            is_first, is_last = number == 0, ended and number == len(messages) - 1
            choices.append(
                ChunkChoice(
                    index=delta.choice,
                    delta=message,
                    logprobs=self._logprobs(delta) if is_first and delta.logprobs else None,
                    finish_reason=_finish_reason(delta, reader) if is_last else None,
                    stop_reason=delta.stop_reason if is_last else UNSET,
                    token_ids=token_ids if is_first and self._options.token_ids else UNSET,
                )
            )
        return choices

    def _messages(self, reader: AnswerReader | None, delta: TokenDelta) -> list[MessageDelta]:
        if reader is None:
            return [MessageDelta(content=delta.text)] if delta.text else []
        parts = reader.push(delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            parts += reader.finish()
        return [_message_delta(part) for part in parts if self._is_shown(part)]

    def _is_shown(self, part: Part) -> bool:
        return self._options.reasoning or not isinstance(part, ReasoningPart)

    def _logprobs(self, delta: TokenDelta) -> ChatLogprobs:
        return ChatLogprobs(content_logprobs(delta.logprobs, as_ids=self._options.tokens_as_ids))

    def _progress_event(self, progress: tuple[int, int]) -> Event:
        processed, total = progress
        cached = self._stream.usage.num_cached_tokens
        return self._event(
            ChunkChoice(index=0, delta=MessageDelta()),
            prompt_progress=PromptProgress(total, processed, cached),
        )

    def _event(self, choice: ChunkChoice, **more: Any) -> Event:
        return Event("", encode(self._chunk(choice, **more)))

    def _chunk(self, choice: ChunkChoice, **more: Any) -> ChatCompletionChunk:
        if self._options.stream.continuous_usage_stats:
            more["usage"] = self._usage()
        return ChatCompletionChunk(**self._shared | more, choices=(choice,))

    def _usage(self) -> Usage:
        counts = [reader.reasoning_tokens for reader in self._readers.values()]
        reasoning = sum(counts) if self._plan.reasoning is not None else None
        return Usage.of(self._stream, reasoning_tokens=reasoning)

    # --- whole -------------------------------------------------------------------------------

    async def whole(self, streams: Sequence[TokenStream]) -> ChatCompletion:
        """The same answer, once all of it is there."""
        (self._stream,) = streams
        logprobs = [JsonList() for _ in range(self._stream.sampling.n)]
        scores = JsonList()

        def take_logprobs(delta: TokenDelta) -> None:
            scores.extend(prompt_logprobs(delta.prompt_logprobs, MAX_LOGPROBS))
            logprobs[delta.choice].extend(
                content_logprobs(delta.logprobs, as_ids=self._options.tokens_as_ids)
            )

        choices = []
        for completion in await self._stream.collect(take_logprobs):
            choices.append(await self._choice(completion, logprobs[completion.choice]))
            await asyncio.sleep(0)  # a choice's log-probabilities may be megabytes
        is_scored = self._stream.sampling.prompt_logprobs is not None
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._stream.model,
            choices=choices,
            usage=self._usage(),
            prompt_token_ids=self._stream.prompt_token_ids if self._options.token_ids else UNSET,
            prompt_logprobs=scores.raw() if is_scored else UNSET,
        )

    async def _choice(self, completion: Completion, logprobs: JsonList) -> Choice:
        reader = self._plan.reader()
        message = AssistantMessage(content=self._options.echo + completion.text)
        if reader is not None:
            self._readers[completion.choice] = reader
            message = self._message(await _read_all(reader, completion))
        return Choice(
            index=completion.choice,
            message=message,
            logprobs=ChatLogprobs(logprobs.raw()) if self._options.logprobs else None,
            finish_reason=_finish_reason(completion, reader),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._options.token_ids else UNSET,
        )

    def _message(self, parts: Sequence[Part]) -> AssistantMessage:
        content = self._options.echo
        content += "".join(part.text for part in parts if isinstance(part, ContentPart))
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
        calls = _tool_calls([part for part in parts if isinstance(part, ToolCallPart)])
        shown = reasoning if reasoning and self._options.reasoning else UNSET
        return AssistantMessage(
            content=content or (None if calls or self._plan.must_call else ""),
            reasoning=shown,
            reasoning_content=shown,
            tool_calls=calls or UNSET,
        )


async def _read_all(reader: AnswerReader, whole: Completion) -> list[Part]:
    parts: list[Part] = []
    for piece in cut(TokenDelta(whole.choice, whole.text, whole.token_ids)):
        parts += reader.push(piece.text, piece.token_ids)
        await asyncio.sleep(0)
    return parts + reader.finish()


def _finish_reason(item: TokenDelta | Completion, reader: AnswerReader | None) -> str | None:
    if reader is not None and reader.num_calls and item.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return item.finish_reason


def _message_delta(part: Part) -> MessageDelta:
    if isinstance(part, ContentPart):
        return MessageDelta(content=part.text)
    if isinstance(part, ReasoningPart):
        return MessageDelta(reasoning=part.text, reasoning_content=part.text)
    is_first = bool(part.id)
    call = ToolCallDelta(
        index=part.index,
        id=part.id if is_first else UNSET,
        type="function" if is_first else UNSET,
        function=FunctionDelta(name=part.name if is_first else UNSET, arguments=part.arguments),
    )
    return MessageDelta(tool_calls=(call,))


def _tool_calls(parts: Sequence[ToolCallPart]) -> list[ToolCall]:
    arguments: dict[int, list[str]] = {}
    for part in parts:
        arguments.setdefault(part.index, []).append(part.arguments)
    return [
        ToolCall(id=part.id, function=FunctionCall(part.name, "".join(arguments[part.index])))
        for part in parts
        if part.id
    ]
