"""Python's literals as JSON, against Python's own reading of them."""

from __future__ import annotations

import ast
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.answers import Call, Joined, cut, cuts, numbers, read

from streamkv.text.python_literals import MAX_DEPTH
from streamkv.text.tool_calls import ToolFormat


def parse(*pieces: str) -> Joined:
    return read(ToolFormat("pythonic").parser(numbers()), pieces)


def arguments(text: str, places: list[int] | None = None) -> Any:
    """What the arguments of f(a=text) say."""
    (call,) = parse(*cut(f"[f(a={text})]", places or []))
    assert isinstance(call, Call)
    return json.loads(call.arguments)["a"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(values, cuts())
def test_what_python_writes_is_read_as_the_same_value(value: Any, places: list[int]) -> None:
    assert arguments(repr(value), places) == value
    assert arguments(json.dumps(value), places) == value


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([*"nrtbfav\\'\"x0178uUNq é\n\t", "\\", "\\x4", "\\u00", "\\U0001f6"])),
    st.sampled_from(["'", '"', "'''", '"""']),
    cuts(),
)
def test_strings_have_the_escapes_that_python_has(
    inside: list[str], quote: str, places: list[int]
) -> None:
    text = f"{quote}{''.join(inside)}{quote}"
    try:
        expected = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return  # where Python refuses, more is read than nothing
    unescaped = "".join(inside).replace("\\\\", "").replace(f"\\{quote[0]}", "")
    if quote[:2] in unescaped or unescaped.endswith(quote[0]):
        return  # several strings, which Python joins
    if "\\\n" in text or "\\N" in text:
        return
    assert arguments(text, places) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0x1F", 31),
        ("1_000", 1000),
        ("+5", 5),
        (".5", 0.5),
        ("007", 7.0),
        ("1e400", None),
        ("-1.50e3", -1500.0),
        ("()", []),
        ("(1, (2,))", [1, [2]]),
        ("'\\\nx'", "x"),
        ("'''it's \"\n'''", "it's \"\n"),
        ("'\\ud83d\\ude00'", "😀"),
        ("true", True),
        ("null", None),
    ],
)
def test_other_ways_to_write_a_value(text: str, expected: Any) -> None:
    if text == "1e400":  # JSON has such numbers, Python's reader has none
        assert arguments(text) == math.inf
    else:
        assert arguments(text) == expected


@pytest.mark.parametrize("text", ["1-2", "inf", "x", "f'x'", "{1: 2}", "{1}", "[1 2]", "-", "1j"])
def test_what_is_no_literal_ends_the_call(text: str) -> None:
    call, rest = parse(f"[f(a={text})]")
    assert isinstance(call, Call) and isinstance(rest, str) and rest.endswith(")]")
    assert call.arguments.startswith('{"a": ')


def test_depth_is_bounded() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert str(arguments(deep)) == deep
    _, rest = parse(f"[f(a=[{deep}])]")
    assert rest == "[" + "]" * (MAX_DEPTH + 1) + ")]"
