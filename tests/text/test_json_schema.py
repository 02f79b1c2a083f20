"""What is seen to before the library reads a schema: bounds of numbers, which hold or are refused,
and formats that mean nothing."""

from __future__ import annotations

import copy
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
from streamkv.text.json_schema import prepare
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
        {"const": {"maximum": -1e300}},
        {"properties": {"maximum": {"enum": [-1e300, 1 << 60, True, "9" * 30]}}},
        {"properties": {"const": {"type": "integer"}}, "default": 10**25},
    ],
)
def test_bounds_of_machine_integers_and_values_pass(schema: dict[str, Any]) -> None:
    prepare(schema)


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


@pytest.mark.parametrize("number", [(1 << 53) + 1, 1234567890123456789, (1 << 64) - 1, 1 << 64])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("where", ["const", "enum", "nested", "property"])
def test_an_integer_that_would_become_another_is_refused(
    number: int, sign: int, where: str
) -> None:
    schema: dict[str, Any] = {
        "const": {"const": sign * number},
        "enum": {"enum": ["a", sign * number]},
        "nested": {"enum": [{"a": [1, {"b": sign * number}]}]},
        "property": {"properties": {"a": {"const": sign * number}}},
    }[where]
    with pytest.raises(GrammarError, match="^const, enum: expected integers between -9007"):
        grammar_source(StructuredOutputs(json=json.dumps(schema)), ())
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": schema}}}
    tool["function"]["parameters"] = {"properties": {"x": schema}}
    with pytest.raises(InvalidRequestError, match=r"parameters: const, enum: expected"):
        read_tools([tool])


@pytest.mark.parametrize("number", [1 << 53, -(1 << 53), 1 << 60, 10**18, -(1 << 62)])
def test_an_integer_that_is_forced_is_that_one(number: int) -> None:
    source = grammar_source(StructuredOutputs(json=json.dumps({"const": number})), ())
    matcher, text = LLMatcher(TOKENIZER, source), str(number).encode()
    assert matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string", "format": "password"}
    for _ in range(3000):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidRequestError, match=r"^tools\[0\].function.parameters: it is nested"):
        read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])


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
    plain = copy.deepcopy(HINTS)
    assert prepare(plain)
    assert plain["properties"]["path"] == {"type": "string", "maxLength": 9}
    assert plain["properties"]["format"] == HINTS["properties"]["format"]
    assert plain["properties"]["when"]["format"] == "date"
    assert plain["$defs"]["secret"]["anyOf"][0] == {"type": "string"}
    assert not prepare(plain)


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


# --- objects ----------------------------------------------------------------------------------

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
CLOSED = POINT | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "followed"),
    [
        (POINT, CLOSED),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"items": POINT}, {"items": CLOSED}),
        ({"anyOf": [POINT, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": POINT}, "description": "d"},)
        + ({"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": CLOSED}, "description": "d"},),
        (
            {"properties": {"p": {"$ref": "#/$defs/p", "title": "t"}}, "$defs": {"p": POINT}},
            {
                "properties": {"p": {"$ref": "#/$defs/p", "title": "t"}},
                "$defs": {"p": CLOSED},
                "additionalProperties": False,
            },
        ),
    ],
)
def test_an_object_has_no_properties_but_those_that_are_named(
    schema: dict[str, Any], followed: dict[str, Any]
) -> None:
    mine = copy.deepcopy(schema)
    assert prepare(mine)
    assert mine == followed
    assert _source("json", schema) == _source("json", followed)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        POINT | {"additionalProperties": True},
        POINT | {"additionalProperties": {"type": "string"}},
        POINT | {"patternProperties": {"^y": {}}},
        POINT | {"minProperties": 2},
        POINT | {"required": ["x", "y"]},
        {"allOf": [POINT, {"properties": {"y": {}}}]},
        {"items": {"allOf": [POINT, {"properties": {"y": {}}}]}, "contains": POINT},
        POINT | {"anyOf": [{"properties": {"y": {}}}, {"properties": {"z": {}}}]},
        POINT | {"$ref": "#/$defs/q", "$defs": {"q": {"properties": {"y": {}}}}},
        POINT | {"patternProperties": {"^x": {"properties": {"y": {}}}}},
        POINT | {"properties": {"x": False}, "required": []},
        POINT | {"const": {"x": 1, "y": 2}},
        {"enum": [{"p": {"x": 1, "y": 2}}], "properties": {"p": POINT}},
        {"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["b"]}]},
        {"oneOf": [{"$ref": "#/$defs/p"}, {"type": "null"}], "$defs": {"p": POINT}},
        POINT | {"not": {}},
        POINT | {"if": {"properties": {"y": {}}}, "then": {"properties": {"y": {}}}},
    ],
)
def test_an_object_stays_open_where_it_says_so_or_others_have_a_say(schema: dict[str, Any]) -> None:
    mine = copy.deepcopy(schema)
    assert not prepare(mine)
    assert mine == schema


@pytest.mark.parametrize("parameters", [None, {"type": "object", "properties": {}, "required": []}])
def test_a_function_without_parameters_takes_none(parameters: Any) -> None:
    (tool,) = read_tools([{"type": "function", "name": "now", "parameters": parameters}])
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(json.dumps(tool.parameters)))
    assert matcher.deep_copy().try_consume_tokens(list(b'{"a')) == 1
    assert matcher.try_consume_tokens(list(b"{}")) == 2 and matcher.is_accepting()
