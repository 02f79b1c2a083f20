"""POST /v1/chat/completions: a conversation in, an assistant message or its stream out.

Owns this endpoint's wire types. Knows the engine as `encode_chat` and `generate`. Invariant: one
generation path; without `stream` the answer is the same TokenStream, collected.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from ..engine.stream import Completion, TokenDelta, TokenLogprob, TokenStream
from ..errors import InvalidRequestError
from ..protocol import MAX_LOGPROBS, SamplingParams
from .json_list import JsonList
from .messages import Messages, TemplateKwargs, template_kwargs
from .metrics import metrics_of, observed
from .request_fields import (
    SAMPLING_NOT_HONOURED,
    GenerationFields,
    StreamOptions,
    Usage,
    limit_tokens,
)
from .sse import DONE, EventStream, cancel_on_disconnect, data_frame
from .wire import (
    NotHonoured,
    is_off,
    json_logprob,
    json_response,
    read_body,
    ready_engine,
    renaming_fields,
    renaming_params,
)

NOT_HONOURED: NotHonoured = {
    **SAMPLING_NOT_HONOURED,
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "verbosity": ("medium",),
    "web_search_options": (),
}

MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]


# --- request ----------------------------------------------------------------------------------


_NULL = msgspec.Raw(b"null")


class ChatRequest(GenerationFields, kw_only=True):
    messages: Messages
    max_tokens: MaxTokens | None = None  # OpenAI's older name
    max_completion_tokens: MaxTokens | None = None  # wins over max_tokens
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: msgspec.Raw = _NULL
    tool_choice: msgspec.Raw = _NULL


_decoder = msgspec.json.Decoder(ChatRequest)


def _sampling(body: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    if not is_off(body.tools, ([],)) and not is_off(body.tool_choice, ("none",), null=False):
        raise InvalidRequestError(
            'tools: not supported by this server; leave it out or send tool_choice "none"',
            param="tools",
            code="unsupported",
        )
    if not is_off(body.tool_choice, ("none", "auto")):
        raise InvalidRequestError(
            "tool_choice: not supported by this server; leave it out",
            param="tool_choice",
            code="unsupported",
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            "top_logprobs: only allowed with logprobs: true", param="top_logprobs"
        )
    return body.to_sampling_params(
        defaults,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        n=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


# --- response ---------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's shape. `content` has an entry for each token; those that the text doesn't show
    (special tokens, the end token) have no bytes, so that all bytes joined are the text."""

    content: list[ContentLogprob] | msgspec.Raw
    refusal: None = None


def _content_logprobs(items: Sequence[TokenLogprob]) -> list[ContentLogprob]:
    return [_content_logprob(item) for item in items]


def _content_logprob(item: TokenLogprob) -> ContentLogprob:
    top = [TopLogprob(t.token, json_logprob(t.logprob), list(t.bytes)) for t in item.top]
    return ContentLogprob(item.token, json_logprob(item.logprob), list(item.bytes), top)


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class _Answer:
    """Writes one request's answer: whole, or as chunks."""

    def __init__(self, completion_id: str, body: ChatRequest, options: StreamOptions) -> None:
        self._id = completion_id
        self._created = int(time.time())
        self._token_ids = bool(body.return_token_ids)
        self._logprobs = bool(body.logprobs)
        self._options = options

    async def whole(self, stream: TokenStream) -> ChatCompletion:
        logprobs = [JsonList() for _ in range(stream.sampling.n)]

        def take_logprobs(delta: TokenDelta) -> None:
            logprobs[delta.choice].extend(_content_logprobs(delta.logprobs))

        choices = []
        for completion in await stream.collect(take_logprobs):
            choices.append(self._choice(completion, logprobs[completion.choice]))
            await asyncio.sleep(0)  # a choice's log-probabilities may be megabytes
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=stream.model,
            choices=choices,
            usage=Usage.of(stream),
            prompt_token_ids=stream.prompt_token_ids if self._token_ids else UNSET,
        )

    def _choice(self, completion: Completion, logprobs: JsonList) -> Choice:
        return Choice(
            index=completion.choice,
            message=AssistantMessage(content=completion.text),
            logprobs=ChatLogprobs(logprobs.raw()) if self._logprobs else None,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._token_ids else UNSET,
        )

    async def frames(self, stream: TokenStream) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        prompt_token_ids = stream.prompt_token_ids if self._token_ids else UNSET
        async for delta in stream:
            frame = b""
            if delta.choice not in begun:
                role = ChunkChoice(
                    index=delta.choice, delta=MessageDelta(role="assistant", content="")
                )
                frame = self._frame(stream, [role], UNSET if begun else prompt_token_ids)
                begun.add(delta.choice)
            if delta.text or delta.finish_reason or self._token_ids or self._logprobs:
                frame += self._frame(stream, [self._chunk_choice(delta)])
            if frame:
                yield frame
        if self._options.include_usage:
            yield data_frame(self._chunk(stream, [], Usage.of(stream)))
        yield DONE

    def _chunk_choice(self, delta: TokenDelta) -> ChunkChoice:
        return ChunkChoice(
            index=delta.choice,
            delta=MessageDelta(content=delta.text) if delta.text else MessageDelta(),
            logprobs=ChatLogprobs(_content_logprobs(delta.logprobs)) if delta.logprobs else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._token_ids else UNSET,
        )

    def _frame(
        self,
        stream: TokenStream,
        choices: list[ChunkChoice],
        prompt_token_ids: tuple[int, ...] | UnsetType = UNSET,
    ) -> bytes:
        usage: Usage | None | UnsetType = None if self._options.include_usage else UNSET
        if self._options.continuous_usage_stats:
            usage = Usage.of(stream)
        return data_frame(self._chunk(stream, choices, usage, prompt_token_ids))

    def _chunk(
        self,
        stream: TokenStream,
        choices: list[ChunkChoice],
        usage: Usage | None | UnsetType,
        prompt_token_ids: tuple[int, ...] | UnsetType = UNSET,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=stream.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )


async def create_chat_completion(request: Request) -> ASGIApp:
    body = await read_body(request, _decoder, not_honoured=NOT_HONOURED)
    options = StreamOptions.checked(body.stream_options, stream=bool(body.stream))
    engine = ready_engine(request)
    sampling = _sampling(body, engine.sampling_defaults)
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    with renaming_fields(names):
        prompt = await engine.encode_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            **template_kwargs(body.chat_template_kwargs, "chat_template_kwargs"),
        )
    completion_id = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
    stream = engine.generate(
        prompt,
        limit_tokens(sampling, engine, len(prompt)),
        request_id=completion_id,
        **body.for_engine(request),
    )
    source = renaming_params(observed(metrics_of(request), stream), names)
    answer = _Answer(completion_id, body, options)
    if body.stream:
        return EventStream(source, answer.frames)
    async with source, cancel_on_disconnect(request.receive, stream):
        return json_response(await answer.whole(stream))


routes = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
