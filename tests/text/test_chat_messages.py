"""Messages in the forms that people write them, as templates read them."""

from __future__ import annotations

from typing import Any

import pytest

from streamkv.errors import InvalidRequestError
from streamkv.text.chat_messages import num_chars, template_messages

FUNCTION = {"name": "weather", "arguments": '{"city": "Rome", "days": [1]}'}
READ = {"name": "weather", "arguments": {"city": "Rome", "days": [1]}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "hi", "name": None}, {"role": "user", "content": "hi"}),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"function": FUNCTION}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": READ}],
            },
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [FUNCTION]},
            {"role": "assistant", "content": "", "tool_calls": [READ]},
        ),
        (
            {"role": "tool", "content": [{"type": "text", "text": "7"}], "tool_call_id": "1"},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
        ),
        (
            {"role": "assistant", "content": None, "function_call": FUNCTION, "audio": None},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": READ}],
            },
        ),
        (
            {"role": "function", "name": "weather", "content": "7"},
            {"role": "tool", "name": "weather", "content": "7"},
        ),
        ({"role": "assistant", "refusal": "No."}, {"role": "assistant", "content": "No."}),
        (
            {"role": "assistant", "content": "Hm.", "refusal": "No."},
            {"role": "assistant", "content": "Hm.\nNo."},
        ),
        (
            {"role": "assistant", "tool_calls": [], "reasoning_content": "so"},
            {"role": "assistant", "content": "", "reasoning_content": "so"},
        ),
    ],
)
def test_every_form_becomes_the_one_that_templates_read(
    message: dict[str, Any], expected: dict[str, Any]
) -> None:
    once = template_messages([message])
    assert once == [expected]
    assert template_messages(once) == once


@pytest.mark.parametrize(
    ("message", "param", "named"),
    [
        ("hi", "messages[1]", "'hi'"),
        ({"content": "hi"}, "messages[1]", "a dict with role"),
        ({"role": "user"}, "messages[1].content", "got null"),
        ({"role": "tool", "content": 5}, "messages[1].content", "got int"),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[1].audio", "text only"),
        ({"role": "assistant", "refusal": 1}, "messages[1].refusal", "got int"),
        ({"role": "assistant", "function_call": "f"}, "messages[1].function_call", "'f'"),
        (
            {"role": "user", "content": [{"type": "text", "text": None}]},
            "messages[1].content[0]",
            "a text without its text",
        ),
        ({"role": "assistant", "tool_calls": "f"}, "messages[1].tool_calls", "a list"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[1].tool_calls[0]", "'f'"),
    ],
)
def test_what_no_template_could_read_is_refused_by_its_place(
    message: Any, param: str, named: str
) -> None:
    with pytest.raises(InvalidRequestError, match="expected") as caught:
        template_messages([{"role": "user", "content": "hi"}, message])
    assert caught.value.param == param
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        '{"city": "Ro',
        "",
        "[1]",
        "null",
        '"Rome"',
        "7",
        "[" * 10_000,
        "\ud800",
        '{"a": NaN}',
        [1],
        None,
    ],
    ids=lambda given: f"{given!r:.12}",
)
def test_arguments_that_are_no_json_object_become_an_empty_one(given: Any) -> None:
    function = {"name": "weather", "arguments": given}
    for called in ({"tool_calls": [{"function": function}]}, {"function_call": function}):
        [message] = template_messages([{"role": "assistant", **called}])
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": {}}


def test_text_is_counted_wherever_it_stands_and_no_further_than_asked() -> None:
    parts = [{"type": "text", "text": "x" * 1000}] * 5
    call = {"function": {"name": "f", "arguments": "x" * 500}}
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]}]
    assert 5500 <= num_chars(messages, 10**9) < 5700
    assert num_chars({"k" * 5000: [{"x" * 600: 1}]}, 10**9) > 5600
    assert 3000 < num_chars(messages, 3000) < 4100
    assert num_chars(range(10**12), 3000) == 10**12
