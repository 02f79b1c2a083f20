"""The body of `POST /v1/responses` and of the socket's `response.create`.

Owns its Structs, what is honoured of them, and their meaning: the conversation that the model
reads, SamplingParams, and the Response that the client sees first. Knows no transport.

Every optional field may be null. A known field that can't be honoured is an InvalidRequestError
that names it. Accepted although they change nothing here are hints (`user`, `safety_identifier`,
`prompt_cache_key`, `prompt_cache_retention`, `service_tier`, `include_obfuscation` in
`stream_options`), `store` (nothing is kept, and the Response says so), and what concerns only tool
calls and reasoning, of which there are none (`parallel_tool_calls`, `max_tool_calls`, `include`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

from msgspec import Meta, Struct

from ..engine.admission import check_num_messages
from ..errors import InvalidRequestError
from ..protocol import MAX_LOGPROBS, RunnerInfo, SamplingParams
from .request_fields import SAMPLING_NOT_HONOURED, GenerationFields
from .response_object import CacheRetention, Response, new_id
from .wire import NotHonoured, renaming_fields

MetadataKey: TypeAlias = Annotated[str, Meta(max_length=64)]
MetadataValue: TypeAlias = Annotated[str, Meta(max_length=512)]

# Values besides null that mean "off"; anything else is refused.
NOT_HONOURED: NotHonoured = {
    **SAMPLING_NOT_HONOURED,
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "logprobs": (False,),  # Chat Completions' names; here: include, text.format, ...
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_cache_options": (),
    "response_format": (),
    "return_token_ids": (False,),
    "tools": ([],),
    "truncation": ("disabled",),
}


class TemplateMessage(TypedDict):
    """One message as chat templates read it."""

    role: str
    content: str


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None


class InputItem(Struct, frozen=True, kw_only=True):
    """A message: OpenAI's EasyInputMessage, Message or ResponseOutputMessage."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None


class TextFormatFields(Struct, frozen=True):
    type: str


class TextFields(Struct, frozen=True):
    format: TextFormatFields | None = None
    verbosity: str | None = None


class ReasoningFields(Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class StreamOptionsFields(Struct, frozen=True):
    include_obfuscation: bool | None = None


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


class ResponseRequest(GenerationFields, kw_only=True):
    """What a client asks for. `check` refuses what can't be honoured."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[Includable] | None = None
    previous_response_id: str | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    stream_options: StreamOptionsFields | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None

    def check(self) -> None:
        """Raise InvalidRequestError for what this server can't do."""
        if self.text is not None:
            kind = None if self.text.format is None else self.text.format.type
            _require_default("text.format.type", kind, "text")
            _require_default("text.verbosity", self.text.verbosity, "medium")
        if self.reasoning is not None:
            _require_default("reasoning.effort", self.reasoning.effort, "none")
            _require_default("reasoning.summary", self.reasoning.summary, None)
            _require_default("reasoning.generate_summary", self.reasoning.generate_summary, None)
            _require_default("reasoning.context", self.reasoning.context, "auto")
            _require_default("reasoning.mode", self.reasoning.mode, "standard")

    def conversation(
        self, previous: Sequence[TemplateMessage], info: RunnerInfo
    ) -> list[TemplateMessage]:
        """The previous response's conversation and this input, without the instructions."""
        if not isinstance(self.input, str | None):
            check_num_messages(self.input, info, "input")
        messages = [*previous, *_input_messages(self.input)]
        if not messages:
            raise InvalidRequestError("input: expected text or at least one item", param="input")
        return messages

    def prompt(self, conversation: Sequence[TemplateMessage]) -> list[TemplateMessage]:
        """What the model reads: instructions never come from a previous response."""
        if self.instructions is None:
            return list(conversation)
        return [TemplateMessage(role="system", content=self.instructions), *conversation]

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """`top_logprobs` asks for logprobs, with or without `include`. `defaults` are the
        checkpoint's."""
        included = "message.output_text.logprobs" in (self.include or ())
        wanted = self.top_logprobs or (0 if included else None)
        return self.to_sampling_params(defaults, max_tokens=self.max_output_tokens, logprobs=wanted)

    def to_response(self, model: str, sampling: SamplingParams) -> Response:
        """The Response at its creation; `request_id` becomes part of its id."""
        return Response(
            id=f"resp_{self.request_id}" if self.request_id else new_id("resp"),
            created_at=int(time.time()),
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            max_tool_calls=self.max_tool_calls,
            metadata=self.metadata or {},
            model=model,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            previous_response_id=self.previous_response_id,
            prompt_cache_key=self.prompt_cache_key,
            prompt_cache_retention=self.prompt_cache_retention,
            safety_identifier=self.safety_identifier,
            temperature=sampling.temperature,
            tool_choice=self.tool_choice or "auto",
            top_logprobs=self.top_logprobs or 0,
            top_p=sampling.top_p,
            user=self.user,
        )


def own_field_names() -> AbstractContextManager[None]:
    """Let the engine's errors about a request name the fields that the client sent."""
    return renaming_fields(
        {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}
    )


def _require_default(param: str, value: str | None, default: str | None) -> None:
    if value is not None and value != default:
        raise InvalidRequestError(
            f"{param}: expected {default!r}, got {value!r}, which this server can't do; "
            "leave it out",
            param=param,
            code="unsupported",
        )


def _input_messages(items: str | list[InputItem] | None) -> list[TemplateMessage]:
    if items is None:
        return []
    if isinstance(items, str):
        return [TemplateMessage(role="user", content=items)]
    return [_message(item, f"input[{index}]") for index, item in enumerate(items)]


def _message(item: InputItem, param: str) -> TemplateMessage:
    if item.type not in (None, "message"):
        raise InvalidRequestError(
            f"{param}.type: expected 'message', got {item.type!r}; send messages only",
            param=f"{param}.type",
            code="unsupported",
        )
    if item.role is None or item.content is None:
        name = "role" if item.role is None else "content"
        raise InvalidRequestError(
            f"{param}.{name}: required field is missing", param=f"{param}.{name}"
        )
    # Open models' chat templates know no "developer"; OpenAI's "system" is the same role.
    role = "system" if item.role == "developer" else item.role
    if isinstance(item.content, str):
        return TemplateMessage(role=role, content=item.content)
    texts = [_text(part, f"{param}.content[{i}]") for i, part in enumerate(item.content)]
    return TemplateMessage(role=role, content="\n".join(texts))


def _text(part: ContentPart, param: str) -> str:
    if part.type not in ("input_text", "output_text"):
        raise InvalidRequestError(
            f"{param}.type: expected 'input_text' or 'output_text', got {part.type!r}; "
            "this model reads text only",
            param=f"{param}.type",
            code="unsupported",
        )
    if part.text is None:
        raise InvalidRequestError(f"{param}.text: required field is missing", param=f"{param}.text")
    return part.text
