"""Chat messages: what people write, as chat templates read it.

Owns that for everyone who renders a template: the server, `LLM.chat` and the commands. Knows
neither templates nor where messages come from. Invariant: what can't be handed to a template is an
InvalidRequestError that names the message and the part; what was made here is left as it is.

`developer` becomes `system` and `function` becomes `tool`, which is what templates know; text parts
are joined by newlines; what an assistant refused in is what it said, and one that only called tools
has said ""; what it reasoned is `reasoning_content`, whatever it was called; OpenAI's older
`function_call` is one of `tool_calls`; the arguments of these, JSON in a string in OpenAI's form,
become objects. Arguments that are no JSON object, as of a call that was cut, become an empty one:
every template can write that, and the conversation goes on. A key with None is left out, others are
handed over as they are.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from ..errors import InvalidRequestError

_ROLES = {"developer": "system", "function": "tool"}
_REASONING = ("reasoning_content", "reasoning", "thinking")  # what clients call it


class Arguments(dict[str, Any]):
    """Arguments of a call. Templates that take them for text find the JSON that they stand for."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return f"{self}{other}"

    def __radd__(self, other: str) -> str:
        return f"{other}{self}"


def read_arguments(given: object) -> Arguments:
    """Arguments of a call, an object or the JSON of one; empty ones for all else."""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return Arguments()
    return Arguments(given) if isinstance(given, Mapping) else Arguments()


def template_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages as a template reads them. InvalidRequestError."""
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def num_chars(value: object, enough: int) -> int:
    """About how much text there is in messages, keys included. One that is more than `enough` is
    not exact."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        total = 2 * len(value)
        items: Iterable[object] = itertools.chain(value, value.values())
    elif isinstance(value, Sequence):
        total, items = len(value), value
    else:
        return 1
    for item in items:
        if total > enough:
            break
        total += num_chars(item, enough - total)
    return total


def _message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        _refuse(name, "a dict with role and content", f"{message!r:.100}")
    found = {key: value for key, value in message.items() if value is not None}
    if "audio" in found:
        _refuse(f"{name}.audio", "null, as this model reads text only", "an answer that was spoken")
    found["role"] = _ROLES.get(found["role"], found["role"])
    found["content"] = _content(found, f"{name}.content")
    if "refusal" in found:
        found["content"] = _with_refusal(found["content"], found.pop("refusal"), f"{name}.refusal")
    reasoning = next((text for key in _REASONING if isinstance(text := found.get(key), str)), None)
    if reasoning is not None:
        found["reasoning_content"] = reasoning
    calls = _tool_calls(found.pop("tool_calls", ()), f"{name}.tool_calls")
    if "function_call" in found:
        function = _tool_call(found.pop("function_call"), f"{name}.function_call")
        calls.append({"type": "function", "function": function})
    if calls:
        found["tool_calls"] = calls
    return found


def _with_refusal(content: str, refusal: object, name: str) -> str:
    if not isinstance(refusal, str):
        _refuse(name, "a string", type(refusal).__name__)
    return "\n".join(text for text in (content, refusal) if text)


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
        case {"type": "text" | "refusal" as kind}:
            got = f"a {kind} without its text"
        case {"type": kind}:
            got = f"type {kind!r:.100}"
        case _:
            got = type(part).__name__
    _refuse(name, '{"type": "text", "text": "..."}', f"{got}; this model reads text only")


def _tool_calls(calls: object, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        _refuse(name, "a list", type(calls).__name__)
    return [_tool_call(call, f"{name}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, name: str) -> Mapping[str, Any]:
    """The call, of OpenAI's form or that without `function` around it, with its arguments read."""
    if not isinstance(call, Mapping):
        _refuse(name, "a dict with type and function", f"{call!r:.100}")
    if "function" in call:
        function = _tool_call(call["function"], f"{name}.function")
        return {"type": "function", **call, "function": function}
    if "arguments" not in call:
        return call
    return {**call, "arguments": read_arguments(call["arguments"])}


def _refuse(name: str, expected: str, got: str) -> NoReturn:
    raise InvalidRequestError(f"{name}: expected {expected}, got {got}", param=name)
