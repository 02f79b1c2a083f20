"""POST /v1/completions: prompts (text or token ids) in, their continuations out.

Owns the request's wire type, and what it means. Knows the engine as `encode` and `generate`.
Invariant: one generation path; without `stream` the answer is the same streams, collected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from ..engine.admission import num_kept_tokens
from ..engine.async_engine import AsyncEngine
from ..engine.stream import TokenStream
from ..errors import InvalidRequestError
from ..protocol import MAX_LOGPROBS, SamplingParams
from .completion_fields import CompletionFields
from .completion_writer import CompletionOptions, CompletionWriter
from .ids import COMPLETION, engine_id_of
from .logprobs import check_num_scores
from .metrics import metrics_of, observed
from .prompts import Prompt, PromptEncoder, read_prompts
from .request_fields import SAMPLING_ADVICE, SAMPLING_NOT_HONOURED, TokenId
from .response_format import Structure
from .sse import collect_answer, stream_answer
from .streams import new_answer_id, policy_of
from .wire import Advice, NotHonoured, read_body, ready_engine, renaming_fields, renaming_params

DEFAULT_MAX_TOKENS = 16  # OpenAI's

NOT_HONOURED: NotHonoured = {
    **SAMPLING_NOT_HONOURED,
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "prompt_embeds": (),
    "suffix": ("",),
}

ADVICE: Advice = {
    **SAMPLING_ADVICE,
    "max_completion_tokens": "send max_tokens",
    "max_output_tokens": "send max_tokens",
}


class CompletionRequest(CompletionFields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    n: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_top_scores(self) -> int | None:
        """How many of the most likely tokens each position of the prompt needs; None: no scores."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((num for num in wanted if num is not None), default=None)

    @property
    def shown_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


_decoder = msgspec.json.Decoder(CompletionRequest)


def _sampling(
    body: CompletionRequest, engine: AsyncEngine, structure: Structure | None
) -> SamplingParams:
    """How to sample. Where only the prompt is wanted, one token is generated that nobody sees."""
    if not body.shown_max_tokens and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequestError(
            "max_tokens: expected at least 1, got 0; 0 is for echo and prompt_logprobs, which show "
            "the prompt alone",
            param="max_tokens",
        )
    return body.to_sampling_params(
        engine.sampling_defaults,
        max_tokens=body.shown_max_tokens or 1,
        n=body.n,
        logprobs=body.logprobs,
        prompt_logprobs=body.num_top_scores,
        structured_outputs=None if structure is None else structure.outputs,
    )


async def create_completion(request: Request) -> ASGIApp:
    body = await read_body(request, _decoder, not_honoured=NOT_HONOURED, advice=ADVICE)
    streams = bool(body.stream)
    stream_options = body.checked_stream_options()
    policy = policy_of(request, body.on_disconnect, stream_options.resumable, streams=streams)
    engine = ready_engine(request)
    structure = body.structure()
    names = {"structured_outputs": structure.field} if structure is not None else {}
    with renaming_fields(names):
        sampling = _sampling(body, engine, structure)
    prompts = await _prompts(body, engine, sampling)
    completion_id = new_answer_id(request, COMPLETION, body.request_id, streams=streams)
    options = CompletionOptions(
        num_choices=sampling.n,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        echo=bool(body.echo),
        generates=body.shown_max_tokens > 0,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        stream=stream_options,
    )
    echoes = [prompt.echo for prompt in prompts]
    writer = CompletionWriter(completion_id, options, engine.tokenizer, echoes)
    sources = [
        renaming_params(observed(metrics_of(request), stream), names)
        for stream in _streams(body, prompts, sampling, request, completion_id)
    ]
    if streams:
        return await stream_answer(request, completion_id, sources, writer, policy=policy)
    return await collect_answer(request, completion_id, sources, writer.whole, policy=policy)


async def _prompts(
    body: CompletionRequest, engine: AsyncEngine, sampling: SamplingParams
) -> list[Prompt]:
    """The prompts as the engine gets them."""
    name, num_each = ("best_of", body.best_of) if body.best_of else ("n", body.n or 1)
    given = read_prompts(body.prompt, engine.info.max_model_len, name=name, num_each=num_each)
    keep, is_scored = num_kept_tokens(sampling, engine.info), sampling.prompt_logprobs is not None
    encoder = PromptEncoder(
        engine,
        add_special_tokens=body.add_special_tokens is not False,
        echo=bool(body.echo),
        keep=keep,
        needs_ids=is_scored,
    )
    prompts = []
    for prompt in given:
        await asyncio.sleep(0)  # between many prompts let others run
        prompts.append(await encoder.encode(prompt))
    if is_scored:
        num_tokens = sum(min(len(p.content), keep or len(p.content)) for p in prompts)
        check_num_scores(num_tokens * (sampling.n if body.echo else 1), sampling.prompt_logprobs)
    return prompts


def _streams(
    body: CompletionRequest,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    request: Request,
    completion_id: str,
) -> list[TokenStream]:
    """One stream per prompt, not yet admitted."""
    engine, options = ready_engine(request), body.for_engine(request)
    if options["session_id"] and len(prompts) > 1:
        raise InvalidRequestError(
            f"session_id: expected one prompt, got {len(prompts)}: a session goes on from one text",
            param="session_id",
        )
    return [
        engine.generate(
            prompt.content,
            sampling,
            request_id=engine_id_of(completion_id),
            # The first asks for all, so that a request is refused as a whole.
            queue_places=0 if i else len(prompts) * sampling.num_sequences,
            wants_progress=bool(body.return_progress),
            **options,
        )
        for i, prompt in enumerate(prompts)
    ]


routes = [Route("/v1/completions", create_completion, methods=["POST"])]
