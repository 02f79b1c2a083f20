"""Grammars: every answer that ends by itself is what was asked for; what can't be is refused."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tiny import sentencepiece_backend, tiny_tokenizer
from walks import allowed, walk, walk_text

from streamkv.errors import GenerationError, InvalidRequestError, OverloadedError
from streamkv.sampling import StructuredOutputs
from streamkv.text import grammar as grammar_module
from streamkv.text import grammar_process
from streamkv.text.grammar import GrammarCompiler, GrammarFailure
from streamkv.text.grammar_checker import why_ended
from streamkv.text.grammar_process import ALL, LITTLE, Effort
from streamkv.text.tokenizer import Tokenizer

TINY = tiny_tokenizer()
(END,) = TINY.eos_token_ids
NUM_WALKS = 12

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": ["null", "boolean", "number"]}, "minItems": 1},
    {"enum": ["red", 'a "quoted" one', 3, None, {"x": [1, 2]}]},
    {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{1,3}$"},
    {"type": "string", "format": "date"},
    {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "object", "maxProperties": 1}]},
    {
        "$defs": {"tree": {"properties": {"left": {"$ref": "#/$defs/tree"}}, "type": "object"}},
        "$ref": "#/$defs/tree",
    },
]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TINY, TINY.vocab_size)
    yield compiler
    compiler.close()


def reason(compiler: GrammarCompiler, **structured: Any) -> str:
    with pytest.raises(InvalidRequestError, match="^structured_outputs: ") as raised:
        compiler.compile(StructuredOutputs(**structured))
    assert raised.value.param == "structured_outputs"
    assert "\n" not in raised.value.message
    return raised.value.message


# --- what is followed ----------------------------------------------------------------------------


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: next(iter(schema)))
@pytest.mark.parametrize("compact", [False, True])
def test_whatever_ends_by_itself_is_valid_by_its_schema(compiler, schema, compact):
    grammar = compiler.compile(StructuredOutputs(json=schema, disable_any_whitespace=compact))
    num_ended = 0
    for seed in range(NUM_WALKS):
        text, has_ended = walk_text(grammar, TINY, seed)
        if has_ended:
            num_ended += 1
            value = json.loads(text)
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
            if compact:
                assert text == text.strip() and not re.search(r"[\n\t]", text)
    assert num_ended >= NUM_WALKS // 3


def test_between_the_parts_of_json_stands_a_bounded_run_of_spaces(compiler):
    grammar = compiler.compile(StructuredOutputs(json={"type": "array", "items": {"const": 1}}))
    matcher = grammar.matcher()
    spaces = {i for i in range(TINY.vocab_size) if TINY.token_bytes(i).isspace()}
    matcher.consume(TINY.encode("[")[0])
    num_spaces = 0
    while tokens := [i for i in allowed(matcher, TINY.vocab_size) if i in spaces]:
        longest = max(tokens, key=lambda i: len(TINY.token_bytes(i)))
        num_spaces += len(TINY.token_bytes(longest))
        matcher.consume(longest)
    assert 10 < num_spaces < 50
    assert {TINY.token_text(i) for i in allowed(matcher, TINY.vocab_size)} <= {"1", "]"}


def test_an_own_pattern_says_what_stands_between_the_parts(compiler):
    grammar = compiler.compile(StructuredOutputs(json={"const": {"a": 1}}, whitespace_pattern="_?"))
    texts = {walk_text(grammar, TINY, seed)[0] for seed in range(20)}
    assert {"", "_"} == {text[1:2].strip('"') for text in texts}
    assert all(json.loads(text.replace("_", "")) == {"a": 1} for text in texts)


def test_objects_have_no_other_properties_where_that_is_wanted(compiler):
    schema = {"type": "array", "items": {"properties": {"a": {"const": 1}}, "type": "object"}}
    grammar = compiler.compile(StructuredOutputs(json=schema, disable_additional_properties=True))
    for seed in range(NUM_WALKS):
        text, has_ended = walk_text(grammar, TINY, seed)
        if has_ended:
            assert all(item in ({}, {"a": 1}) for item in json.loads(text))


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a"',
        '?start: x\nx: "a"',
        '!start: x\nx: "a"',
        'start: "a" | "::="',
        '?start: "a" | /::=/  // root ::= "a"',
        '%llguidance {}\nstart: "a"',
        'root ::= "a"',
        '# start: "a"\nroot ::= "a" | [:="]+ # x: y',
    ],
)
def test_lark_and_gbnf_are_told_apart(compiler, grammar):
    matcher = compiler.compile(StructuredOutputs(grammar=grammar)).matcher()
    if not matcher.forced:
        assert TINY.encode("a")[0] in allowed(matcher, TINY.vocab_size)
    else:
        assert matcher.forced[0] == TINY.encode("a")[0]


def test_any_json_object_is_one(compiler):
    grammar = compiler.compile(StructuredOutputs(json_object=True))
    for seed in range(NUM_WALKS):
        text, has_ended = walk_text(grammar, TINY, seed)
        assert text.startswith("{")
        if has_ended:
            assert isinstance(json.loads(text), dict)


STRANGE = ["", "a\nb", '"', "\\", "é漢😀", "<|im_end|>", "[a-z]*", "\x01", "a|b", " the", "#/~{}"]


def test_an_answer_is_one_of_the_choices_whatever_they_are(compiler):
    for choice in (["the dog", "the fox"], STRANGE[1:]):
        grammar = compiler.compile(StructuredOutputs(choice=choice))
        texts = {walk_text(grammar, TINY, seed)[0] for seed in range(30)}
        assert texts <= set(choice)
        assert len(texts) > 1
    for text in STRANGE[1:]:
        grammar = compiler.compile(StructuredOutputs(choice=[text]))
        assert walk_text(grammar, TINY, 0) == (text, True)


def test_regexes_and_grammars_in_three_notations_are_followed(compiler):
    same = [
        StructuredOutputs(regex="x(a[0-9]{1,3})+"),
        StructuredOutputs(grammar='root ::= "x" part+\npart ::= "a" [0-9]{1,3}'),
        StructuredOutputs(grammar='start: "x" part+\npart: "a" /[0-9]{1,3}/'),
        StructuredOutputs(lark='start: "x" part+\npart: "a" /[0-9]{1,3}/'),
    ]
    for structured in same:
        grammar = compiler.compile(structured)
        for seed in range(NUM_WALKS):
            text, has_ended = walk_text(grammar, TINY, seed)
            assert not has_ended or re.fullmatch("x(a[0-9]{1,3})+", text)


TAG = {
    "type": "structural_tag",
    "triggers": ["<f", "<|im_start|>"],
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<|im_start|>b", "schema": {"const": "the"}, "end": "."},
    ],
}


def test_after_a_trigger_comes_a_tag_with_what_its_schema_says(compiler):
    matcher = compiler.compile(StructuredOutputs(structural_tag=TAG)).matcher()
    for token_id in TINY.encode("the fox < f <"):
        matcher.consume(token_id)
    assert len(allowed(matcher, TINY.vocab_size)) > 200
    matcher.consume(TINY.encode("f")[0])
    assert bytes(b for i in matcher.forced for b in TINY.token_bytes(i)) == b"=a>"
    for token_id in TINY.encode("=a>12"):
        matcher.consume(token_id)
    tokens = {TINY.token_text(i) for i in allowed(matcher, TINY.vocab_size)}
    assert tokens == {*"0123456789", "<"}
    for token_id in TINY.encode("</f> and"):
        matcher.consume(token_id)
    assert END in allowed(matcher, TINY.vocab_size)


def test_a_special_token_may_be_the_trigger(compiler):
    matcher = compiler.compile(StructuredOutputs(structural_tag=TAG)).matcher()
    (mark,) = TINY.encode("<|im_start|>")
    for token_id in [*TINY.encode("the"), mark]:
        matcher.consume(token_id)
    assert bytes(b for i in matcher.forced for b in TINY.token_bytes(i)) == b'b"the".'


FORMAT = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "x"},
            {
                "type": "or",
                "elements": [
                    {"type": "regex", "pattern": "a/b+"},
                    {"type": "tag", "begin": "(", "content": {"type": "any_text"}, "end": ")"},
                ],
            },
            {
                "type": "tags_with_separator",
                "separator": ",",
                "at_least_one": True,
                "tags": [
                    {
                        "begin": "<",
                        "content": {"type": "json_schema", "json_schema": {"type": "null"}},
                        "end": [">", "|"],
                    }
                ],
            },
        ],
    },
}


def test_the_parts_of_a_format_come_in_order(compiler):
    grammar = compiler.compile(StructuredOutputs(structural_tag=FORMAT))
    for text in ("xa/b<null>", "xa/bbb<null|,<null>", "x(the dog)<null>"):
        matcher = grammar.matcher()
        for token_id in TINY.encode(text):
            assert token_id in allowed(matcher, TINY.vocab_size) or matcher.forced, text
            if matcher.forced and matcher.forced[0] != token_id:
                break
            matcher.consume(token_id)
        else:
            assert END in allowed(matcher, TINY.vocab_size)
    matcher = grammar.matcher()
    assert [TINY.token_text(i) for i in matcher.forced] == ["x"]


# --- ends, and tokens without a choice -----------------------------------------------------------


def test_where_there_is_no_choice_the_tokens_are_those_that_the_model_would_write(compiler):
    text = "the quick brown fox"
    matcher = compiler.compile(StructuredOutputs(regex=f"{text}[0-9]")).matcher()
    forced = list(matcher.forced)
    assert len(forced) > 3
    assert forced == TINY.encode(text)[: len(forced)]
    for token_id in forced:
        assert matcher.forced[0] == token_id
        matcher.consume(token_id)


def test_text_of_control_tokens_is_forced_as_text(compiler):
    matcher = compiler.compile(StructuredOutputs(choice=["a <|im_end|> b"])).matcher()
    token_ids, has_ended = walk(matcher, TINY, random.Random(0))
    assert has_ended
    assert not TINY.special_token_ids & set(token_ids)
    assert b"".join(map(TINY.token_bytes, token_ids)) == b"a <|im_end|> b"


def test_at_the_end_of_the_grammar_the_answer_ends(compiler):
    matcher = compiler.compile(StructuredOutputs(regex="a")).matcher()
    matcher.consume(matcher.forced[0])
    assert matcher.forced == [END]
    matcher.consume(END)
    assert matcher.forced == [END]


def test_a_model_with_several_end_tokens_chooses_one_of_them():
    tokenizer = Tokenizer(
        TINY._backend,
        vocab_size=TINY.vocab_size,
        eos_token_ids=[0, 2],
        special_tokens={},
        chat_templates={},
    )
    compiler = GrammarCompiler(tokenizer, TINY.vocab_size)
    matcher = compiler.compile(StructuredOutputs(regex="a")).matcher()
    matcher.consume(matcher.forced[0])
    assert (matcher.forced, allowed(matcher, TINY.vocab_size)) == ([], [0, 2])
    compiler.close()


@pytest.mark.parametrize("vocab_size", [TINY.vocab_size, 352])
def test_a_model_without_end_tokens_goes_on_until_nothing_is_left(vocab_size):
    tokenizer = Tokenizer(
        TINY._backend,
        vocab_size=TINY.vocab_size,
        eos_token_ids=[],
        special_tokens={},
        chat_templates={},
    )
    compiler = GrammarCompiler(tokenizer, vocab_size)
    matcher = compiler.compile(StructuredOutputs(regex="ab?c?")).matcher()
    token_ids, has_ended = walk(
        matcher, tokenizer, random.Random(0), vocab_size=vocab_size + 1, ends=()
    )
    assert has_ended and max(token_ids) < TINY.vocab_size
    assert b"".join(map(tokenizer.token_bytes, token_ids)) in (b"abc", b"ac")
    compiler.close()


def test_an_end_that_is_to_be_ignored_comes_only_where_nothing_else_is_left(compiler):
    grammar = compiler.compile(StructuredOutputs(regex="[ab]{0,2}"))
    (a,) = TINY.encode("a")
    assert END in allowed(grammar.matcher(), TINY.vocab_size)
    matcher = grammar.matcher(ignore_end=True)
    for _ in range(2):
        assert END not in allowed(matcher, TINY.vocab_size)
        matcher.consume(a)
    assert allowed(matcher, TINY.vocab_size) == [END]


def test_matchers_of_one_grammar_go_their_own_ways(compiler):
    grammar = compiler.compile(StructuredOutputs(regex="[ab]x|[cd]y"))
    first, second = grammar.matcher(), grammar.matcher()
    first.consume(TINY.encode("a")[0])
    second.consume(TINY.encode("d")[0])
    assert [TINY.token_text(one.forced[0]) for one in (first, second)] == ["x", "y"]


def test_a_token_that_is_not_allowed_is_a_failure(compiler):
    matcher = compiler.compile(StructuredOutputs(regex="[ab]x")).matcher()
    with pytest.raises(GrammarFailure, match="doesn't satisfy the grammar"):
        matcher.consume(TINY.encode("c")[0])
    matcher = compiler.compile(StructuredOutputs(regex="xx")).matcher()
    with pytest.raises(GrammarFailure, match="a token came that the grammar doesn't allow"):
        matcher.consume(TINY.encode("y")[0])


@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace"])
def test_sentencepiece_vocabularies_follow_grammars_too(kind):
    tokenizer = Tokenizer(
        sentencepiece_backend(kind),
        vocab_size=400,
        eos_token_ids=[2],
        special_tokens={},
        chat_templates={},
    )
    compiler = GrammarCompiler(tokenizer, 400)
    for structured, pattern in (
        (StructuredOutputs(regex="[a-c]{1,4} (he|é)+"), "[a-c]{1,4} (he|é)+"),
        (StructuredOutputs(choice=["he he", "hex"]), "he he|hex"),
    ):
        grammar = compiler.compile(structured)
        for seed in range(NUM_WALKS):
            text, has_ended = walk_text(grammar, tokenizer, seed)
            assert not has_ended or re.fullmatch(pattern, text)
    compiler.close()


def test_a_model_with_fewer_tokens_than_its_tokenizer_gets_none_of_the_others():
    compiler = GrammarCompiler(TINY, 300)
    grammar = compiler.compile(StructuredOutputs(regex="(the quick brown fox )+"))
    token_ids, _ = walk(grammar.matcher(), TINY, random.Random(0), max_tokens=60)
    assert max(token_ids) < 300
    compiler.close()


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structured", "why"),
    [
        ({"json": {"not": {}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"if": {}, "then": {}}}, "if"),
        ({"json": {"type": "string", "format": "uri-template"}}, "format: uri-template"),
        ({"json": {"type": "text"}}, "type: text"),
        ({"json": {"$ref": "http://a/b"}}, "http://a/b"),
        ({"json": {"$ref": "#/x"}}, "/x"),
        ({"json": {"type": "string", "pattern": "(?=a)"}}, "look-ahead"),
        ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "oneOf"),
        ({"json": {"enum": []}}, "empty"),
        ({"json": {"$ref": "#"}}, "it matches no text"),
        ({"json": "{"}, "EOF"),
        ({"json": "[]"}, "object"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "not"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"grammar": "start: x"}, 'unknown name: "x"'),
        ({"grammar": 'root = "a"'}, "Expected token ':'"),
        ({"grammar": 'root ::= "a" b'}, "b"),
        ({"json": {"type": "integer", "minimum": 10**18}}, "needs one on the other side"),
        ({"grammar": "words without sense"}, "Expected"),
        ({"lark": "start: <|nothing|>"}, "unknown special token"),
        ({"structural_tag": {"type": "structural_tag"}}, "'structures'"),
        ({"structural_tag": "[1]"}, "expected an object"),
        ({"structural_tag": {"format": {"type": "poem"}}}, "got 'poem'"),
        ({"structural_tag": TAG | {"triggers": ["<g"]}}, "trigger"),
        ({"json": {"type": "object"}, "whitespace_pattern": "("}, "unclosed group"),
    ],
)
def test_what_can_not_be_followed_is_refused_with_the_reason(compiler, structured, why):
    assert why in reason(compiler, **structured)


EXPLODES = {"patternProperties": {f"^{i}_.*$": {} for i in range(3000)}}
CHAIN = "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(7000)), 'a7000: "x"'])


@pytest.mark.parametrize(
    ("structured", "why"),
    [
        ({"lark": CHAIN}, "nested too deeply"),  # takes all of the stack
        ({"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000}, "nested too deeply"),
        ({"json": '{"items":' * 9000 + "{}" + "}" * 9000}, "recursion limit"),
        ({"regex": "(a|b)?" * 20000}, "takes more than"),  # gigabytes
        ({"json": EXPLODES}, "more than 2 s"),
    ],
    ids=["rules", "parentheses", "schema", "optional", "properties"],
)
def test_what_explodes_is_refused_in_bounded_time_and_the_next_one_is_compiled(
    compiler, structured, why
):
    began_s = time.monotonic()
    message = reason(compiler, **structured)
    assert why in message
    # Two seconds of CPU time; on a busy machine that takes longer, ten seconds at most.
    assert time.monotonic() - began_s < 15
    compiler.compile(StructuredOutputs(regex=f"after{len(message)}"))


def test_what_is_hard_is_put_off_and_what_is_easy_is_not(compiler):
    easy, hard = StructuredOutputs(regex="ea[sz]y"), StructuredOutputs(json=EXPLODES)
    assert compiler.compile_if_easy(hard) is None
    assert compiler.compile_if_easy(easy) is compiler.compile(easy) is compiler.find(easy)
    assert compiler.find(hard) is None
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        compiler.compile_if_easy(StructuredOutputs(regex="(a"))


def test_a_machine_without_time_is_not_told_as_the_grammars_fault(compiler, monkeypatch):
    monkeypatch.setattr(grammar_module, "ALL", Effort(2.0, 0.0))
    with pytest.raises(OverloadedError, match="too little time or memory for it now; try again"):
        compiler.compile(StructuredOutputs(regex="in time"))
    monkeypatch.undo()
    compiler.compile(StructuredOutputs(regex="in time"))


def test_only_what_a_grammar_itself_exceeds_is_its_fault():
    for number, why in (
        (signal.SIGPROF, "more than 2 s"),
        (signal.SIGABRT, "more than 256 MB"),
        (signal.SIGSEGV, "nested too deeply"),
        (0, "failed"),
    ):
        result = why_ended(number, ALL)
        assert (why in result.error, result.is_open) == (True, False)
    assert why_ended(signal.SIGPROF, LITTLE).is_open
    assert all(why_ended(signal.SIGKILL, effort).is_open for effort in (LITTLE, ALL))


@pytest.mark.parametrize(
    "structured",
    [
        {"json": {"enum": [f"value {i}" for i in range(5000)]}},
        {"json": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}},
        {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**9}},
        {"json": {"type": "object", "minProperties": 10**6}},
        {"regex": ".*a.{500}"},
        {"choice": [f"choice number {i}" for i in range(4096)]},
        {
            "json": {
                "$defs": {
                    **{
                        f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
                        for i in range(40)
                    },
                    "d40": {"type": "null"},
                },
                "$ref": "#/$defs/d0",
            }
        },
    ],
    ids=["enum", "items", "length", "properties", "repeats", "choices", "references"],
)
def test_what_is_only_large_is_compiled(compiler, structured):
    began_s = time.monotonic()
    matcher = compiler.compile(StructuredOutputs(**structured)).matcher()
    walk(matcher, TINY, random.Random(0), max_tokens=20)
    assert time.monotonic() - began_s < 15


COMPLEX = "([a-z ]*[aeiou][a-z ]{1,100}){100}"  # after some tokens
NESTED = [f"((a{{1,1000}}){{1,1000}}){{1,{most}}}" for most in (100, 1000)]


@pytest.mark.parametrize("pattern", [COMPLEX, *NESTED])
def test_a_grammar_that_gets_too_complex_after_some_tokens_is_refused_before_the_first(
    compiler, pattern
):
    with pytest.raises(InvalidRequestError, match="^structured_outputs: .*too many repetitions"):
        compiler.compile(StructuredOutputs(regex=pattern))


def test_a_grammar_that_gets_too_complex_later_is_a_failure(compiler):
    matcher = compiler.compile(StructuredOutputs(regex=f"[0-9]{{300}}{COMPLEX}")).matcher()
    with pytest.raises(GrammarFailure, match="too many repetitions"):
        walk(matcher, TINY, random.Random(0), max_tokens=800)


# --- the compiler's own life ----------------------------------------------------------------------


def test_a_grammar_that_was_compiled_before_is_found_again():
    compiler = GrammarCompiler(TINY, TINY.vocab_size)
    first = compiler.compile(StructuredOutputs(json={"type": "object"}))
    assert compiler.compile(StructuredOutputs(json='{"type":"object"}')) is first
    compiler.close()
    assert compiler.compile(StructuredOutputs(json={"type": "object"})) is first
    with pytest.raises(GenerationError, match="the engine is closed"):
        compiler.compile(StructuredOutputs(regex="another"))


def test_only_so_many_grammars_are_kept(monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_CACHED", 2)
    compiler = GrammarCompiler(TINY, TINY.vocab_size)
    one, two, three = (StructuredOutputs(regex=text) for text in ("a", "b", "c"))
    first, second = compiler.compile(one), compiler.compile(two)
    assert compiler.compile(one) is first
    compiler.compile(three)  # in place of the one that was used longest ago
    assert compiler.compile(one) is first
    assert compiler.compile(two) is not second
    compiler.close()


def test_memory_is_what_a_grammar_takes_once_and_each_matcher_besides(monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_CACHED", 1)
    compiler = GrammarCompiler(TINY, TINY.vocab_size)
    large = compiler.compile(StructuredOutputs(choice=[f"number {7 * i}" for i in range(4096)]))
    assert large.num_bytes > 1 << 19
    assert large.matcher_bytes < 1 << 20
    matchers = [large.matcher() for _ in range(3)]
    assert compiler.num_bytes == large.num_bytes
    small = compiler.compile(StructuredOutputs(choice=["a", "b"]))
    assert compiler.num_bytes == large.num_bytes + small.num_bytes  # one is kept, one followed
    num_bytes = large.num_bytes
    del large, matchers[1:]
    assert compiler.num_bytes == num_bytes + small.num_bytes
    del matchers
    assert compiler.num_bytes == small.num_bytes
    compiler.close()


def test_the_process_that_tries_grammars_out_may_be_killed_at_any_time():
    compiler = GrammarCompiler(TINY, TINY.vocab_size)
    compiler.compile(StructuredOutputs(regex="a"))
    process = compiler._process._process
    process.kill()
    process.wait()
    compiler.compile(StructuredOutputs(regex="b"))
    other = compiler._process._process
    assert other.pid != process.pid
    compiler.close()
    assert other.poll() is not None


def test_why_the_process_could_not_start_is_in_the_log_in_few_words(monkeypatch, caplog):
    monkeypatch.setattr(grammar_process, "_PROGRAM", "streamkv.no_such_program")
    compiler = GrammarCompiler(TINY, TINY.vocab_size)
    with pytest.raises(GenerationError, match="checking the grammar failed"):
        compiler.compile(StructuredOutputs(regex="a"))
    compiler.close()
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "No module named streamkv.no_such_program" in caplog.text
    assert all(len(record.message) < 3000 for record in caplog.records)
