"""What is seen to before the library reads a schema: bounds of numbers, which hold or are refused,
and formats that mean nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher
from tiny import tiny_tokenizer

from streamkv.errors import InvalidRequestError
from streamkv.structured import StructuredOutputs
from streamkv.text.grammar import GrammarCompiler
from streamkv.text.grammar_source import GrammarError, grammar_source
from streamkv.text.grammar_tokens import Greedy, Vocabulary, build_tokenizer
from streamkv.text.json_schema import check_bounds, without_hints
from streamkv.text.tool_grammar import read_tools

BYTES = Vocabulary([bytes([i]) for i in range(256)] + [b""], [], [256])
TOKENIZER = build_tokenizer(BYTES, Greedy(BYTES))
LIMITS = (1 << 53, 1 << 63, 1 << 64, 10**18, 10**25)
AROUND = sorted({sign * (x + d) for x in LIMITS for d in (-1, 0, 1) for sign in (1, -1)})
HOLDS = {
    "minimum": lambda number, bound: number >= bound,
    "maximum": lambda number, bound: number <= bound,
    "exclusiveMinimum": lambda number, bound: number > bound,
    "exclusiveMaximum": lambda number, bound: number < bound,
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("keyword", HOLDS)
def test_an_integer_that_is_admitted_is_within_its_bound(
    compiler: GrammarCompiler, keyword: str
) -> None:
    """With another bound far away: with one alone the library refuses some by itself."""
    num_compiled = 0
    far = {"maximum": 1 << 64} if "inimum" in keyword else {"minimum": -(1 << 62)}
    for bound in AROUND:
        asked = StructuredOutputs(json=json.dumps({"type": "integer", keyword: bound, **far}))
        try:
            source = grammar_source(asked, ())
        except GrammarError as error:
            assert str(error).startswith(f"{keyword}: expected a number between"), error
            continue
        try:
            compiler.compile(asked)  # in a process: some end it
        except InvalidRequestError:
            continue
        num_compiled += 1
        first = LLMatcher(TOKENIZER, source)
        for number in AROUND:
            matcher, text = first.deep_copy(), str(number).encode()
            if matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting():
                assert HOLDS[keyword](number, bound), (keyword, bound, number)
    assert num_compiled >= 2


@pytest.mark.parametrize(
    "schema",
    [
        {"maximum": 1.5},
        {"minimum": 0, "maximum": 2**64 - 1},
        {"const": {"minimum": 10**25}},
        {"properties": {"minimum": {"enum": [10**25]}}},
    ],
)
def test_bounds_of_machine_integers_and_values_pass(schema: dict[str, Any]) -> None:
    check_bounds(schema)


WIDE = {"type": "integer", "minimum": 1e308, "maximum": 1.7e308}


@pytest.mark.parametrize(
    "schema",
    [
        WIDE,
        {"properties": {"const": WIDE}},
        {"items": [WIDE]},
        {"$defs": {"a": WIDE}, "$ref": "#/$defs/a"},
        {"anyOf": [{"type": "null"}, {"not": WIDE}]},
    ],
)
def test_wherever_a_bound_stands_it_is_looked_at(schema: dict[str, Any]) -> None:
    for fields in (
        {"json": schema},
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": schema}}},
    ):
        with pytest.raises(GrammarError, match=r"^minimum: expected .*, got 1[eE]\+308"):
            grammar_source(StructuredOutputs(**fields), ())
    function = {"name": "f", "parameters": {**schema, "type": "object"}}
    with pytest.raises(InvalidRequestError, match=r"^tools\[0\]\.function\.parameters: minimum"):
        read_tools([{"type": "function", "function": function}])


# --- formats ----------------------------------------------------------------------------------

HINTS = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "format": "path", "maxLength": 9},
        "format": {"enum": [{"format": "x"}]},
        "when": {"type": "string", "format": "date"},
        "big": {"type": "number", "format": "double", "maximum": 1e300, "minimum": 0.1},
        "list": {"items": {"$ref": "#/$defs/secret"}},
    },
    "$defs": {"secret": {"anyOf": [{"type": "string", "format": "password"}, {"const": 1}]}},
}


def test_formats_that_json_schema_does_not_know_restrict_nothing() -> None:
    plain = without_hints(HINTS)
    assert HINTS["properties"]["path"]["format"] == "path"
    assert plain["properties"]["path"] == {"type": "string", "maxLength": 9}
    assert plain["properties"]["format"] == HINTS["properties"]["format"]
    assert plain["properties"]["when"]["format"] == "date"
    assert plain["$defs"]["secret"]["anyOf"][0] == {"type": "string"}
    assert without_hints(plain) is plain


@pytest.mark.parametrize("where", ["json", "structural_tag", "tool"])
def test_a_schema_with_such_formats_is_followed_but_for_them(where: str) -> None:
    without = json.loads(json.dumps(HINTS))
    del without["properties"]["path"]["format"], without["properties"]["big"]["format"]
    del without["$defs"]["secret"]["anyOf"][0]["format"]
    assert _source(where, HINTS) == _source(where, without)


def _source(where: str, schema: dict[str, Any]) -> Any:
    if where == "tool":
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        return read_tools([tool])[0].parameters
    if where == "json":
        return json.loads(grammar_source(StructuredOutputs(json=json.dumps(schema)), ()))
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    text = json.dumps({"type": "structural_tag", "format": tag})
    return grammar_source(StructuredOutputs(structural_tag=text), ())
