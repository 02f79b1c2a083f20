"""Calls of tools in answers: however the text comes in pieces, the same calls, and nothing lost."""

from __future__ import annotations

import ast
import json
import re
import time
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.answers import (
    Call,
    Joined,
    Reasoning,
    cut,
    cuts,
    fragments,
    numbers,
    read,
    tokenizer_with,
)
from tiny import CHATML, tiny_tokenizer

from streamkv.config import EngineConfig
from streamkv.text.answer_parts import AnswerParser, ContentPart, ToolCallPart
from streamkv.text.tool_calls import ToolFormat, answer_parser, find_format

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINKING = "{{ tools }} <tool_call> <think> </think>"


def parse(name: str, *pieces: str) -> Joined:
    return read(ToolFormat(name).parser(numbers()), pieces)


def calls(*named: tuple[str, str]) -> Joined:
    return [Call(str(index), *call) for index, call in enumerate(named)]


HERMES: list[tuple[str, Joined]] = [
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', calls(("f", '{"a": 1}'))),
    (
        'Let me see.\n<tool_call>{"name":"f","arguments":{"a":"}\\"{<tool_call>", "b":[1,{}]}}'
        '</tool_call>\n<tool_call>{"name":"g","arguments":{}}\n</tool_call> done',
        ["Let me see.\n", Call("0", "f", '{"a":"}\\"{<tool_call>", "b":[1,{}]}')]
        + [Call("1", "g", "{}"), " done"],
    ),
    ('{"arguments": {"x": 1.50}, "name": "f"}', calls(("f", '{"x": 1.50}'))),
    ('{"id": [{}], "name": "f\\u00e9", "parameters": {}, "x": "}"}', calls(("fé", "{}"))),
    ('{"name": "f"}', calls(("f", "{}"))),
    ('{"name": "f", "arguments": "{\\"a\\": 1}"}', calls(("f", '"{\\"a\\": 1}"'))),
    ('{"name": "f", "arguments": null}', calls(("f", "null"))),
    ('\n{"name": "f", "arguments": {}}\n{"name": "g"}\n', calls(("f", "{}"), ("g", "{}"))),
    # No calls.
    ("<tool_call>", ["<tool_call>"]),
    ("<tool_cal", ["<tool_cal"]),
    ("a < b <tool <<tool_call", ["a < b <tool <<tool_call"]),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>',) * 2,
    ('<tool_call>{"name": "", "arguments": {}}</tool_call>',) * 2,
    ('<tool_call>{"name": "f',) * 2,
    ('<tool_call>{"name" "f"}</tool_call>',) * 2,
    ('<tool_call>{"name": "\\x"}</tool_call>',) * 2,
    ('<tool_call>{"name": "\\ud83d"}</tool_call>',) * 2,
    ("<tool_call>[1]</tool_call> x",) * 2,
    ("<tool_call>{}</tool_call>",) * 2,
    (" \n ", [" \n "]),
    # Calls that are cut off, or go on with something else.
    ('<tool_call>{"name": "f", "argum', calls(("f", ""))),
    ('<tool_call>{"name": "f", "arguments": {"a": [1', calls(("f", '{"a": [1'))),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}', calls(("f", '{"a": 1}'))),
    ('<tool_call>{"name": "f", "arguments": {}, "i', calls(("f", "{}"))),
    ('<tool_call>{"name": "f", "arguments": {}}\n</tool_', calls(("f", "{}"))),
    ('<tool_call>{"name": "f", "arguments": {}} or</tool_call>',
     [*calls(("f", "{}")), " or</tool_call>"]),
    ('<tool_call>{"name": "f", "arguments": {} "x"}',
     [*calls(("f", "{}")), ' "x"}']),
    ('<tool_call>{"name": "f", "arguments": }', [*calls(("f", "")), "}"]),
    ('<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g"}',
     calls(("f", "{}"), ("g", "{}"))),
]  # fmt: skip

LLAMA3: list[tuple[str, Joined]] = [
    ('{"name": "f", "parameters": {"a": 1}}', calls(("f", '{"a": 1}'))),
    ('\n<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": "x"}}\n',
     calls(("f", '{"a": "x"}'))),
    ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": {}}}',
     calls(("f", "{}"), ("g", '{"b": {}}'))),
    ('{"name": "f", "parameters": {}}\n{"name": "g", "arguments": {}}, {"name": "h", '
     '"parameters": {}}', calls(("f", "{}"), ("g", "{}"), ("h", "{}"))),
    ('[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]',
     calls(("f", "{}"), ("g", "{}"))),
    ('Sure: <|python_tag|>{"name": "f", "parameters": {}}', ["Sure: ", *calls(("f", "{}"))]),
    ('{"name": "f", "parameters": {}} and more; {"name": "g", "parameters": {}}',
     [*calls(("f", "{}")), ' and more; {"name": "g", "parameters": {}}']),
    ('{"name": "f", "parameters": {}}; that', [*calls(("f", "{}")), "; that"]),
    ('{"name": "Bob", "age": 5}',) * 2,
    ('{"name": "Bob"}',) * 2,
    ('text {"name": "f", "parameters": {}}',) * 2,
    ("<|python_tag|>print(1)",) * 2,
    ("[1, 2]",) * 2,
    ("[]",) * 2,
    ('[{"name": "f", "parameters": {}} x', [*calls(("f", "{}")), " x"]),
]  # fmt: skip

MISTRAL: list[tuple[str, Joined]] = [
    ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
     calls(("f", '{"a": 1}'), ("g", "{}"))),
    ('So: [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}] ok',
     ["So: ", *calls(("f", "{}")), " ok"]),
    ('[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}',
     calls(("f", '{"a": "[TOOL_CALLS]"}'), ("g", "{}"))),
    ('[TOOL_CALLS]f{"a": 1}', calls(("f", '{"a": 1}'))),
    ('[TOOL_CALLS]f[ARGS]{"a": ', calls(("f", '{"a": '))),
    ("[TOOL_CALLS]f is what",) * 2,
    ("[TOOL_CALLS]f[ARGS]",) * 2,
    ("[TOOL_CALLS][]",) * 2,
    ("[TOOL_CALLS]{}",) * 2,
    ("[1] [TOOL",) * 2,
]  # fmt: skip

PYTHONIC: list[tuple[str, Joined]] = [
    ("[f(a=1)]", calls(("f", '{"a": 1}'))),
    ('[f(a = 1, b="x\\n\'", c=[1, 2.5, -3,],d={"k": True, \'z\': None}), g(), m.h-i(x=(1,))]',
     calls(("f", '{"a": 1, "b": "x\\n\'", "c": [1, 2.5, -3], "d": {"k": true, "z": null}}'),
           ("g", "{}"), ("m.h-i", '{"x": [1]}'))),
    ("<|python_start|>[f(a='é')]<|python_end|> ok", [*calls(("f", '{"a": "é"}')), " ok"]),
    ("Now <|python_start|> [f()]", ["Now ", *calls(("f", "{}"))]),
    ("[f(a=1,)]\n[g()]", calls(("f", '{"a": 1}'), ("g", "{}"))),
    ("[link](http://x)",) * 2,
    ("[f(1)]",) * 2,
    ("[f (a=1)]",) * 2,
    ("[1, 2]",) * 2,
    ("see [f(a=1)]",) * 2,
    ("[f(",) * 2,
    ("[f(a=1", calls(("f", '{"a": 1'))),
    ("[f(a=[1, {'b': 'c", calls(("f", '{"a": [1, {"b": "c'))),
    ("[f(a=1), g", calls(("f", '{"a": 1}'))),
    ("[f(a=x)]", [*calls(("f", '{"a": ')), "x)]"]),
    ("[f(a=1, 2)]", [*calls(("f", '{"a": 1')), " 2)]"]),
    ("[f(a=1) for x]", [*calls(("f", '{"a": 1}')), "for x]"]),
    ("[f(a=1 2)]", [*calls(("f", '{"a": 1')), " 2)]"]),
]  # fmt: skip


def marked(text: str) -> str:
    """An object alone stands for one in Hermes' marks."""
    return f"{OPEN}{text}{CLOSE}" if text.lstrip().startswith("{") else text


CASES = [("hermes", marked(text), expected) for text, expected in HERMES]
CASES += [("llama3_json", *case) for case in LLAMA3]
CASES += [("mistral", *case) for case in MISTRAL]
CASES += [("pythonic", *case) for case in PYTHONIC]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_are_read_and_what_is_none_is_content(
    name: str, text: str, expected: Joined | str
) -> None:
    if isinstance(expected, str):
        expected = [expected]
    assert parse(name, text) == expected
    assert parse(name, *text) == expected
    for place in range(len(text)):
        assert parse(name, text[:place], text[place:]) == expected


MARKS = {
    "hermes": (OPEN, CLOSE, f'{OPEN}\n{{"name": "f", "arguments": '),
    "llama3_json": ("<|python_tag|>", "; ", '{"name": "f", "parameters": {}}'),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f"),
    "pythonic": ("<|python_start|>", "<|python_end|>", "[f(a=", "g()", "True", "'''", "\\u00", "x"),
}


@settings(max_examples=120, deadline=None)
@given(st.data(), cuts())
@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("reasons", [False, True])
def test_any_split_of_anything_gives_the_same_parts_and_content_is_as_it_was(
    name: str, reasons: bool, data: st.DataObject, places: list[int]
) -> None:
    own = MARKS[name] + (("<think>", "</think>", "\n\n", "</thi") if reasons else ())
    text = data.draw(fragments(*own))

    def parser() -> AnswerParser:
        steps = [ToolFormat(name).step]
        if reasons:
            marks = tokenizer_of_thoughts.reasoning_format
            assert marks is not None
            steps.insert(0, marks.step(len(text) % 2 == 0))
        return AnswerParser(steps, numbers())

    whole = read(parser(), [text])
    assert read(parser(), cut(text, places)) == whole
    assert read(parser(), text) == whole
    if not reasons and all(isinstance(part, str) for part in whole):
        assert "".join(map(str, whole)) == text
    rest = text
    for part in whole:
        shown = part if isinstance(part, str) else getattr(part, "text", "")
        assert shown in rest
        rest = rest[rest.index(shown) + len(shown) :]


tokenizer_of_thoughts = tokenizer_with(THINKING)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(min_size=1, max_size=8).filter(lambda name: name.strip()),
            st.dictionaries(st.text(max_size=5), json_values, max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
    st.sampled_from([None, 1]),
    cuts(),
)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_arguments_are_the_text_that_the_model_wrote(
    name: str,
    wanted: list[tuple[str, dict[str, Any]]],
    ensure_ascii: bool,
    indent: int | None,
    places: list[int],
) -> None:
    def dumps(value: object) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    key = "parameters" if name == "llama3_json" else "arguments"
    objects = [f'{{"name": {dumps(f)}, "{key}": {dumps(arguments)}}}' for f, arguments in wanted]
    text = {
        "hermes": "\n".join(f"{OPEN}\n{one}\n{CLOSE}" for one in objects),
        "llama3_json": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
    }[name]
    assert parse(name, *cut(text, places)) == calls(*((f, dumps(value)) for f, value in wanted))


def test_a_call_goes_out_as_it_is_written() -> None:
    parser = ToolFormat("hermes").parser(numbers())
    written = [
        '<tool_call>\n{"name": "f',
        '", ',
        '"arguments": {"a',
        '": "x',
        'y"',
        "}",
        "}\n</tool",
    ]
    parts = [parser.push(piece) for piece in written]
    assert parts == [
        [],
        [ToolCallPart(0, "0", "f", "")],
        [ToolCallPart(0, "", "", '{"a')],
        [ToolCallPart(0, "", "", '": "x')],
        [ToolCallPart(0, "", "", 'y"')],
        [ToolCallPart(0, "", "", "}")],
        [],
    ]
    assert parser.push("_call>\n") == [] and parser.push("Done") == [ContentPart("\nDone")]


def test_pythonic_arguments_go_out_as_they_are_written() -> None:
    parser = ToolFormat("pythonic").parser(numbers())
    parts = [parser.push(piece) for piece in ("[f(a", "='x", "y", "', b=Tr", "ue)", "]")]
    assert [[part[3] for part in pushed] for pushed in parts] == [
        *([], ["", '{"a": "x'], ["y"], ['", "b": '], ["true}"], []),
    ]


@pytest.mark.parametrize("argument", ["[" + "1, " * 2000 + "]", "'" + r"\n" * 2000 + "'"])
def test_what_comes_at_once_of_a_pythonic_call_is_one_part(argument: str) -> None:
    begin, rest = ToolFormat("pythonic").parser(numbers()).push(f"[f(a={argument})]")
    assert begin == ToolCallPart(0, "0", "f", "")
    assert isinstance(rest, ToolCallPart) and rest[:3] == (0, "", "")
    assert json.loads(rest.arguments) == {"a": ast.literal_eval(argument)}


def test_only_what_may_be_a_call_is_held_back() -> None:
    parser = ToolFormat("hermes").parser()
    pushed = [
        parser.push(piece) for piece in ("a <", "b", " <tool_", "cal", "led> <tool_call>{", "x")
    ]
    assert pushed == [
        *([ContentPart("a ")], [ContentPart("<b")], [ContentPart(" ")], []),
        *([ContentPart("<tool_called> ")], [ContentPart("<tool_call>{x")]),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"a": [' * 8000),
        ("hermes", '<tool_call>{"name": "' + "x" * 100_000),
        ("hermes", " " * 100_000),
        ("llama3_json", "{" + '"a": {' * 20_000),
        ("llama3_json", '{"parameters": "' + "\\" * 100_001),
        ("mistral", "[TOOL_CALLS]" + "f" * 100_000),
        ("pythonic", "[f(a=" + "[" * 100_000),
        ("pythonic", "[" + "f" * 100_000),
    ],
)
def test_what_never_becomes_a_call_is_held_no_longer_than_bounded(name: str, text: str) -> None:
    whole = parse(name, text)
    held = most_held = 0
    parser = ToolFormat(name).parser(numbers())
    shown = []
    for piece in cut(text, range(0, len(text), 997)):
        parts = parser.push(piece)
        shown += parts
        held = 0 if parts else held + len(piece)
        most_held = max(most_held, held)
    assert most_held < 16_384 + 2000
    if name != "pythonic" or "=" not in text:
        assert whole == [text]


@pytest.mark.parametrize(
    ("name", "beginning", "repeated"),
    [
        ("hermes", "", "<tool_call>{"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "\\\\n<{"),
        ("hermes", '<tool_call>{"', "x"),
        ("mistral", "", "[TOOL_CALLS]["),
        ("pythonic", "[f(a='", "\\u00e9"),
        ("llama3_json", '{"name": "f", "parameters": {}}', ";"),
    ],
)
def test_time_is_linear_in_the_text(name: str, beginning: str, repeated: str) -> None:
    def seconds(num: int) -> float:
        parser = ToolFormat(name).parser()
        parser.push(beginning)
        pieces = cut(repeated * num, range(0, num * len(repeated), 3))
        start = time.process_time()
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        return time.process_time() - start

    few = min(seconds(1000) for _ in range(3))
    assert seconds(8000) < 8 * 3 * few + 0.05


def test_ids_of_calls_look_as_the_models_expect() -> None:
    looks = {"hermes": r"call_[0-9a-f]{24}", "mistral": r"[0-9a-zA-Z]{9}"}
    texts = {"hermes": marked('{"name": "f"}') * 2, "mistral": "[TOOL_CALLS]f[ARGS]{}" * 2}
    for name, pattern in looks.items():
        parts = ToolFormat(name).parser().push(texts[name])
        ids = [part.id for part in parts if isinstance(part, ToolCallPart) and part.id]
        assert len(set(ids)) == 2 and all(re.fullmatch(pattern, call_id) for call_id in ids)


QWEN25 = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
return <tool_call>\\n{\\"name\\": <function-name>}\\n</tool_call>{% endif %}"""
LLAMA31 = """{%- if tools is not none %}{{- 'Respond in the format {"name": function name, \
"parameters": dictionary of argument name and its value}.' }}{% endif %}"""
LLAMA4 = """{% if tools %}reply with [func_name1(params_name1=params_value1, ...), func_name2()]
{% endif %}"""
MISTRAL_V3 = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [{{ call | tojson }}]"


@pytest.mark.parametrize(
    ("template", "special", "name", "shows"),
    [
        (QWEN25, (), "hermes", False),
        (QWEN25, ("<tool_call>", "</tool_call>"), "hermes", True),
        (LLAMA31, (), "llama3_json", False),
        (LLAMA31, ("<|python_tag|>",), "llama3_json", True),
        (LLAMA4, (), "pythonic", False),
        (MISTRAL_V3, ("[TOOL_CALLS]",), "mistral", True),
        (CHATML, (), "hermes", False),
        (QWEN25 + "<function=f>", (), None, False),
        ("{{ tools }} in some other format", (), None, False),
    ],
)
def test_the_template_tells_the_format(
    template: str, special: tuple[str, ...], name: str | None, shows: bool
) -> None:
    found = tokenizer_with(template, special).tool_format
    assert (found and found.name) == name
    assert found is None or found.shows_special_tokens is shows


def test_a_format_may_be_named_whatever_the_template_says() -> None:
    tokenizer = tokenizer_with(QWEN25)
    kind = get_type_hints(EngineConfig)["tool_call_parser"]
    for name in get_args(kind):
        if name != "auto":
            named = tokenizer.with_tool_format(name).tool_format
            assert named is not None and named.parser().push("so") == [ContentPart("so")]
    pythonic = tokenizer.with_tool_format("llama4_pythonic")
    parser = answer_parser(pythonic, tools=True, reasoning=True, new_id=numbers())
    assert parser is not None and read(parser, "[f(a=1)]") == calls(("f", '{"a": 1}'))
    assert tokenizer.tool_format is not None and tokenizer.tool_format.name == "hermes"
    assert find_format(None, {}, None, name="hermes") is None


def test_an_answer_is_reasoning_then_content_and_calls() -> None:
    text = '<think>\nhm\n</think>\n\n<tool_call>{"name": "f"}</tool_call> so'

    def parts(**wanted: bool) -> Joined | None:
        parser = answer_parser(tokenizer_of_thoughts, **wanted, new_id=numbers())
        return None if parser is None else read(parser, text)

    call = Call("0", "f", "{}")
    assert parts(tools=True, reasoning=True) == [Reasoning("hm"), call, " so"]
    assert parts(tools=True, reasoning=False) == ["<think>\nhm\n</think>\n\n", call, " so"]
    later = '<tool_call>{"name": "f"}</tool_call> so'
    assert parts(tools=False, reasoning=True) == [Reasoning("hm"), later]
    assert parts(tools=False, reasoning=False) is None
    assert answer_parser(tiny_tokenizer(), tools=False, reasoning=True) is None
