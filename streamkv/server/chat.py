"""POST /v1/chat/completions: a conversation in, an assistant message or its stream out.

Owns the request's wire type, and what it means. Knows the engine as `encode_chat` and `generate`.
Invariant: one generation path; without `stream` the answer is the same TokenStream, collected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from ..engine.async_engine import AsyncEngine
from ..errors import InvalidRequestError
from ..protocol import MAX_LOGPROBS, SamplingParams
from .answer_format import AnswerPlan, plan_answer, tool_field_names
from .chat_writer import ChatOptions, ChatWriter
from .completion_fields import CompletionFields
from .ids import CHAT, engine_id_of
from .logprobs import check_num_scores
from .messages import (
    Documents,
    Messages,
    ReasoningEffort,
    TemplateKwargs,
    last_text,
    template_arguments,
    template_variables,
    wants_reasoning,
)
from .metrics import metrics_of, observed
from .request_fields import (
    SAMPLING_ADVICE,
    SAMPLING_NOT_HONOURED,
    StreamOptions,
    limit_tokens,
)
from .response_format import Structure
from .sse import collect_answer, stream_answer
from .streams import new_answer_id, policy_of
from .tools import ToolChoice, Tools, read_choice
from .wire import Advice, NotHonoured, read_body, ready_engine, renaming_fields, renaming_params

NOT_HONOURED: NotHonoured = {
    **SAMPLING_NOT_HONOURED,
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "max_output_tokens": (),  # Responses' names
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "text": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

ADVICE: Advice = {
    **SAMPLING_ADVICE,
    "function_call": "send tools and tool_choice",
    "functions": "send tools and tool_choice",
    "max_output_tokens": "send max_completion_tokens",
    "text": "send response_format",
}

MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class ChatRequest(CompletionFields, kw_only=True):
    messages: Messages
    max_tokens: MaxTokens | None = None  # OpenAI's older name
    max_completion_tokens: MaxTokens | None = None  # wins over max_tokens
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    documents: Documents | None = None

    def names(self, structure: Structure | None) -> dict[str, str]:
        """What the engine's parameters are called here."""
        names = {"prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if structure is None:
            return names | tool_field_names(self.tools or ())
        return names | {"structured_outputs": structure.field}

    @property
    def echoes(self) -> bool:
        """Whether each choice begins with the last message."""
        return bool(self.echo) and self.messages[-1]["role"] == "assistant"


_decoder = msgspec.json.Decoder(ChatRequest)


def _plan(body: ChatRequest, engine: AsyncEngine, structure: Structure | None) -> AnswerPlan:
    choice = read_choice(body.tool_choice, body.tools or ())
    variables = template_variables(body.chat_template_kwargs, body.reasoning_effort)
    return plan_answer(
        engine.tokenizer,
        tools=body.tools or (),
        choice=choice.choice,
        name=choice.name,
        allowed=choice.allowed,
        parallel=body.parallel_tool_calls is not False,
        structured=None if structure is None else structure.outputs,
        thinks=wants_reasoning(variables),
    )


def _sampling(body: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            "top_logprobs: only allowed with logprobs: true", param="top_logprobs"
        )
    return body.to_sampling_params(
        defaults,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        n=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def _options(body: ChatRequest, stream: StreamOptions, said: str) -> ChatOptions:
    return ChatOptions(
        token_ids=bool(body.return_token_ids),
        logprobs=bool(body.logprobs),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        reasoning=body.include_reasoning is not False,
        stream=stream,
        echo=said if body.echoes else "",
    )


async def create_chat_completion(request: Request) -> ASGIApp:
    body = await read_body(request, _decoder, not_honoured=NOT_HONOURED, advice=ADVICE)
    streams = bool(body.stream)
    stream_options = body.checked_stream_options()
    policy = policy_of(request, body.on_disconnect, stream_options.resumable, streams=streams)
    engine = ready_engine(request)
    structure = body.structure()
    names = body.names(structure)
    with renaming_fields(names):
        sampling = _sampling(body, engine.sampling_defaults)
        plan = _plan(body, engine, structure)
        prompt = await _encode(body, request, plan)
        continues = bool(body.continue_final_message)
        said = await last_text(body.messages) if continues or body.echoes else ""
        await plan.see_prompt(prompt, continued=said if continues else "")
        sampling = plan.sampling(limit_tokens(sampling, engine, len(prompt)))
    completion_id = new_answer_id(request, CHAT, body.request_id, streams=streams)
    stream = engine.generate(
        prompt,
        sampling,
        request_id=engine_id_of(completion_id),
        wants_progress=bool(body.return_progress),
        **body.for_engine(request),
    )
    source = renaming_params(observed(metrics_of(request), stream), names)
    writer = ChatWriter(completion_id, _options(body, stream_options, said), plan)
    if streams:
        return await stream_answer(request, completion_id, [source], writer, policy=policy)
    return await collect_answer(request, completion_id, [source], writer.whole, policy=policy)


async def _encode(body: ChatRequest, request: Request, plan: AnswerPlan) -> list[int]:
    """The prompt."""
    prompt = await ready_engine(request).encode_chat(
        body.messages,
        must_fit=body.truncate_prompt_tokens is None,
        **template_arguments(
            body, request, tools=plan.template_tools, reasoning_effort=body.reasoning_effort
        ),
    )
    if body.prompt_logprobs is not None:
        check_num_scores(len(prompt), body.prompt_logprobs)
    return prompt


routes = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
