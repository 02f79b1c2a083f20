"""Tools for a model whose chat template doesn't know them, in Hermes' format.

Owns what such a model is told of tools, and how earlier calls and their results are written. Knows
no templates. Invariant: a conversation without tools, calls and results is left as it is.

Models that weren't trained for it follow this more or less; a grammar makes sure that what is
required comes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .json_calls import HERMES_CLOSE, HERMES_OPEN

_INTRODUCTION = f"""\
You can call the functions that are described here, each by a line of JSON:
<tools>
%s
</tools>
To call one, write its name and arguments as a JSON object between these marks:
{HERMES_OPEN}
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
{HERMES_CLOSE}"""


def tell_of_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> list[Mapping[str, Any]]:
    """The messages with what the tools are, at the end of the system message."""
    text = _INTRODUCTION % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if messages and messages[0]["role"] == "system":
        before = messages[0]["content"]
        text = f"{before}\n\n{text}" if before else text
        return [{**messages[0], "content": text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def write_calls(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with calls as the assistant's text, and results, those in a row as one, as the
    user's."""
    found: list[Mapping[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if calls := message.get("tool_calls"):
            texts = [message["content"], *map(_call, calls)]
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**others, "content": "\n".join(text for text in texts if text)}
        elif is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                text = f"{found.pop()['content']}\n{text}"
            message = {"role": "user", "content": text}
        found.append(message)
        was_result = is_result
    return found


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    call = {"name": function.get("name"), "arguments": function.get("arguments", {})}
    return f"{HERMES_OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{HERMES_CLOSE}"
