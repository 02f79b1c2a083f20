"""The body of `POST /v1/responses` and of the socket's `response.create`.

Owns its Structs, what is honoured of them, and what of them becomes SamplingParams and the Response
that the client sees first. Knows no transport and no conversation.

Every optional field may be null. A known field that can't be honoured is an InvalidRequestError
that names it. Accepted although they change nothing here are hints (`user`, `safety_identifier`,
`prompt_cache_key`, `prompt_cache_retention`, `prompt_cache_options.mode` and `.ttl`,
`service_tier`, `background_options.continuation_id`, `include_obfuscation` in `stream_options`),
what concerns only tools that this server would run itself (`max_tool_calls`, most of `include`),
`reasoning.encrypted_content` in `include`: reasoning comes as text, which can be sent back, and
`reasoning.summary` "auto", as its older name `generate_summary`: there is no other summary of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Raw, Struct

from ...errors import InvalidRequestError
from ...protocol import MAX_LOGPROBS, SamplingParams
from ..answer_format import tool_field_names
from ..bounds import at_most
from ..messages import ReasoningEffort, TemplateKwargs, template_variables
from ..request_fields import (
    COMPLETIONS_ONLY,
    MAX_LIST_BYTES,
    SAMPLING_ADVICE,
    SAMPLING_NOT_HONOURED,
    Name,
)
from ..response_format import MAX_STRUCTURE_BYTES, Structure, StructureFields, agreed
from ..wire import Advice, NotHonoured, encode, renaming_fields
from .input import Input
from .object import CacheRetention, ReasoningConfig, Response
from .tools import (
    TextFields,
    ToolChoiceFields,
    Tools,
    read_format,
    text_config,
)

MetadataKey: TypeAlias = Annotated[str, Meta(max_length=64)]
Label: TypeAlias = Annotated[str, Meta(max_length=4096)]
MetadataValue: TypeAlias = Annotated[str, Meta(max_length=512)]
Metadata: TypeAlias = Annotated[
    dict[MetadataKey, MetadataValue], Meta(max_length=16), at_most(MAX_LIST_BYTES)
]

_OF_FUNCTION = re.compile(r"^(tools\[\d+\])\.function\b")

# Values besides null that mean "off"; anything else is refused.
_NOT_HONOURED: NotHonoured = {
    **SAMPLING_NOT_HONOURED,
    **{k: v for k, v in COMPLETIONS_ONLY.items() if k not in StructureFields.__struct_fields__},
    "access_programs": (),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "context_management": ([],),
    "continue_final_message": (False,),
    "conversation": (),
    "documents": ([],),
    "enable_response_messages": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "image": (),
    "logprobs": (False,),  # Chat Completions' names; here: include, text.format, ...
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "mm_processor_kwargs": (),
    "moderation": (),
    "n": (1,),
    "personality": (),
    "previous_input_messages": ([],),
    "prompt": (),
    "reasoning_effort": (),
    "response_format": (),
    "return_token_ids": (False,),
}
_ADVICE: Advice = {
    **SAMPLING_ADVICE,
    "conversation": "send previous_response_id",
    "function_call": "send tools and tool_choice",
    "functions": "send tools and tool_choice",
    "logprobs": 'send include: ["message.output_text.logprobs"], or top_logprobs',
    "max_completion_tokens": "send max_output_tokens",
    "max_tokens": "send max_output_tokens",
    "messages": "send input",
    "n_predict": "send max_output_tokens",
    "reasoning_effort": "send reasoning.effort",
    "response_format": "send text.format",
}
HTTP_NOT_HONOURED: NotHonoured = {**_NOT_HONOURED, "credits": (), "stream_id": ()}
SOCKET_NOT_HONOURED: NotHonoured = {  # it always streams, to somebody
    **_NOT_HONOURED,
    "background": (False,),
    "background_options": (),
    "stream": (True,),
}
HTTP_ADVICE: Advice = {
    **_ADVICE,
    "credits": "send it over the WebSocket",
    "stream_id": "send it over the WebSocket",
}
SOCKET_ADVICE: Advice = {
    **_ADVICE,
    "background": "send it to POST /v1/responses",
    "background_options": "send them to POST /v1/responses",
    "stream": "leave it out: here all responses stream",
}

Includable: TypeAlias = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ReasoningFields(Struct, frozen=True):
    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class StreamOptionsFields(Struct, frozen=True):
    include_obfuscation: bool | None = None
    resumable: bool | None = None  # its events are kept, for a reader that comes back


class BackgroundOptions(Struct, frozen=True):
    completion_window: str | None = None
    continuation_id: str | None = None


class PromptCacheOptions(Struct, frozen=True):
    comparison_response_id: str | None = None
    mode: Literal["implicit", "explicit"] | None = None
    prewarm: bool | None = None
    ttl: Literal["30m", "12h"] | None = None


class ResponseRequest(StructureFields, kw_only=True):
    """What a client asks for. `check` refuses what can't be honoured."""

    input: Input | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[Includable] | None = None
    previous_response_id: Name | None = None
    metadata: Metadata | None = None
    text: Annotated[TextFields, at_most(MAX_STRUCTURE_BYTES)] | None = None
    reasoning: ReasoningFields | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceFields | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: StreamOptionsFields | None = None
    background: bool | None = None
    background_options: BackgroundOptions | None = None
    generate: bool | None = None  # false: only prepare what a later request goes on from
    credits: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # events that may be sent
    prompt_cache_key: Label | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: CacheRetention | None = None
    safety_identifier: Label | None = None
    service_tier: Label | None = None
    store: bool | None = None
    user: Label | None = None

    def check(self) -> None:
        """Raise InvalidRequestError for what this server can't do."""
        if self.text is not None:
            _require_default("text.verbosity", self.text.verbosity, "medium")
        if self.reasoning is not None:
            _require_default("reasoning.summary", self.reasoning.summary, "auto")
            _require_default("reasoning.generate_summary", self.reasoning.generate_summary, "auto")
            _require_default("reasoning.context", self.reasoning.context, "auto")
            _require_default("reasoning.mode", self.reasoning.mode, "standard")
        if self.prompt_cache_options is not None:
            compared = self.prompt_cache_options.comparison_response_id
            _require_default("prompt_cache_options.comparison_response_id", compared, None)
        self._check_background()

    def _check_background(self) -> None:
        options = self.background_options
        if options is not None:
            window = options.completion_window
            _require_default("background_options.completion_window", window, "soonest")
        if self.background and self.store is False:
            raise InvalidRequestError(
                "store: expected true with background, as its client comes back for the response; "
                "leave it out",
                param="store",
            )

    @property
    def generates(self) -> bool:
        """Whether there is to be an answer, and not only its prompt in the cache."""
        options = self.prompt_cache_options
        return self.generate is not False and not (options is not None and options.prewarm)

    def answer_structure(self) -> Structure | None:
        """What the answer is to match. InvalidRequestError."""
        found = (read_format(self.text), self.structure())
        return agreed([structure for structure in found if structure is not None])

    @contextmanager
    def own_field_names(self) -> Iterator[None]:
        """Let errors about this request name the fields that the client sent."""
        structure = self.answer_structure()
        names = {
            "messages": "input",
            "prompt": "input",
            "max_tokens": "max_output_tokens",
        }
        if structure is None:
            names |= tool_field_names(self.tools or ())
        else:
            names["structured_outputs"] = structure.field
        try:
            with renaming_fields(names):
                yield
        except InvalidRequestError as error:  # here a tool has no `function` around it
            error.message = _OF_FUNCTION.sub(r"\1", error.message)
            error.args = (error.message,)
            error.param = _OF_FUNCTION.sub(r"\1", error.param or "") or None
            raise

    def template_variables(self) -> TemplateKwargs:
        """What the chat template is told besides the conversation and its tools."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return template_variables(self.chat_template_kwargs, effort)

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """`top_logprobs` asks for logprobs, with or without `include`. `defaults` are the
        checkpoint's."""
        included = "message.output_text.logprobs" in (self.include or ())
        wanted = self.top_logprobs or (0 if included else None)
        return self.to_sampling_params(defaults, max_tokens=self.max_output_tokens, logprobs=wanted)

    def to_response(
        self, response_id: str, model: str, sampling: SamplingParams, *, is_stored: bool
    ) -> Response:
        """The Response at its creation."""
        reasoning = self.reasoning or ReasoningFields()
        return Response(
            id=response_id,
            created_at=int(time.time()),
            status="queued" if self.background else "in_progress",
            background=bool(self.background),
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            max_tool_calls=self.max_tool_calls,
            metadata=self.metadata or {},
            model=model,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            previous_response_id=self.previous_response_id,
            prompt_cache_key=self.prompt_cache_key,
            prompt_cache_retention=self.prompt_cache_retention,
            reasoning=ReasoningConfig(effort=reasoning.effort),
            safety_identifier=self.safety_identifier,
            store=is_stored,
            temperature=sampling.temperature,
            text=text_config(self.text),
            tool_choice=Raw(encode(self.tool_choice or "auto")),
            tools=Raw(encode(self.tools or ())),
            top_logprobs=self.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation=self.truncation or "disabled",
            user=self.user,
        )


def _require_default(param: str, value: str | None, default: str | None) -> None:
    if value is not None and value != default:
        expected = "null" if default is None else repr(default)
        raise InvalidRequestError(
            f"{param}: expected {expected}, got {value!r:.100}, which this server can't do; "
            "leave it out",
            param=param,
            code="unsupported",
        )
