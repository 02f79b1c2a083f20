"""The fields of `POST /v1/responses`: each works, or is refused by its name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types.responses import response_create_params, responses_client_event
from server.harness import MAX_MODEL_LEN, MODEL, Server
from server.responses_client import create, stream

from streamkv.errors import InvalidRequestError
from streamkv.server.responses.input import MAX_OBJECTS
from streamkv.server.responses.items import (
    MAX_ARGUMENTS_LEN,
    ContentPart,
    InputItem,
    check_item,
    messages_of,
)
from streamkv.server.responses.object import FunctionCall, OutputMessage, OutputText, ReasoningItem
from streamkv.server.responses.request import HTTP_NOT_HONOURED, ResponseRequest
from streamkv.server.wire import decode_body

USER = {"role": "user", "content": "the fox"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}

# OpenAI's fields: a value that works and what the response tells of it, or one that is refused.
TOLD: Any = object()  # the value itself
SKIPPED: Any = object()  # nothing
REFUSED: Any = object()
FIELDS: dict[str, list[tuple[Any, Any]]] = {
    "access_programs": [({"cyber": "standard"}, REFUSED)],
    "background": [(False, TOLD)],
    "background_options": [({"completion_window": "2h"}, REFUSED)],
    "context_management": [([], SKIPPED), ([{"type": "compaction"}], REFUSED)],
    "conversation": [("conv_1", REFUSED), ({"id": "conv_1"}, REFUSED)],
    "image": [({"context_compression": "auto"}, REFUSED)],
    "include": [
        (["message.output_text.logprobs", "reasoning.encrypted_content"], SKIPPED),
        (["web_search_call.results"], SKIPPED),
        (["no.such.thing"], REFUSED),
    ],
    "input": [("the sun", SKIPPED), ([USER], SKIPPED), (7, REFUSED), ([], REFUSED)],
    "instructions": [("be kind", TOLD), (7, REFUSED)],
    "max_output_tokens": [(3, TOLD), (0, REFUSED), (MAX_MODEL_LEN, REFUSED)],
    "max_tool_calls": [(3, TOLD)],
    "metadata": [({"a": "b"}, TOLD), ({"a": "v" * 513}, REFUSED), ({"a" * 65: "b"}, REFUSED)],
    "model": [(MODEL, TOLD), (7, REFUSED)],
    "moderation": [({"model": "omni-moderation-latest"}, REFUSED)],
    "parallel_tool_calls": [(True, TOLD), (False, TOLD)],
    "previous_response_id": [("resp_none", REFUSED)],
    "prompt": [({"id": "pmpt_1"}, REFUSED)],
    "prompt_cache_key": [("key", TOLD)],
    "prompt_cache_options": [
        ({"mode": "implicit", "ttl": "30m", "prewarm": False}, SKIPPED),
        ({"comparison_response_id": "resp_1"}, REFUSED),
    ],
    "prompt_cache_retention": [("24h", TOLD), ("for ever", REFUSED)],
    "reasoning": [
        ({"effort": "low", "summary": None, "context": "auto", "mode": "standard"}, SKIPPED),
        ({"effort": "enormous"}, REFUSED),
        ({"summary": "auto"}, SKIPPED),
        ({"generate_summary": "auto"}, SKIPPED),
        ({"summary": "concise"}, REFUSED),
        ({"summary": "detailed"}, REFUSED),
        ({"generate_summary": "concise"}, REFUSED),
        ({"mode": "pro"}, REFUSED),
        ({"context": "all_turns"}, REFUSED),
    ],
    "safety_identifier": [("someone", TOLD)],
    "service_tier": [("flex", SKIPPED)],
    "store": [(True, TOLD), (False, TOLD)],
    "stream": [(False, SKIPPED)],
    "stream_options": [({"include_obfuscation": True}, REFUSED)],  # without stream
    "temperature": [(0.5, TOLD), (-1, REFUSED)],
    "text": [
        ({"format": {"type": "text"}, "verbosity": "medium"}, TOLD),
        ({"verbosity": "low"}, REFUSED),
        ({"format": {"type": "xml"}}, REFUSED),
        ({"format": {"type": "json_schema", "name": "a"}}, REFUSED),
    ],
    "tool_choice": [
        ("auto", TOLD),
        ("none", TOLD),
        ("required", REFUSED),  # without tools
        ({"type": "function", "name": "f"}, REFUSED),
        ({"type": "function"}, REFUSED),
        ({"type": "mcp", "server_label": "x"}, REFUSED),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, REFUSED),
    ],
    "tools": [
        ([FUNCTION], SKIPPED),
        ([], TOLD),
        ([{"type": "web_search"}], REFUSED),
        ([FUNCTION, {"type": "function"}], REFUSED),
    ],
    "top_logprobs": [(2, TOLD), (21, REFUSED)],
    "top_p": [(0.5, TOLD), (1.5, REFUSED)],
    "truncation": [("auto", TOLD), ("disabled", TOLD), ("never", REFUSED)],
    "user": [("someone", TOLD)],
}
CASES = [(name, value, told) for name, rows in FIELDS.items() for value, told in rows]


def post(server: Server, **body: Any) -> Any:
    with server.client() as client:
        return client.post("/v1/responses", json={"input": "hi", "temperature": 0} | body)


def test_the_table_has_every_field_that_the_official_client_can_send() -> None:
    http = response_create_params.ResponseCreateParamsStreaming.__annotations__
    official = {*http, *response_create_params.ResponseCreateParamsBase.__annotations__}
    assert official == set(FIELDS)
    socket = responses_client_event.ResponseCreate.model_fields.keys()
    assert socket - official == {"type", "generate", "stream_id"}


@pytest.mark.parametrize(("name", "value", "told"), CASES)
def test_a_field_works_or_is_refused_by_its_name(
    server: Server, name: str, value: Any, told: Any
) -> None:
    body = {"max_output_tokens": 2} | {name: value}
    if told is REFUSED:
        error = post(server, **body).json()["error"]
        assert (error["param"] or "").startswith(name), error
        assert error["message"].startswith(error["param"])
        assert error["type"] == "invalid_request_error"
        return
    response = create(server, **body)
    if told is TOLD:
        shown = response.model_dump(exclude_unset=True)
        assert shown[name] == value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt_cache_options": {"comparison_response_id": "resp_1"}},
            "prompt_cache_options.comparison_response_id: expected null, got 'resp_1', which",
        ),
        (
            {"reasoning": {"summary": "detailed"}},
            "reasoning.summary: expected 'auto', got 'detailed', which",
        ),
    ],
)
def test_what_is_expected_is_said_in_the_words_of_json(
    server: Server, fields: dict[str, Any], message: str
) -> None:
    assert post(server, **fields).json()["error"]["message"].startswith(message)


def test_every_optional_field_may_be_null(server: Server) -> None:
    names = {*ResponseRequest.__struct_fields__, *HTTP_NOT_HONOURED, *FIELDS}
    names -= {"input", "max_output_tokens"}
    response = create(server, **dict.fromkeys(names), max_output_tokens=2)
    temperature = server.engine.sampling_defaults["temperature"]
    assert (response.temperature, response.top_p, response.model) == (temperature, 1.0, MODEL)
    inner: dict[str, Any] = {
        "reasoning": dict.fromkeys(("effort", "summary", "generate_summary", "context", "mode")),
        "text": {"format": None, "verbosity": None},
        "prompt_cache_options": dict.fromkeys(("mode", "ttl", "prewarm")),
        "tools": [FUNCTION | {"description": None, "strict": None, "parameters": None}],
    }
    assert create(server, max_output_tokens=1, **inner).tools[0].type == "function"


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[1].name", {"tools": [FUNCTION, {"type": "function"}]}),
        ("tool_choice.type", {"tools": [FUNCTION], "tool_choice": {"type": "custom"}}),
        ("tool_choice.name", {"tools": [FUNCTION], "tool_choice": {"type": "function"}}),
        ("tool_choice", {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}),
        ("tool_choice.mode", {"tool_choice": {"type": "allowed_tools", "tools": [FUNCTION]}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "a", "schema": 7}}}),
        (
            "structured_outputs",
            {
                "text": {"format": {"type": "json_object"}},
                "structured_outputs": {"regex": "a"},
            },
        ),
        ("max_tokens", {"max_tokens": 5}),
        ("n", {"n": 2}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("messages", {"messages": [USER]}),
        ("return_token_ids", {"return_token_ids": True}),
        ("credits", {"credits": 5}),
        ("stream_id", {"stream_id": "a"}),
        ("top_k", {"top_k": -7}),
        ("input", {"input": None}),
        ("input", {"input": "the fox " * MAX_MODEL_LEN}),
        ("input[0].type", {"input": [{"type": "computer_call_output", "call_id": "c"}]}),
        ("input[1].role", {"input": [USER, {"content": "x"}]}),
        ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
        ("input[0].content", {"input": [{"role": "user"}]}),
        ("input[1].call_id", {"input": [USER, {"type": "function_call_output", "output": "x"}]}),
        ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
        ("input[0].arguments", {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}),
        (
            "input[0].content[0].type",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        ),
        (
            "input[0].content[0].text",
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        ),
        (
            "input[0].output[0].type",
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_file", "file_id": "x"}],
                    }
                ]
            },
        ),
        (
            "input[0].content[0].type",
            {"input": [{"type": "reasoning", "content": [{"type": "x"}]}]},
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: Server, param: str, body: dict[str, Any]
) -> None:
    answer = post(server, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == param and error["message"].startswith(param), error


def test_a_schema_that_is_not_utf8_is_refused_though_it_is_only_handed_on(server: Server) -> None:
    body = (
        b'{"input":"hi","text":{"format":{"type":"json_schema","name":"n","schema":{"a":"\xff"}}}}'
    )
    with server.client() as client:
        answer = client.post("/v1/responses", content=body)
    assert answer.status_code == 400 and "UTF-8" in answer.json()["error"]["message"]


def test_obfuscation_may_be_asked_for_and_options_are_for_streams(server: Server) -> None:
    options = {"include_obfuscation": True}
    assert stream(server, stream_options=options, max_output_tokens=2)[-1].response.output


# --- items -----------------------------------------------------------------------------------


def call(call_id: str, arguments: str = "{}") -> FunctionCall:
    return FunctionCall(id="fc_1", call_id=call_id, name="f", arguments=arguments)


def output(call_id: str) -> InputItem:
    return InputItem(type="function_call_output", call_id=call_id, output="done")


def test_an_assistants_turn_is_one_message() -> None:
    texts = (OutputText(text="one"),)
    items = [
        InputItem(role="user", content="hi"),
        InputItem(type="reasoning", summary=[]),  # nothing to tell
        ReasoningItem(id="rs_1"),
        OutputMessage(id="msg_1", content=texts),
        call("a"),
        call("b", '{"x": 1'),
        output("a"),
        output("b"),
        OutputMessage(id="msg_2", content=texts),
        OutputMessage(id="msg_3", content=texts),
    ]
    roles = [(message["role"], message["content"]) for message in messages_of(items)]
    assert roles == [
        ("user", "hi"),
        ("assistant", "one"),
        ("tool", "done"),
        ("tool", "done"),
        ("assistant", "one"),
        ("assistant", "one"),
    ]
    [first, second] = messages_of(items)[1]["tool_calls"]
    assert (first["id"], first["function"]) == ("a", {"name": "f", "arguments": {}})
    assert second["function"]["arguments"] == {}, "a call that was cut is told without"


def test_a_call_that_was_cut_may_be_sent_back(server: Server) -> None:
    """By the client, as by previous_response_id."""
    cut, whole = (
        create(
            server, input=[USER, CALL_ITEM | {"arguments": arguments}, USER], max_output_tokens=2
        )
        for arguments in ('{"city": "Os', "{}")
    )
    assert cut.usage is not None and whole.usage is not None
    assert cut.usage.input_tokens == whole.usage.input_tokens
    assert cut.output_text == whole.output_text


def test_the_output_of_a_call_follows_it_whatever_was_said_meanwhile() -> None:
    said = InputItem(role="user", content="in Celsius")
    messages = messages_of([call("a"), said, output("a")])
    assert [message["role"] for message in messages] == ["assistant", "tool", "user"]


def test_a_refusal_and_names_are_read_as_text() -> None:
    part = ContentPart("refusal", refusal="no")
    item = InputItem(role="assistant", content=[part])
    check_item(item, "input[0]")
    assert messages_of([item]) == [{"role": "assistant", "content": "no"}]
    with pytest.raises(InvalidRequestError):
        check_item(InputItem(role="user", content=[ContentPart("refusal")]), "input[0]")


# --- truncation ------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "num_turns"), [(8, 20), (None, 20), (8, 300)])
def test_a_conversation_that_is_too_long_loses_its_oldest_turns(
    server: Server, limit: int | None, num_turns: int
) -> None:
    instructions = {"role": "system", "content": "be kind"}
    turns = [
        {"role": role, "content": f"{role} says {number} " + "and the fox jumps " * 3}
        for number in range(num_turns)
        for role in ("user", "assistant")
    ] + [{"role": "user", "content": "and now?"}]
    body: dict[str, Any] = {"instructions": "be kind", "input": turns, "truncation": "auto"}
    body |= {"max_output_tokens": limit, "stop_token_ids": [] if limit else [*range(339)]}
    response = create(server, **body)
    most = MAX_MODEL_LEN - limit if limit is not None else MAX_MODEL_LEN - MAX_MODEL_LEN // 4
    starts = range(max(0, len(turns) - 41), len(turns), 2)
    prompts = [server.chat_prompt(instructions, *turns[start:]) for start in starts]
    kept = next(prompt for prompt in prompts if len(prompt) <= most)
    assert response.usage is not None and response.usage.input_tokens == len(kept)
    if limit is not None:
        assert response.output_text == server.text(server.answer(kept, limit))
    refused = post(server, **body | {"truncation": "disabled"}).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")
    long = [{"role": "user", "content": "the fox " * MAX_MODEL_LEN}]
    refused = post(server, **body | {"input": long}).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")


def test_a_conversation_that_fits_is_not_cut(server: Server) -> None:
    turns = [{"role": "user", "content": f"number {number}"} for number in range(5)]
    whole = create(server, input=turns, max_output_tokens=4)
    assert (
        create(server, input=turns, max_output_tokens=4, truncation="auto").usage.input_tokens
        == whole.usage.input_tokens
    )


CALL_ITEM = {"type": "function_call", "call_id": "a", "name": "f"}
ARGUMENTS = "input[0].arguments"
MANY_PARTS = [{"type": "input_text", "text": "a"}] * MAX_OBJECTS
BRACES = "{" * MAX_OBJECTS * 3


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input": [USER] * (MAX_OBJECTS + 1)}, "input"),
        ({"input": [{"role": "user", "content": MANY_PARTS}]}, "input"),
        ({"input": [USER] * MAX_OBJECTS}, None),
        ({"input": BRACES}, None),
        ({"previous_response_id": "a" * 257}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "a" * 257}]}, "input[0].id"),
        ({"input": [CALL_ITEM | {"arguments": " " * MAX_ARGUMENTS_LEN + "{}"}]}, ARGUMENTS),
        ({"input": [CALL_ITEM | {"arguments": "{}"}]}, None),
    ],
)
def test_what_a_request_can_make_of_its_bytes_is_bounded(asked: Any, param: str | None) -> None:
    decoder = msgspec.json.Decoder(ResponseRequest)
    data = msgspec.json.encode(asked)
    if param is None:
        assert decode_body(data, decoder).input is not None
        return
    with pytest.raises(InvalidRequestError) as error:
        decode_body(data, decoder)
    assert error.value.param == param
