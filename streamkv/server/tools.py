"""Tools and `tool_choice` as Chat Completions writes them.

Owns their wire types. Knows nothing of how a model is told of tools, nor of how it calls them (see
`answer_format`). Invariant: what is handed on are dicts as the client sent them, for templates
write them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypedDict

from msgspec import Meta, Struct

from ..errors import InvalidRequestError
from .bounds import at_most

MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 1 << 18

FunctionName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class FunctionFields(TypedDict, total=False):
    description: str | None
    parameters: dict[str, Any] | None  # a JSON schema
    strict: bool | None


class Function(FunctionFields):
    name: FunctionName


class Tool(TypedDict):
    type: Literal["function"]
    function: Function


Tools: TypeAlias = Annotated[list[Tool], Meta(max_length=MAX_TOOLS), at_most(MAX_TOOLS_BYTES)]


class FunctionNamed(Struct, frozen=True):
    name: FunctionName


class NamedTool(Struct, frozen=True, tag_field="type", tag="function"):
    """The one tool that is to be called; also an entry of `allowed_tools`."""

    function: FunctionNamed


class AllowedToolList(Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """Of all tools those that may be called."""

    allowed_tools: AllowedToolList


ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools, at_most(MAX_TOOLS_BYTES)
]


class Choice(NamedTuple):
    """What `tool_choice` means, in the terms of `plan_answer`."""

    choice: Literal["none", "auto", "required"]
    name: str | None = None
    allowed: frozenset[str] | None = None


def read_choice(given: ToolChoice | None, tools: Sequence[Tool]) -> Choice:
    """The choice. InvalidRequestError if it names a tool that isn't there, or wants a call where
    there is none."""
    if given is None:
        return Choice("auto")
    if isinstance(given, str):
        if given == "required" and not tools:
            raise InvalidRequestError(
                'tool_choice: expected tools beside "required", got none; send the tools',
                param="tool_choice",
            )
        return Choice(given)
    known = {tool["function"]["name"] for tool in tools}
    if isinstance(given, NamedTool):
        _check_known(given.function.name, known)
        return Choice("required", name=given.function.name)
    allowed = given.allowed_tools
    for tool in allowed.tools:
        _check_known(tool.function.name, known)
    return Choice(allowed.mode, allowed=frozenset(tool.function.name for tool in allowed.tools))


def _check_known(name: str, known: set[str]) -> None:
    if name not in known:
        raise InvalidRequestError(
            f"tool_choice: expected one of the tools, got {name!r:.300}", param="tool_choice"
        )
