"""Chat messages as clients send them, and what else a chat template reads.

Owns the wire types of a conversation, shared by chat completions and /tokenize: dicts, which
chat templates read (see `text.chat_messages`). Knows nothing about generation.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, Required, TypeAlias, TypedDict

from msgspec import Meta
from starlette.requests import HTTPConnection

from ..engine.encoding import is_long
from ..errors import InvalidRequestError
from ..text.chat_messages import template_messages
from .bounds import at_most
from .tools import FunctionName
from .wire import server_config

MAX_DOCUMENTS = 1024
MAX_DOCUMENTS_BYTES = 1 << 22
MAX_TEMPLATE_BYTES = 1 << 17  # of a client's variables

TemplateKwargs: TypeAlias = Annotated[dict[str, Any], at_most(MAX_TEMPLATE_BYTES)]
ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_OWN_NAMES = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "continue_final_message",
        "documents",
        "messages",
        "must_fit",
        "self",
        "tools",
    }
)


class ContentPart(TypedDict, total=False):
    type: Required[str]
    text: str | None
    refusal: str | None


class SpokenAnswer(TypedDict):
    id: str


class FunctionCall(TypedDict):
    name: FunctionName
    arguments: str


class ToolCall(TypedDict, total=False):
    id: str | None
    type: Literal["function"]
    function: Required[FunctionCall]


class Message(TypedDict, total=False):
    role: Required[Literal["system", "developer", "user", "assistant", "tool", "function"]]
    content: str | list[ContentPart] | None
    name: str | None
    refusal: str | None
    audio: SpokenAnswer | None  # refused, not skipped
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCall] | None
    function_call: FunctionCall | None
    tool_call_id: str | None


Messages: TypeAlias = Annotated[list[Message], Meta(min_length=1)]

Documents: TypeAlias = Annotated[
    list[dict[str, str]], Meta(max_length=MAX_DOCUMENTS), at_most(MAX_DOCUMENTS_BYTES)
]


async def last_text(messages: Messages) -> str:
    """What the last message says. InvalidRequestError."""
    last = messages[-1:]
    work = functools.partial(template_messages, last)
    found = await asyncio.to_thread(work) if is_long(last, {}) else work()
    text: str = found[0]["content"]
    return text


class TemplateFields(Protocol):
    """What requests with messages say to the chat template."""

    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def add_special_tokens(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> TemplateKwargs | None: ...
    @property
    def documents(self) -> Documents | None: ...


def template_arguments(
    body: TemplateFields,
    connection: HTTPConnection,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    reasoning_effort: ReasoningEffort | None = None,
) -> dict[str, Any]:
    """What `AsyncEngine.encode_chat` takes besides the messages. InvalidRequestError."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message: expected add_generation_prompt to be false, got true: an "
            "answer goes on with the last message, or begins one; leave one out",
            param="continue_final_message",
        )
    if body.chat_template is not None and not server_config(connection).trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template: this server takes none from requests; leave it out, or start the "
            "server with --trust-request-chat-template",
            param="chat_template",
            code="unsupported",
        )
    return {
        "add_generation_prompt": not continues and body.add_generation_prompt is not False,
        "add_special_tokens": bool(body.add_special_tokens),
        "continue_final_message": continues,
        "chat_template": body.chat_template,
        "documents": body.documents,
        "tools": tools,
        **template_variables(body.chat_template_kwargs, reasoning_effort),
    }


def template_variables(
    kwargs: TemplateKwargs | None, reasoning_effort: ReasoningEffort | None = None
) -> TemplateKwargs:
    """A client's own template variables; InvalidRequestError when they hide the request's. The
    effort is one too; "none" also sets the one by which many templates leave reasoning out."""
    own = kwargs or {}
    taken = _OWN_NAMES & own.keys()
    if taken:
        raise InvalidRequestError(
            f"chat_template_kwargs: {min(taken)!r} can't be set here; it follows from the request",
            param="chat_template_kwargs",
        )
    if reasoning_effort is None:
        return own
    given: TemplateKwargs = {"reasoning_effort": reasoning_effort}
    if reasoning_effort == "none":
        given["enable_thinking"] = False
    return given | own


def wants_reasoning(variables: TemplateKwargs) -> bool:
    """Whether a client with these template variables leaves it to the model."""
    return variables.get("enable_thinking") is not False
