"""Answers cut into pieces, parsed and joined again; tokenizers of models with tools."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hypothesis import strategies as st
from tiny import tiny_gguf_metadata

from streamkv.text.answer_parts import AnswerParser, ContentPart, Part, ReasoningPart
from streamkv.text.tokenizer import Tokenizer


class Call(NamedTuple):
    id: str
    name: str
    arguments: str


class Reasoning(NamedTuple):
    text: str


Joined = list[str | Reasoning | Call]  # str: content


def numbers() -> Callable[[], str]:
    """Ids in order: "0", "1", …"""
    count = itertools.count()
    return lambda: str(next(count))


def joined(parts: Iterable[Part]) -> Joined:
    """Neighbours of a kind as one."""
    found: Joined = []
    calls: dict[int, int] = {}
    for part in parts:
        last = found[-1] if found else None
        match part:
            case ContentPart(text) if isinstance(last, str):
                found[-1] = last + text
            case ContentPart(text):
                found.append(text)
            case ReasoningPart(text) if isinstance(last, Reasoning):
                found[-1] = Reasoning(last.text + text)
            case ReasoningPart(text):
                found.append(Reasoning(text))
            case (index, call_id, name, arguments) if index not in calls:
                assert index == len(calls) and call_id and name
                calls[index] = len(found)
                found.append(Call(call_id, name, arguments))
            case (index, call_id, name, arguments):
                assert index == len(calls) - 1 and not call_id and not name
                call = found[calls[index]]
                assert isinstance(call, Call)
                found[calls[index]] = call._replace(arguments=call.arguments + arguments)
    return found


def read(parser: AnswerParser, pieces: Iterable[str]) -> Joined:
    """What the parser makes of the pieces."""
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined(parts + parser.finish())


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = sorted(place % (len(text) + 1) for place in places)
    pairs = zip([0, *bounds], [*bounds, len(text)], strict=True)
    return [text[a:b] for a, b in pairs]


def cuts() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 2**16), max_size=12)


def fragments(*own: str) -> st.SearchStrategy[str]:
    """Texts that come near to calls."""
    common = ('{"name": "f", "arguments": {"a": 1}}', '{"name": ', '"f"', '"arguments": ', "{", "}")
    common += ("[", "]", ",", ": ", '"', "\\", "'", "(", ")", "=", "1", "é😀", " ", "\n", "text")
    return st.lists(st.sampled_from(own + common), max_size=14).map("".join)


def tokenizer_with(
    template: str, special: Sequence[str] = (), normal: Sequence[str] = ()
) -> Tokenizer:
    """The tiny tokenizer with another template, and more tokens: special ones, and added ones that
    aren't."""
    metadata = tiny_gguf_metadata(**{"tokenizer.chat_template": template})
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokens += [*special, *normal]
    types += [3] * len(special) + [4] * len(normal)
    return Tokenizer.from_gguf(metadata)
