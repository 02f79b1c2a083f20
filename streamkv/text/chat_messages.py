"""Chat messages: what people write, as chat templates read it.

Owns that for everyone who renders a template: the server, `LLM.chat` and the commands. Knows
neither templates nor where messages come from. Invariant: what can't be handed to a template is an
InvalidRequestError that names the message and the part; what was made here is left as it is.

`developer` becomes `system`, which is what templates know; text parts are joined by newlines; an
assistant that only called tools has said ""; what it reasoned is `reasoning_content`, whatever it
was called; the arguments of tool calls, JSON in a string in OpenAI's form, become objects. A key
with None is left out, others are handed over as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from ..errors import InvalidRequestError

_REASONING = ("reasoning_content", "reasoning", "thinking")  # what clients call it


class Arguments(dict[str, Any]):
    """Arguments of a call. Templates that take them for text find the JSON that they stand for."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return f"{self}{other}"

    def __radd__(self, other: str) -> str:
        return f"{other}{self}"


def template_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages as a template reads them. InvalidRequestError."""
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def num_chars(value: object, enough: int) -> int:
    """About how much text there is in messages. One that is more than `enough` is not exact."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = tuple(value.values())
    elif not isinstance(value, Sequence):
        return 1
    total = len(value)
    for item in value:
        if total > enough:
            break
        total += num_chars(item, enough - total)
    return total


def _message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        _refuse(name, "a dict with role and content", f"{message!r:.100}")
    found = {key: value for key, value in message.items() if value is not None}
    if found["role"] == "developer":
        found["role"] = "system"
    found["content"] = _content(found, f"{name}.content")
    reasoning = next((text for key in _REASONING if isinstance(text := found.get(key), str)), None)
    if reasoning is not None:
        found["reasoning_content"] = reasoning
    calls = found.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            _refuse(f"{name}.tool_calls", "a list", type(calls).__name__)
        found["tool_calls"] = [
            _tool_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return found


def _content(message: Mapping[str, Any], name: str) -> str:
    match message.get("content"):
        case str(text):
            return text
        case None if message["role"] == "assistant":
            return ""
        case [*parts]:
            return "\n".join(_text(part, f"{name}[{index}]") for index, part in enumerate(parts))
        case other:
            got = "null" if other is None else type(other).__name__
            _refuse(name, "a string or text parts", got)


def _text(part: object, name: str) -> str:
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": kind}:
            got = f"type {kind!r}"
        case _:
            got = type(part).__name__
    _refuse(name, '{"type": "text", "text": "..."}', f"{got}; this model reads text only")


def _tool_call(call: object, name: str) -> Mapping[str, Any]:
    """The call, of OpenAI's form or that without `function` around it, with its arguments read."""
    if not isinstance(call, Mapping):
        _refuse(name, "a dict with type and function", f"{call!r:.100}")
    if "function" in call:
        function = _tool_call(call["function"], f"{name}.function")
        return {"type": "function", **call, "function": function}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _arguments(arguments, f"{name}.arguments")
    return {**call, "arguments": Arguments(arguments)} if isinstance(arguments, Mapping) else call


def _arguments(text: str, name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        _refuse(name, "a JSON object in a string", f"{text!r:.100}")


def _refuse(name: str, expected: str, got: str) -> NoReturn:
    raise InvalidRequestError(f"{name}: expected {expected}, got {got}", param=name)
