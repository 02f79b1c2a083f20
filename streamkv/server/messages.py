"""Chat messages: what clients send, and what a chat template reads.

Owns the wire types of a conversation, shared by chat completions and /tokenize. Knows nothing
about generation. Invariant: what can't be handed to the template is an InvalidRequestError that
names the message and the part.

`developer` is handed over as `system`, which is what templates know; text parts are joined by
newlines; the arguments of earlier tool calls, JSON in a string on the wire, are objects to the
template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ..engine.admission import check_num_messages
from ..errors import InvalidRequestError

TemplateKwargs: TypeAlias = dict[str, str | int | float | bool | None]

_OWN_NAMES = frozenset({"add_generation_prompt", "documents", "messages", "self", "tools"})


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


Messages: TypeAlias = Annotated[list[Message], Meta(min_length=1)]


def template_messages(messages: Sequence[Message], max_messages: int) -> list[dict[str, Any]]:
    """The messages as a chat template reads them; InvalidRequestError names the part at fault.

    ContextLengthError for more than `max_messages`, tool calls counted as messages, before any is
    looked at.
    """
    num_calls = sum(len(item.tool_calls) for item in messages if item.tool_calls)
    check_num_messages(len(messages) + num_calls, max_messages)
    return [_template_message(item, f"messages[{i}]") for i, item in enumerate(messages)]


def _template_message(message: Message, param: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": _content_text(message, param)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            _template_tool_call(call, f"{param}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    return result


def _content_text(message: Message, param: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise InvalidRequestError(
            f"{param}.content: expected a string or text parts, got null", param=f"{param}.content"
        )
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            where = f"{param}.content[{i}]"
            raise InvalidRequestError(
                f'{where}: expected {{"type": "text", "text": "..."}}, got type {part.type!r}; '
                "this server reads text only",
                param=where,
            )
    return "\n".join(part.text or "" for part in content)


def _template_tool_call(call: ToolCall, param: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        where = f"{param}.function.arguments"
        raise InvalidRequestError(
            f"{where}: expected a JSON object in a string", param=where
        ) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


def template_kwargs(kwargs: TemplateKwargs | None, param: str) -> TemplateKwargs:
    """A client's own template variables; InvalidRequestError when they hide the request's."""
    taken = _OWN_NAMES & (kwargs or {}).keys()
    if taken:
        raise InvalidRequestError(
            f"{param}: {min(taken)!r} can't be set here; it follows from the request", param=param
        )
    return kwargs or {}
