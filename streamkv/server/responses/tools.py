"""Tools, `tool_choice` and `text.format` as the Responses API writes them.

Owns their wire types, and their meaning in the terms that chat completions have too (`tools`,
`response_format`). Knows nothing of how a model is told of tools or kept to a format. Invariant:
what a response tells of them is what the client sent, so far as it is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Required, TypeAlias, cast

from msgspec import UNSET, Meta, Raw, Struct

from ...errors import InvalidRequestError
from ...sampling import StructuredOutputs
from ..bounds import at_most
from ..response_format import NULL, Structure
from ..tools import (
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    AllowedToolList,
    AllowedTools,
    Choice,
    Function,
    FunctionFields,
    FunctionName,
    FunctionNamed,
    NamedTool,
    Tool,
    read_choice,
)
from ..wire import renaming_fields
from .object import TextConfig, TextFormat

# --- tools ------------------------------------------------------------------------------------


class ToolFields(FunctionFields, total=False):
    """A tool as the client sends it. Of those that aren't functions only the type is read."""

    type: Required[str]
    name: FunctionName | None


Tools: TypeAlias = Annotated[list[ToolFields], Meta(max_length=MAX_TOOLS), at_most(MAX_TOOLS_BYTES)]


def read_tools(tools: Sequence[ToolFields] | None) -> list[Tool]:
    """The tools as chat completions have them. InvalidRequestError."""
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]


def _tool(tool: ToolFields, param: str) -> Tool:
    if tool["type"] != "function":
        raise InvalidRequestError(
            f"{param}.type: expected 'function', got {tool['type']!r:.100}; this server has no "
            "tools of its own",
            param=f"{param}.type",
            code="unsupported",
        )
    given = {key: value for key, value in tool.items() if key != "type" and value is not None}
    if "name" not in given:
        raise InvalidRequestError(f"{param}.name: required field is missing", param=f"{param}.name")
    return Tool(type="function", function=cast("Function", given))


# --- tool_choice ------------------------------------------------------------------------------


class NamedToolFields(Struct, frozen=True, omit_defaults=True):
    """Of `tool_choice`, and of its `tools`."""

    type: str
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedToolFields], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None


ToolChoiceFields: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedToolFields, at_most(MAX_TOOLS_BYTES)
]


def read_tool_choice(given: ToolChoiceFields | None, tools: Sequence[Tool]) -> Choice:
    """What it means. InvalidRequestError if that can't be done."""
    if not isinstance(given, NamedToolFields):
        return read_choice(given, tools)
    param = "tool_choice"
    if given.type == "function":
        return read_choice(NamedTool(FunctionNamed(_name(given, param))), tools)
    if given.type != "allowed_tools":
        raise InvalidRequestError(
            f"{param}.type: expected function or allowed_tools, got {given.type!r:.100}",
            param=f"{param}.type",
            code="unsupported",
        )
    for name in ("mode", "tools"):
        if getattr(given, name) is None:
            raise InvalidRequestError(
                f"{param}.{name}: required field is missing", param=f"{param}.{name}"
            )
    names = [_name(tool, f"{param}.tools[{i}]") for i, tool in enumerate(given.tools or ())]
    allowed = [NamedTool(FunctionNamed(name)) for name in names]
    return read_choice(AllowedTools(AllowedToolList(given.mode or "auto", allowed)), tools)


def _name(tool: NamedToolFields, param: str) -> str:
    if tool.type != "function":
        raise InvalidRequestError(
            f"{param}.type: expected 'function', got {tool.type!r:.100}",
            param=f"{param}.type",
            code="unsupported",
        )
    if tool.name is None:
        raise InvalidRequestError(f"{param}.name: required field is missing", param=f"{param}.name")
    return tool.name


# --- text.format ------------------------------------------------------------------------------


class FormatFields(Struct, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=256)] | None = None
    schema: Raw = NULL
    description: str | None = None
    strict: bool | None = None


class TextFields(Struct, frozen=True):
    format: FormatFields | None = None
    verbosity: str | None = None


def read_format(text: TextFields | None) -> Structure | None:
    """What the answer is to match, with or without `strict`. InvalidRequestError."""
    given = None if text is None else text.format
    if given is None or given.type == "text":
        return None
    field = "text.format"
    if given.type == "json_object":
        return Structure(StructuredOutputs(json_object=True), field)
    if given.schema == NULL:
        raise InvalidRequestError(
            f"{field}.schema: required field is missing", param=f"{field}.schema"
        )
    with renaming_fields({"structured_outputs.json": f"{field}.schema"}):
        return Structure(StructuredOutputs(json=given.schema), field)


def text_config(text: TextFields | None) -> TextConfig:
    """What a response tells of its format."""
    given = None if text is None else text.format
    if given is None or given.type != "json_schema":
        return TextConfig(TextFormat(type="text" if given is None else given.type))
    return TextConfig(
        TextFormat(
            type="json_schema",
            name=given.name or "response",
            schema=given.schema.copy(),
            description=UNSET if given.description is None else given.description,
            strict=UNSET if given.strict is None else given.strict,
        )
    )
