"""POST /v1/completions: prompts (text or token ids) in, their continuations out.

Owns this endpoint's wire types. Knows the engine as `generate`. Invariant: choice indexes are
prompt * n + choice, whatever order tokens come in; one generation path: without `stream` the
answer is the same streams, collected.
"""

from __future__ import annotations

import asyncio
import codecs
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from ..engine.stream import Completion, TokenDelta, TokenLogprob, TokenStream
from ..errors import InvalidRequestError
from ..protocol import MAX_LOGPROBS
from ..text.tokenizer import Tokenizer
from .json_list import JsonList
from .metrics import metrics_of, observed
from .prompt_streams import PromptStreams
from .request_fields import SAMPLING_NOT_HONOURED, GenerationFields, StreamOptions, TokenId, Usage
from .sse import DONE, EventStream, cancel_on_disconnect, data_frame
from .wire import NotHonoured, json_logprob, json_response, read_body, ready_engine

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 1024
MAX_PROMPTS_TIMES_N = 4096  # choices of one request

NOT_HONOURED: NotHonoured = {
    **SAMPLING_NOT_HONOURED,
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    n: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    stream_options: StreamOptions | None = None


_decoder = msgspec.json.Decoder(CompletionRequest)

Prompt = str | list[int]


def _prompts(body: CompletionRequest, max_model_len: int) -> list[Prompt]:
    """The prompts, one or many. InvalidRequestError for none, too many or a mixture.

    Of more items than are allowed only the first are looked at: token ids will be refused for
    their number when the request is admitted.
    """
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError("prompt: expected text or token ids, got []", param="prompt")
    kinds = set(map(type, given[: max(MAX_PROMPTS, max_model_len)]))
    if kinds == {int}:
        return [cast("list[int]", given)]
    if len(kinds) > 1:
        raise InvalidRequestError(
            "prompt: expected a string, a list of strings, a list of token ids or a list of lists "
            "of token ids, got a mixture",
            param="prompt",
        )
    if len(given) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt: expected at most {MAX_PROMPTS} prompts, got {len(given)}", param="prompt"
        )
    name, num_each = ("best_of", body.best_of) if body.best_of else ("n", body.n or 1)
    if len(given) * num_each > MAX_PROMPTS_TIMES_N:
        raise InvalidRequestError(
            f"{name}: expected at most {MAX_PROMPTS_TIMES_N} choices in a request, got {num_each} "
            f"for each of {len(given)} prompts; send fewer prompts or lower {name}",
            param=name,
        )
    return cast("list[Prompt]", given)


def _check(body: CompletionRequest) -> None:
    if body.echo and body.logprobs is not None:
        raise InvalidRequestError(
            "echo: not supported together with logprobs; leave one out", param="echo"
        )


# --- response ---------------------------------------------------------------------------------


class Logprobs(msgspec.Struct, frozen=True):
    """Four parallel lists, one entry per token, also for those that the text doesn't show."""

    tokens: list[str] | msgspec.Raw
    token_logprobs: list[float] | msgspec.Raw
    top_logprobs: list[dict[str, float]] | msgspec.Raw
    text_offset: list[int] | msgspec.Raw  # of the character that the token's first byte belongs to


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A whole choice, or what it gained since the last chunk."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class CompletionObject(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and each of its chunks."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None | UnsetType = UNSET


class _LogprobWriter:
    """OpenAI's lists for one choice, from chunk to chunk, and all of them as JSON."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._lists = [JsonList() for _ in Logprobs.__struct_fields__]

    def write(self, items: Sequence[TokenLogprob]) -> Logprobs:
        """The next tokens' entries."""
        tokens, values, tops, offsets = [], [], [], []
        for item in items:
            top = {_token_name(t.token, t.bytes): json_logprob(t.logprob) for t in item.top}
            name = _token_name(item.token, item.bytes)
            tokens.append(name)
            values.append(json_logprob(item.logprob))
            tops.append({**top, name: json_logprob(item.logprob)})
            offsets.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(item.bytes))
        return Logprobs(tokens, values, tops, offsets)

    def collect(self, items: Sequence[TokenLogprob]) -> None:
        """Keep the next tokens' entries for `whole`."""
        for pieces, entries in zip(
            self._lists, msgspec.structs.astuple(self.write(items)), strict=True
        ):
            pieces.extend(entries)

    def whole(self) -> Logprobs:
        return Logprobs(*(pieces.raw() for pieces in self._lists))


def _token_name(token: str, data: bytes) -> str:
    """The token's text; its bytes, as OpenAI writes them, when it is part of a character."""
    if "\N{REPLACEMENT CHARACTER}" not in token or not data:
        return token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _Answer:
    """Writes one request's answer: whole, or as chunks."""

    def __init__(self, completion_id: str, body: CompletionRequest, tokenizer: Tokenizer) -> None:
        self._id = completion_id
        self._created = int(time.time())
        self._num_choices = body.n or 1
        self._tokenizer = tokenizer
        self._echo = bool(body.echo)
        self._token_ids = bool(body.return_token_ids)
        self._logprobs = body.logprobs is not None
        self._options = StreamOptions.checked(body.stream_options, stream=bool(body.stream))

    async def whole(self, prompts: PromptStreams) -> CompletionObject:
        writers: dict[tuple[int, int], _LogprobWriter] = defaultdict(_LogprobWriter)

        def take_logprobs(prompt: int, delta: TokenDelta) -> None:
            writers[prompt, delta.choice].collect(delta.logprobs)

        completions = await prompts.collect(take_logprobs)
        choices = []
        for prompt, of_prompt in enumerate(completions):
            for item in of_prompt:
                logprobs = writers[prompt, item.choice].whole() if self._logprobs else None
                choices.append(self._choice(prompts, prompt, item, logprobs, first=True))
            await asyncio.sleep(0)
        return self._object(prompts, choices, Usage.of(*prompts.streams))

    async def frames(self, prompts: PromptStreams) -> AsyncIterator[bytes]:
        writers: dict[tuple[int, int], _LogprobWriter] = {}
        async for prompt, delta in prompts.deltas():
            key = (prompt, delta.choice)
            first = key not in writers
            writer = writers.setdefault(key, _LogprobWriter())
            logprobs = writer.write(delta.logprobs) if self._logprobs else None
            choice = self._choice(prompts, prompt, delta, logprobs, first=first)
            if choice.text or choice.finish_reason or self._token_ids or self._logprobs:
                usage: Usage | None | UnsetType = None if self._options.include_usage else UNSET
                if self._options.continuous_usage_stats:
                    usage = Usage.of(*prompts.streams)
                yield data_frame(self._object(prompts, [choice], usage))
        if self._options.include_usage:
            yield data_frame(self._object(prompts, [], Usage.of(*prompts.streams)))
        yield DONE

    def _choice(
        self,
        prompts: PromptStreams,
        prompt: int,
        item: TokenDelta | Completion,
        logprobs: Logprobs | None,
        *,
        first: bool,
    ) -> Choice:
        stream = prompts.streams[prompt]
        return Choice(
            index=prompt * self._num_choices + item.choice,
            text=(self._prompt_text(stream) if self._echo and first else "") + item.text,
            logprobs=logprobs,
            finish_reason=item.finish_reason,
            stop_reason=item.stop_reason,
            token_ids=item.token_ids if self._token_ids else UNSET,
            prompt_token_ids=stream.prompt_token_ids if self._token_ids and first else UNSET,
        )

    def _prompt_text(self, stream: TokenStream) -> str:
        if isinstance(stream.prompt, str):
            return stream.prompt
        return self._tokenizer.decode(stream.prompt_token_ids, skip_special_tokens=False)

    def _object(
        self,
        prompts: PromptStreams,
        choices: list[Choice],
        usage: Usage | None | UnsetType,
    ) -> CompletionObject:
        return CompletionObject(
            id=self._id,
            created=self._created,
            model=prompts.streams[0].model,
            choices=choices,
            usage=usage,
        )


async def create_completion(request: Request) -> ASGIApp:
    body = await read_body(request, _decoder, not_honoured=NOT_HONOURED)
    _check(body)
    engine = ready_engine(request)
    prompts = _prompts(body, engine.info.max_model_len)
    completion_id = f"cmpl-{body.request_id or uuid.uuid4().hex}"
    answer = _Answer(completion_id, body, engine.tokenizer)
    sources = [
        observed(metrics_of(request), stream)
        for stream in await _streams(body, prompts, request, completion_id)
    ]
    if body.stream:
        return EventStream(PromptStreams(sources), answer.frames)
    async with (
        PromptStreams(sources) as streams,
        cancel_on_disconnect(request.receive, streams),
    ):
        return json_response(await answer.whole(streams))


async def _streams(
    body: CompletionRequest, prompts: Sequence[Prompt], request: Request, completion_id: str
) -> list[TokenStream]:
    """One stream per prompt, not yet admitted."""
    engine, options = ready_engine(request), body.for_engine(request)
    if options["session_id"] and len(prompts) > 1:
        raise InvalidRequestError(
            f"session_id: expected one prompt, got {len(prompts)}: a session goes on from one text",
            param="session_id",
        )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = body.to_sampling_params(
        engine.sampling_defaults, max_tokens=max_tokens, n=body.n, logprobs=body.logprobs
    )
    streams: list[TokenStream] = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) and body.add_special_tokens is False:
            await asyncio.sleep(0)  # between many prompts let others run
            prompt = await engine.encode(prompt, add_special_tokens=False, must_fit=True)
        streams.append(
            engine.generate(
                prompt,
                sampling,
                request_id=completion_id if len(prompts) == 1 else f"{completion_id}-{i}",
                # The first asks for all, so that a request is refused as a whole.
                queue_places=0 if i else len(prompts) * sampling.num_sequences,
                **options,
            )
        )
    return streams


routes = [Route("/v1/completions", create_completion, methods=["POST"])]
