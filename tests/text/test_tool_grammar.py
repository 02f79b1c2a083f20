"""Random walks through the grammars of calls: whatever they admit, the parser reads as calls whose
arguments satisfy the schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from text.answers import Call, Joined, Reasoning, numbers, read, tokenizer_with
from tiny import CHATML

from streamkv.errors import InvalidRequestError
from streamkv.text.tokenizer import Tokenizer
from streamkv.text.tool_calls import ToolFormat, answer_parser

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "deep": {"$ref": "#/$defs/deep"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {
        "deep": {
            "type": "object",
            "properties": {"x": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: dict[str, Mapping[str, Any]] = {
    "get_weather": WEATHER,
    "now": {"type": "object"},
    "get_time": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "name": "now", "parameters": None},  # as in responses
    {"type": "function", "function": {"name": "get_time", "parameters": SCHEMAS["get_time"]}},
    {"type": "web_search"},
]
THINK = "<think></think>"
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes": ("{{ tools }}<tool_call>", ()),
    "hermes, untaught": (CHATML, ()),
    "hermes, special marks": ("{{ tools }}<tool_call>", ("<tool_call>", "</tool_call>")),
    "hermes, thinking": ("{{ tools }}<tool_call>" + THINK, ()),
    "hermes, thinking by special marks": (
        "{{ tools }}<tool_call>" + THINK,
        ("<think>", "</think>"),
    ),
    "llama3_json": ("{{ tools }}<|python_tag|>", ()),
    "pythonic": ("{{ tools }}[func_name1(a=b)]", ()),
    "mistral": ("{{ tools }}[TOOL_CALLS]", ("[TOOL_CALLS]",)),
    "mistral, names first": ("{{ tools }}[TOOL_CALLS][ARGS]", ("[TOOL_CALLS]", "[ARGS]")),
}
END = 2  # <|im_end|>


class Walk:
    """Random tokens that a grammar admits."""

    def __init__(self, tokenizer: Tokenizer, grammar: str) -> None:
        self._tokenizer = tokenizer
        size = tokenizer.vocab_size
        self._tokens = LLTokenizer(tokenizer._backend.to_str(), n_vocab=size, eos_token=END)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens)
        assert not is_error, messages
        self._grammar = grammar
        closing = (b'"', b"}", b"]", b")", b'"}', b"<", b">", b"/")
        self._closing = {i for i in range(size) if tokenizer.token_bytes(i) in closing}
        self._closing |= set(tokenizer.special_ids.values())

    def text(self, seed: int, *, num_tokens: int = 400, prefix: str = "") -> str | None:
        """None if it doesn't come to an end."""
        source = random.Random(seed)
        matcher = LLMatcher(self._tokens, self._grammar)
        found = self._tokenizer.encode(prefix)
        assert matcher.consume_tokens(found)
        for _ in range(num_tokens):
            mask = matcher.compute_bitmask()
            allowed = {i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1}
            if matcher.is_accepting() and (allowed == {END} or source.random() < 0.3):
                skip = not self._shows()
                return self._tokenizer.decode(found, skip_special_tokens=skip)
            allowed -= {END}
            some = allowed & self._closing if source.random() < 0.5 else allowed
            token_id = source.choice(sorted(some or allowed))
            assert matcher.consume_token(token_id), matcher.get_error()
            found.append(token_id)
        return None

    def admits(self, text: str) -> bool:
        """Whether it is a whole answer."""
        matcher = LLMatcher(self._tokens, self._grammar)
        token_ids = self._tokenizer.encode(text)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def _shows(self) -> bool:
        formats = (self._tokenizer.tool_format, self._tokenizer.reasoning_format)
        return any(found is not None and found.shows_special_tokens for found in formats)


def format_of(tokenizer: Tokenizer) -> ToolFormat:
    assert tokenizer.tool_format is not None
    return tokenizer.tool_format


def parse(tokenizer: Tokenizer, text: str, *, is_open: bool = False) -> Joined:
    parser = answer_parser(
        tokenizer,
        tools=True,
        reasoning=True,
        prompt_ends_in_reasoning=is_open,
        new_id=numbers(),
    )
    assert parser is not None
    return read(parser, text)


def check(parts: Joined) -> list[Call]:
    """That there are only calls, after reasoning, with arguments by the schemas."""
    calls = [part for part in parts if isinstance(part, Call)]
    assert calls and parts[len(parts) - len(calls) :] == calls
    assert all(isinstance(part, Reasoning) for part in parts[: len(parts) - len(calls)])
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return calls


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("parallel", [True, False])
def test_what_a_grammar_admits_are_calls_by_the_schemas(kind: str, parallel: bool) -> None:
    tokenizer = tokenizer_with(*TEMPLATES[kind])
    grammar = format_of(tokenizer).grammar(TOOLS, parallel=parallel)
    walk = Walk(tokenizer, grammar)
    texts = [text for seed in range(16) if (text := walk.text(seed)) is not None]
    calls = [check(parse(tokenizer, text)) for text in texts]
    assert len(calls) >= 3
    assert max(map(len, calls)) > 1 if parallel else set(map(len, calls)) == {1}
    assert len({call.name for some in calls for call in some}) > 1


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_tool_that_is_named_is_called_once(kind: str) -> None:
    tokenizer = tokenizer_with(*TEMPLATES[kind])
    walk = Walk(tokenizer, format_of(tokenizer).grammar(TOOLS, name="get_weather"))
    texts = [text for seed in range(12) if (text := walk.text(seed)) is not None]
    assert len(texts) >= 2
    for text in texts:
        (call,) = check(parse(tokenizer, text))
        assert call.name == "get_weather"


@pytest.mark.parametrize("kind", ["hermes, thinking", "hermes, thinking by special marks"])
def test_reasoning_may_come_first_and_may_have_begun(kind: str) -> None:
    tokenizer = tokenizer_with(*TEMPLATES[kind])
    for is_open, opening in ((False, "<think>\n"), (True, "")):
        grammar = format_of(tokenizer).grammar(TOOLS, prompt_ends_in_reasoning=is_open)
        walk = Walk(tokenizer, grammar)
        prefix = f'{opening}Hm, <tool_call> or "not"?\n</think>\n\n'
        texts = [text for seed in range(6) if (text := walk.text(seed, prefix=prefix)) is not None]
        for text in texts:
            parts = parse(tokenizer, text, is_open=is_open)
            check(parts)
            assert parts[0] == Reasoning('Hm, <tool_call> or "not"?')
        assert texts


def test_a_grammar_without_reasoning_admits_none() -> None:
    tokenizer = tokenizer_with(*TEMPLATES["hermes, thinking"])
    grammar = format_of(tokenizer).grammar(TOOLS, reasoning=False)
    size = tokenizer.vocab_size
    tokens = LLTokenizer(tokenizer._backend.to_str(), n_vocab=size, eos_token=END)
    assert LLMatcher(tokens, grammar).try_consume_tokens(tokenizer.encode("<think>")) < 3


@pytest.mark.parametrize(
    ("kind", "tools", "name", "param", "named"),
    [
        ("hermes", [], None, "tools", "a function to call, got none"),
        ("hermes", TOOLS, "nope", "tools", "'nope'"),
        ("hermes", [{"type": "function", "function": {"name": ""}}], None,
         "tools[0].function.name", "a name"),
        ("hermes", [{"type": "function", "function": {"name": "f", "parameters": [1]}}], None,
         "tools[0].function.parameters", "a JSON Schema, got list"),
        ("hermes", [{"type": "function", "name": "f", "parameters": {"type": "string"}}], None,
         "tools[0].parameters", "the schema of an object"),
        ("pythonic", [{"name": "f", "parameters": {"properties": {"a b": {}}}}], None,
         "tools[0].parameters", "a b"),
        ("pythonic", [{"name": "f", "parameters": {"anyOf": []}}], None,
         "tools[0].parameters", "anyOf"),
    ],
)  # fmt: skip
def test_tools_that_no_grammar_can_be_made_of_are_refused_by_their_place(
    kind: str, tools: list[dict[str, Any]], name: str | None, param: str, named: str
) -> None:
    tool_format = format_of(tokenizer_with(*TEMPLATES[kind]))
    with pytest.raises(InvalidRequestError, match="expected") as caught:
        tool_format.grammar(tools, name=name)
    assert caught.value.param == param and named in caught.value.message


def test_a_schema_of_a_tool_that_is_not_strict_may_have_keywords_that_are_not_known() -> None:
    tokenizer = tokenizer_with(*TEMPLATES["hermes"])
    parameters = {"properties": {"a": {"type": "string", "format": "regex"}}}
    function = {"name": "f", "parameters": parameters}
    tokens = LLTokenizer(tokenizer._backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=END)
    for is_strict in (False, True):
        tool = {"type": "function", "function": {**function, "strict": is_strict}}
        grammar = format_of(tokenizer).grammar([tool])
        is_error, _ = LLMatcher.validate_grammar_with_warnings(grammar, tokens)
        assert is_error is is_strict


LEADS = {"hermes": "Let me see.\n", "mistral": "Let me see. ", "llama3_json": "", "pythonic": ""}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_where_no_call_is_required_text_is_free_and_calls_obey(kind: str) -> None:
    tokenizer = tokenizer_with(*TEMPLATES[kind])
    tool_format = format_of(tokenizer)
    free = Walk(tokenizer, tool_format.grammar(TOOLS, required=False))
    texts = ["", "No.", "Is 2 < 3?\n[I] think {so} <tool", "日本 🙂 <|im_start", " \n well"]
    for text in [*texts, "<think>\nhm</think>\n\nYes"]:
        assert free.admits(text), text
    walk = Walk(tokenizer, tool_format.grammar(TOOLS))
    calls = [text for seed in range(12) if (text := walk.text(seed)) is not None]
    assert calls
    for text in calls:
        lead = "" if text.startswith("<think>") else LEADS[tool_format.name]
        assert free.admits(lead + text), text
        for call in check(parse(tokenizer, text)):
            assert not free.admits(text.replace(call.name, "unknown")), "no such tool"


def test_reasoning_that_has_begun_comes_before_free_text() -> None:
    tokenizer = tokenizer_with(*TEMPLATES["hermes, thinking"])
    tool_format = format_of(tokenizer)
    free = Walk(
        tokenizer, tool_format.grammar(TOOLS, required=False, prompt_ends_in_reasoning=True)
    )
    assert free.admits("Hm, <tool_call>.\n</think>\n\nIt is so.")
    assert not free.admits("It is so.")
