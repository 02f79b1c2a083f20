"""Chat messages as clients send them.

Owns the wire types of a conversation, shared by chat completions and /tokenize: dicts, which
chat templates read (see `text.chat_messages`). Knows nothing about generation.
"""

from __future__ import annotations

from typing import Annotated, Literal, Required, TypeAlias, TypedDict

from msgspec import Meta

from ..errors import InvalidRequestError

TemplateKwargs: TypeAlias = dict[str, str | int | float | bool | None]

_OWN_NAMES = frozenset({"add_generation_prompt", "documents", "messages", "self", "tools"})


class ContentPart(TypedDict, total=False):
    type: Required[str]
    text: str | None


class FunctionCall(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict, total=False):
    id: str | None
    type: Literal["function"]
    function: Required[FunctionCall]


class Message(TypedDict, total=False):
    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: str | list[ContentPart] | None
    name: str | None
    tool_calls: list[ToolCall] | None
    tool_call_id: str | None


Messages: TypeAlias = Annotated[list[Message], Meta(min_length=1)]


def template_kwargs(kwargs: TemplateKwargs | None, param: str) -> TemplateKwargs:
    """A client's own template variables; InvalidRequestError when they hide the request's."""
    taken = _OWN_NAMES & (kwargs or {}).keys()
    if taken:
        raise InvalidRequestError(
            f"{param}: {min(taken)!r} can't be set here; it follows from the request", param=param
        )
    return kwargs or {}
