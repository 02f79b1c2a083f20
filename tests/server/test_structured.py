"""Structured output and forced calls, end to end: what an answer must match, by each field that may
say so, streamed and not.

The model babbles: its grammar alone makes it write JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pydantic
import pytest
from fakes import FakeMaskBoard
from openai import pydantic_function_tool
from server.harness import MODEL, VOCAB_SIZE, Server, fake_runner, read_events, serve
from server.test_tools import ask, called, model, tool
from tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        "names": {"type": "array", "items": {"enum": ["a", "é🙂"]}, "maxItems": 2},
    },
    "required": ["kind", "legs", "names"],
    "additionalProperties": False,
}


def babbling(kind: str | None = None) -> Any:
    """A server with a model of that kind whose words mean nothing. It never begins to reason: there
    is no h in what it is to write, or no mark at all."""
    engine = {} if kind is None else {"tokenizer": model(kind)}
    never = b"h" if kind in ("hermes", "both") else b"<"
    avoid = [i for i in range(VOCAB_SIZE) if kind and never in TOKENIZER.token_bytes(i)]
    masks = FakeMaskBoard(VOCAB_SIZE)
    runner = fake_runner(masks=masks, max_model_len=2048, avoid=avoid)
    return serve(runner, engine=engine)


@pytest.fixture(scope="module")
def masked() -> Iterator[Server]:
    with babbling() as running:
        yield running
        running.wait_idle()
        assert running.runner.violations == []
        assert running.runner.masks.violations == []


def content(server: Server, path: str, stream: bool, **fields: Any) -> str:
    """The answer's text, which ended by itself."""
    prompt = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    body = {"max_tokens": 300, "temperature": 0, "stream": stream, **prompt, **fields}
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    events = read_events(answer.text)[:-1] if stream else [answer.json()]
    choices = [choice for event in events for choice in event["choices"]]
    assert choices[-1]["finish_reason"] == "stop"
    if path == TEXT:
        return "".join(choice["text"] for choice in choices)
    messages = [choice["delta" if stream else "message"] for choice in choices]
    return "".join(message.get("content") or "" for message in messages)


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, **more}}


AS_SCHEMA: dict[str, Any] = {
    "response_format": json_schema(SCHEMA, strict=True),
    "structured_outputs": {"json": SCHEMA},
    "guided_json": SCHEMA,
}
AS_TEXT: dict[str, Any] = {
    "response_format": {"type": "json_object", "schema": SCHEMA},
    "structured_outputs": {"json": json.dumps(SCHEMA)},
    "guided_json": json.dumps(SCHEMA),
}


GRAMMAR = 'start: "x" y\ny: "1" | "2"'

AS_OTHERS: dict[str, Any] = {
    "response_format": {"type": "json_schema", "schema": SCHEMA},
    "guided_json": SCHEMA,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "fields", [AS_SCHEMA, AS_TEXT, AS_OTHERS], ids=["object", "text", "others"]
)
def test_a_schema_is_followed_whoever_names_it(
    masked: Server, fields: dict[str, Any], path: str, stream: bool
) -> None:
    texts = [content(masked, path, stream, **{name: fields[name]}) for name in fields]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) == 1, "it is one and the same grammar"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": r"[a-c]{3}/\d+é"}}, r"[a-c]{3}/\d+é"),
        ({"guided_regex": "(ab){1,3}c"}, "(ab){1,3}c"),
        ({"structured_outputs": {"choice": ["yes", "no", "可能"]}}, "yes|no|可能"),
        ({"guided_choice": ["a.b", "a+b"]}, r"a\.b|a\+b"),
        ({"structured_outputs": {"grammar": 'start: "x" y\ny: "1" | "2"'}}, "x[12]"),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")'}, "a[bc]"),
        ({"structured_outputs": {"lark": 'start: "p" /[qr]{2}/'}}, "p[qr]{2}"),
    ],
)
def test_other_kinds_are_followed_too(masked: Server, fields: dict[str, Any], pattern: str) -> None:
    for stream in (False, True):
        assert re.fullmatch(pattern, content(masked, CHAT, stream, **fields))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_grammar": GRAMMAR, "structured_outputs": {"grammar": GRAMMAR}}, "x[12]"),
        ({"guided_regex": "ab?", "structured_outputs": {"regex": "ab?"}}, "ab?"),
        ({"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}}, "a|b"),
        (AS_SCHEMA, r"\{.*\}"),
    ],
)
def test_several_fields_may_say_the_same(
    masked: Server, fields: dict[str, Any], pattern: str
) -> None:
    for path in (CHAT, TEXT):
        assert re.fullmatch(pattern, content(masked, path, False, **fields), re.DOTALL)


def test_fields_that_say_different_things_are_a_400(masked: Server) -> None:
    different: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": "a"}, "guided_regex": "b"},
        {"structured_outputs": {"regex": "a"}, "guided_grammar": GRAMMAR},
        {"structured_outputs": {"json": SCHEMA}, "guided_json": {"type": "object"}},
        {"response_format": json_schema(SCHEMA), "guided_json": {"type": "object"}},
        {**AS_SCHEMA, "guided_regex": "a"},
    ]
    with masked.client() as client:
        for fields in different:
            error = client.post(CHAT, json={"messages": [USER], **fields}).json()["error"]
            first, *_, last = fields
            told = f"{last}: expected nothing else beside {first}, which"
            assert error["param"] == last and error["message"].startswith(told)


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "guided_json_object"])
def test_any_json_object_will_do_where_that_is_asked_for(masked: Server, field: str) -> None:
    said = {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"json_object": True},
        "guided_json_object": True,
    }
    answer = ask(masked, stream=False, max_tokens=200, temperature=0, **{field: said[field]})
    text = answer["message"]["content"]
    assert text.lstrip().startswith("{")
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_structural_tag_lets_text_go_on_to_its_tags(masked: Server) -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<pet>",
            "content": {"type": "json_schema", "json_schema": SCHEMA},
            "end": "</pet>",
        },
    }
    text = content(masked, CHAT, False, response_format=tag)
    jsonschema.validate(json.loads(text.removeprefix("<pet>").removesuffix("</pet>")), SCHEMA)


def test_choices_and_prompts_each_follow_it(masked: Server) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "temperature": 1, "seed": 3, "max_tokens": 600}
    with masked.client() as client:
        answer = client.post(TEXT, json=body | {"guided_json": SCHEMA}).json()
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


class Pet(pydantic.BaseModel):
    """A pet."""

    legs: int = pydantic.Field(ge=0, le=8)
    is_cat: bool


def test_the_official_client_parses_a_pydantic_model(masked: Server) -> None:
    completions = masked.openai().chat.completions
    arguments: Any = {"model": MODEL, "messages": [USER], "response_format": Pet}
    arguments |= {"temperature": 0, "max_tokens": 300}
    whole = completions.parse(**arguments).choices[0].message.parsed
    assert isinstance(whole, Pet)
    with completions.stream(**arguments) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole


# --- forced calls -----------------------------------------------------------------------------

PET_TOOL = {"type": "function", "function": {"name": "pet", "parameters": SCHEMA}}
TOOLS = [PET_TOOL, tool("none", parameters={"type": "object", "additionalProperties": False})]
NAMED = {"type": "function", "function": {"name": "pet"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["hermes", "llama3_json", "mistral", "pythonic", "both"])
def test_a_required_call_is_made_in_each_format(kind: str, stream: bool) -> None:
    with babbling(kind) as server:
        fields = {"temperature": 0, "max_tokens": 400, "parallel_tool_calls": False}
        one = ask(server, stream=stream, tools=TOOLS, tool_choice="required", **fields)
        named = ask(server, stream=stream, tools=TOOLS, tool_choice=NAMED, **fields)
        server.wait_idle()
        assert server.runner.violations == []
    for choice in (one, named):
        assert choice["finish_reason"] == "tool_calls"
        [(name, arguments)] = called(choice)
        if name == "pet":
            jsonschema.validate(arguments, SCHEMA)
        else:
            assert arguments == {}
    assert called(named)[0][0] == "pet"


def test_a_response_format_holds_beside_tools(masked: Server) -> None:
    with babbling("hermes") as server:
        fields = {"temperature": 0, "max_tokens": 400, "response_format": json_schema(SCHEMA)}
        for seed in range(6):
            message = {"role": "user", "content": f"question {seed}"}
            choice = ask(server, stream=False, tools=[PET_TOOL], messages=[message], **fields)
            if choice["finish_reason"] == "tool_calls":
                for _, arguments in called(choice):
                    jsonschema.validate(arguments, SCHEMA)
            else:
                jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_a_response_format_comes_after_reasoning() -> None:
    with babbling("reasoning") as server:
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": 300}
        fields |= {"response_format": json_schema(SCHEMA)}
        closed = ask(server, stream=False, **fields)
        jsonschema.validate(json.loads(closed["message"]["content"]), SCHEMA)


CLOSED = {"chat_template_kwargs": {"begin": "<think>\n\n</think>\n\n"}}
CONTINUED = {
    "messages": [USER, {"role": "assistant", "content": "Well, "}],
    "continue_final_message": True,
    "add_generation_prompt": False,
}


@pytest.fixture(scope="module")
def thinking() -> Iterator[Server]:
    """A server with a model that begins to reason at times, where it may."""
    masks = FakeMaskBoard(VOCAB_SIZE)
    with serve(
        fake_runner(masks=masks, max_model_len=2048), engine={"tokenizer": model("both")}
    ) as running:
        yield running
        running.wait_idle()


@pytest.mark.parametrize(
    ("fields", "may_reason"),
    [
        ({}, True),
        ({"reasoning_effort": "high"}, True),
        (CLOSED, False),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        (CONTINUED, False),
    ],
)
def test_an_answer_is_bound_from_its_first_token_where_there_is_no_place_for_reasoning(
    thinking: Server, fields: dict[str, Any], may_reason: bool
) -> None:
    body = {"messages": [USER], "n": 16, "seed": 1, "max_tokens": 12} | fields
    wanted: list[dict[str, Any]] = [
        {"guided_choice": ["yes", "no"]},
        {"guided_choice": ["yes", "no"], "tools": TOOLS, "seed": 3},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": NAMED},
    ]
    with thinking.client() as client:
        for more in wanted:
            answer = client.post(CHAT, json=body | more)
            assert answer.status_code == 200, answer.text
            messages = [choice["message"] for choice in answer.json()["choices"]]
            assert any("reasoning" in message for message in messages) is may_reason
            if not may_reason and "tools" not in more:
                assert {message["content"] for message in messages} <= {"yes", "no"}


def test_where_the_prompt_has_closed_the_reasoning_what_matches_is_content(
    thinking: Server,
) -> None:
    text = "<think>no</think>"
    choice = ask(thinking, stream=False, guided_choice=[text], max_tokens=40, **CLOSED)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_a_required_call_that_is_cut_off_has_no_content(kind: str, stream: bool) -> None:
    with babbling(kind) as server:
        for tool_choice in ("required", NAMED):
            fields = {"tools": TOOLS, "tool_choice": tool_choice, "temperature": 0}
            for num_tokens in (2, 6, 11):
                choice = ask(server, stream=stream, max_tokens=num_tokens, **fields)
                assert choice["finish_reason"] == "length"
                assert not choice["message"]["content"]
                if not stream:
                    assert choice["message"]["content"] is None
                    continue
                body = {"messages": [USER], "stream": True, "max_tokens": num_tokens, **fields}
                with server.client() as client:
                    events = read_events(client.post(CHAT, json=body).text)[:-1]
                deltas = [event["choices"][0]["delta"] for event in events]
                assert [delta.get("content") for delta in deltas] == [""] + [None] * len(deltas[1:])


def test_the_official_client_gets_arguments_of_strict_tools() -> None:
    with babbling("hermes") as server:
        message = (
            server.openai()
            .chat.completions.parse(
                model=MODEL,
                messages=[USER],
                tools=[pydantic_function_tool(Pet)],
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=0,
                max_tokens=300,
            )
            .choices[0]
            .message
        )
    [call] = message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Pet)


def test_calls_that_nobody_requires_obey_strict_tools_and_text_stays_free() -> None:
    strict = {"type": "function", "function": {**PET_TOOL["function"], "strict": True}}
    with babbling("hermes") as server, server.client() as client:
        choice = ask(server, stream=False, tools=[strict], max_tokens=30, temperature=0)
        assert choice["message"]["content"], "nothing makes it call"
        body = {"messages": [USER], "use_beam_search": True, "n": 2, "max_tokens": 5}
        for tools, status in (([PET_TOOL], 200), ([strict], 400)):
            answer = client.post(CHAT, json=body | {"tools": tools})
            assert answer.status_code == status, "a grammar is what beams can't follow"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"structured_outputs": {"regex": "a+"}},
            "structured_outputs: expected none with use_beam_search, got regex; leave it out",
        ),
        (
            {"guided_json": SCHEMA},
            "guided_json: expected none with use_beam_search, got json; leave it out",
        ),
        (
            {"response_format": {"type": "json_object"}, "tools": [PET_TOOL]},
            "response_format: expected none with use_beam_search, got json_object; leave it out",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            'tool_choice: expected "auto" or "none" with use_beam_search, got one by',
        ),
        (
            {"tools": TOOLS, "tool_choice": NAMED},
            'tool_choice: expected "auto" or "none" with use_beam_search, got one by',
        ),
        (
            {"tools": [PET_TOOL, tool("f", strict=True)]},
            "tools: expected none with strict: true with use_beam_search, got 'f'; leave strict",
        ),
    ],
)
def test_what_beams_cant_follow_is_named_as_the_client_sent_it(
    fields: dict[str, Any], message: str
) -> None:
    with babbling("hermes") as server, server.client() as client:
        body = {"messages": [USER], "use_beam_search": True, "n": 2, "max_tokens": 5}
        error = client.post(CHAT, json=body | fields).json()["error"]
    assert error["message"].startswith(message), error
    assert error["param"] == message.partition(":")[0]


# --- what can't be followed -------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cant_be_followed_is_a_400_that_names_the_clients_field(
    masked: Server, path: str, stream: bool
) -> None:
    broken: list[tuple[str, Any]] = [
        ("response_format", json_schema({"type": "nonsense"})),
        ("response_format", json_schema({"$ref": "#/nowhere"})),
        ("structured_outputs", {"regex": "(a"}),
        ("structured_outputs", {"grammar": "start: missing"}),
        ("structured_outputs", {"json": "{"}),
        ("guided_json", "no json"),
        ("guided_regex", "((a{1,1000}){1,1000}){1,1000}"),  # after some tokens
        ("guided_grammar", "start: ("),
    ]
    prompt = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    with masked.client() as client:
        for field, value in broken:
            answer = client.post(path, json={**prompt, field: value, "stream": stream})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == field
            assert error["message"].startswith(f"{field}: ")
    masked.wait_idle()


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"guided_choice": []}, "guided_choice", "at least one text, got an empty list"),
        ({"guided_choice": ["a", ""]}, "guided_choice", r"\[1\]: .*got ''"),
        ({"guided_regex": ""}, "guided_regex", "isn't empty, got ''"),
        ({"guided_json": {}, "guided_whitespace_pattern": ""}, "guided_whitespace_pattern", "''"),
        ({"guided_regex": "a", "guided_whitespace_pattern": "b"}, "guided_whitespace_pattern", ""),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "regex.*got 'regx'"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "expected none without JSON",
        ),
        ({"response_format": json_schema("")}, "response_format.json_schema.schema", "''"),
    ],
)
def test_an_error_names_the_clients_field(
    masked: Server, fields: dict[str, Any], param: str, told: str
) -> None:
    for path, prompt in ((CHAT, {"messages": [USER]}), (TEXT, {"prompt": "hi"})):
        with masked.client() as client:
            answer = client.post(path, json=prompt | fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(param) and re.search(told, error["message"])


def test_a_tool_whose_schema_cant_be_followed_is_named() -> None:
    with babbling("hermes") as server, server.client() as client:
        body = {"messages": [USER], "tool_choice": "required"}
        for parameters in ({"type": "string"}, {"type": "object", "properties": {"a": 3}}):
            tools = [tool("f", parameters=parameters)]
            answer = client.post(CHAT, json=body | {"tools": tools})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith("tools")


def test_without_masks_a_device_refuses_what_needs_them() -> None:
    with serve() as server, server.client() as client:
        body = {"messages": [USER], "response_format": {"type": "json_object"}}
        answer = client.post(CHAT, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


def test_tools_whose_calls_can_not_be_followed_are_named() -> None:
    odd = {"$ref": "#"}
    with babbling("hermes") as server, server.client() as client:
        function = {"name": "odd", "parameters": odd}
        asked = {"messages": [USER], "tools": [{"type": "function", "function": function}]}
        answer = client.post(CHAT, json=asked | {"tool_choice": "required"})
        flat = {"input": "hi", "tools": [{"type": "function", **function, "strict": False}]}
        other = client.post("/v1/responses", json=flat | {"tool_choice": "required"})
        for error in (answer.json()["error"], other.json()["error"]):
            begin = "tools: expected parameters (of 'odd') that can be followed, got"
            assert error["param"] == "tools" and error["message"].startswith(begin), error
