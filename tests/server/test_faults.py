"""What a client is told of a field that is wrong: what was expected, what came, what to do."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from server.harness import Server

from streamkv.errors import InvalidRequestError
from streamkv.server import wire
from streamkv.server.chat import ChatRequest
from streamkv.server.responses.request import SOCKET_ADVICE, SOCKET_NOT_HONOURED, ResponseRequest

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "hi"}
EFFORTS = "'high', 'low', 'max', 'medium', 'minimal', 'none', 'xhigh'"
ID_CHARS = "letters, digits and any of . _ ~ : = + @ -"
OTHER_CHOICE = "tool_choice.type: expected one of 'function', 'allowed_tools', got 'web'"

MESSAGES = [
    ({"on_disconnect": "bogus"}, "expected one of 'abort', 'continue', 'pause', got 'bogus'"),
    ({"reasoning_effort": "huge"}, f"expected one of {EFFORTS}, got 'huge'"),
    ({"tool_choice": "any"}, "expected one of 'auto', 'none', 'required', got 'any'"),
    ({"tool_choice": {"type": "web"}}, OTHER_CHOICE),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type: expected 'function', got 'web_search'"),
    ({"top_logprobs": 21}, "expected at most 20, got 21"),
    ({"max_tokens": 0}, "expected at least 1, got 0"),
    ({"request_id": ""}, "expected at least 1 character, got 0"),
    ({"request_id": "x" * 129}, "expected at most 128 characters, got 129"),
    ({"request_id": "a/b"}, f"expected {ID_CHARS}, got 'a/b'"),
    ({"request_id": "a\n"}, f"expected {ID_CHARS}, got 'a\\n'"),
    ({"request_id": ".."}, f"expected {ID_CHARS}, got '..'"),
    ({"messages": []}, "expected at least 1 item, got 0"),
    ({"n": "two"}, "expected an integer, got a string"),
    ({"stream": 1}, "expected true or false, got an integer"),
    ({"stop": {}}, "expected a string or a list, got an object"),
    ({"logit_bias": {"a": 1}}, "expected an integer as each key, got a string"),
    ({"messages": [{"content": "x"}]}, "messages[0].role: required field is missing"),
]


@pytest.mark.parametrize(("fields", "message"), MESSAGES)
def test_an_error_says_what_was_expected_and_what_came(
    fields: dict[str, Any], message: str
) -> None:
    data = json.dumps({"messages": [USER]} | fields)
    with pytest.raises(InvalidRequestError) as caught:
        wire.decode_body(data, msgspec.json.Decoder(ChatRequest))
    [name] = fields
    expected = message if message.startswith(name) else f"{name}: {message}"
    assert caught.value.message == expected
    assert caught.value.param == expected.partition(": ")[0]


def test_a_body_that_is_no_object_is_named_so() -> None:
    with pytest.raises(InvalidRequestError, match="^body: expected an object, got a list$"):
        wire.decode_body("[]", msgspec.json.Decoder(ChatRequest))


def test_of_a_long_body_no_more_is_read_to_say_what_came() -> None:
    data = json.dumps({"messages": [USER | {"content": "x" * 100_000}], "top_logprobs": 21})
    with pytest.raises(InvalidRequestError, match="^top_logprobs: expected at most 20$"):
        wire.decode_body(data, msgspec.json.Decoder(ChatRequest))


ELSEWHERE = [
    (CHAT, "functions", [{"name": "f"}], "send tools and tool_choice"),
    (CHAT, "function_call", "auto", "send tools and tool_choice"),
    (CHAT, "max_output_tokens", 3, "send max_completion_tokens"),
    (CHAT, "text", {"format": {"type": "text"}}, "send response_format"),
    (CHAT, "regex", "a", "structured_outputs says what an answer is to match"),
    (CHAT, "audio", {}, "leave it out"),
    (TEXT, "max_completion_tokens", 3, "send max_tokens"),
    (RESPONSES, "response_format", {"type": "json_object"}, "send text.format"),
    (RESPONSES, "max_tokens", 3, "send max_output_tokens"),
    (RESPONSES, "messages", [USER], "send input"),
    (RESPONSES, "stream_id", "a", "send it over the WebSocket"),
]


@pytest.mark.parametrize(("path", "field", "value", "remedy"), ELSEWHERE)
def test_a_field_that_has_another_name_here_is_refused_with_that(
    server: Server, path: str, field: str, value: Any, remedy: str
) -> None:
    body = {CHAT: {"messages": [USER]}, TEXT: {"prompt": "a"}, RESPONSES: {"input": "a"}}[path]
    with server.client() as client:
        answer = client.post(path, json=body | {field: value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field
    assert error["message"] == f"{field}: not supported here; {remedy}"


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("stream", False, "leave it out: here all responses stream"),
        ("background", True, "send it to POST /v1/responses"),
    ],
)
def test_what_only_http_has_is_refused_on_the_socket_with_the_way_to_it(
    field: str, value: bool, remedy: str
) -> None:
    decoder = msgspec.json.Decoder(ResponseRequest)
    data = json.dumps({"input": "a", field: value})
    with pytest.raises(InvalidRequestError, match=f"^{field}: not supported here; {remedy}$"):
        wire.decode_body(data, decoder, not_honoured=SOCKET_NOT_HONOURED, advice=SOCKET_ADVICE)


def test_an_unknown_key_of_structured_outputs_is_named(server: Server) -> None:
    with server.client() as client:
        body = {"prompt": "a", "structured_outputs": {"regx": "a"}}
        error = client.post(TEXT, json=body).json()["error"]
    assert error["param"] == "structured_outputs.regx"
    assert "expected one of json, regex, choice" in error["message"]
    assert error["message"].endswith("got 'regx'")
