"""Whatever a client sends, the answer is a 4xx in OpenAI's shape that names the field at fault.

Each case runs with and without `stream`: what is known before the first byte is a status, not an
event.
"""

from __future__ import annotations

import json
import random
import socket
import threading
from typing import Any

import httpx
import openai
import pytest
from server.harness import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Server, fake_runner, serve
from server.test_fields import WORKS

from streamkv.server.chat import NOT_HONOURED as CHAT_NOT_HONOURED
from streamkv.server.chat import ChatRequest
from streamkv.server.completions import NOT_HONOURED as TEXT_NOT_HONOURED
from streamkv.server.completions import CompletionRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 2} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hi", "max_tokens": 2} | fields


def said(**message: Any) -> dict[str, Any]:
    return chat(messages=[USER, message])


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
JSON_OBJECT = {"type": "json_object"}
MODE = "tool_choice.allowed_tools.mode"


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = list(map(named, names))
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


CALL = {"function": {"name": "f", "arguments": "{}"}}

# path, body, status, param
CASES = [
    (CHAT, {}, 400, "messages"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages=None), 400, "messages"),
    (CHAT, chat(messages="hi"), 400, "messages"),
    (CHAT, chat(messages=[1]), 400, "messages[0]"),
    (CHAT, chat(messages=[{"content": "hi"}]), 400, "messages[0].role"),
    (CHAT, said(role="wizard", content="hi"), 400, "messages[1].role"),
    (CHAT, said(role="user", content=7), 400, "messages[1].content"),
    (CHAT, said(role="user", content=None), 400, "messages[1].content"),
    (CHAT, said(role="user"), 400, "messages[1].content"),
    (CHAT, said(role="user", content=[IMAGE]), 400, "messages[1].content[0]"),
    (CHAT, said(role="user", content=[{"type": "text"}]), 400, "messages[1].content[0]"),
    (CHAT, said(role="user", content=[{}]), 400, "messages[1].content[0].type"),
    (
        CHAT,
        said(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
        400,
        "messages[1].tool_calls[0].function.arguments",
    ),
    (CHAT, chat(model="gpt-none"), 404, "model"),
    (CHAT, chat(model=3), 400, "model"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    (CHAT, chat(max_tokens=1.5), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**6), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**30), 400, "max_tokens"),
    (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    (CHAT, chat(max_completion_tokens=10**6), 400, "max_completion_tokens"),
    (CHAT, chat(temperature=-0.1), 400, "temperature"),
    (CHAT, chat(temperature="hot"), 400, "temperature"),
    (CHAT, chat(temperature=True), 400, "temperature"),
    (CHAT, chat(top_p=0), 400, "top_p"),
    (CHAT, chat(top_p=1.01), 400, "top_p"),
    (CHAT, chat(top_k=-2), 400, "top_k"),
    (CHAT, chat(min_p=2), 400, "min_p"),
    (CHAT, chat(n=0), 400, "n"),
    (CHAT, chat(n=129), 400, "n"),
    (CHAT, chat(n=10**400), 400, "n"),
    (CHAT, chat(presence_penalty=2.1), 400, "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), 400, "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty"),
    (CHAT, chat(seed="x"), 400, "seed"),
    (CHAT, chat(seed=2**64), 400, "seed"),
    (CHAT, chat(stop=""), 400, "stop"),
    (CHAT, chat(stop=["a", ""]), 400, "stop"),
    (CHAT, chat(stop=["a"] * 17), 400, "stop"),
    (CHAT, chat(stop=[1]), 400, "stop[0]"),
    (CHAT, chat(stop_token_ids=[VOCAB_SIZE]), 400, "stop_token_ids"),
    (CHAT, chat(stop_token_ids=[-1]), 400, "stop_token_ids[0]"),
    (CHAT, chat(logit_bias={"x": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"1": 101}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={str(VOCAB_SIZE): 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"-1": 1}), 400, "logit_bias"),
    (CHAT, chat(min_tokens=3), 400, "min_tokens"),
    (CHAT, chat(logprobs=2), 400, "logprobs"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (CHAT, chat(stream_options=True), 400, "stream_options"),
    (CHAT, chat(priority=2**40), 400, "priority"),
    (CHAT, chat(request_id=""), 400, "request_id"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools[0].function"),
    (CHAT, chat(tools=[{"type": "function", "function": {}}]), 400, "tools[0].function.name"),
    (CHAT, chat(tools=[{"type": "custom", "custom": {"name": "f"}}]), 400, "tools[0].type"),
    (CHAT, chat(tools=[TOOL] * 1025), 400, "tools"),
    (CHAT, chat(tools=[TOOL], tool_choice="always"), 400, "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice={"type": "function"}), 400, "tool_choice.function"),
    (CHAT, chat(tools=[TOOL], tool_choice=named("g")), 400, "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice=allowed("auto", "g")), 400, "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice=allowed("never", "f")), 400, MODE),
    (CHAT, chat(tool_choice=named("f")), 400, "tool_choice"),
    (CHAT, chat(tool_choice={"type": "custom", "custom": {"name": "f"}}), 400, "tool_choice.type"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    (CHAT, chat(functions=[{"name": "f"}]), 400, "functions"),
    (CHAT, chat(function_call={"name": "f"}), 400, "function_call"),
    (CHAT, chat(response_format={}), 400, "response_format.type"),
    (CHAT, chat(response_format="json"), 400, "response_format"),
    (CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type"),
    (CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema"),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": 1}}),
        400,
        "response_format.json_schema.name",
    ),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"schema": [1]}}),
        400,
        "response_format",
    ),
    (CHAT, chat(response_format={"type": "structural_tag"}), 400, "response_format"),
    (CHAT, chat(response_format={"type": "text", "schema": {}}), 400, "response_format.schema"),
    (
        CHAT,
        chat(response_format=JSON_OBJECT | {"json_schema": {"schema": {}}}),
        400,
        "response_format.json_schema",
    ),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {}, "schema": {}}),
        400,
        "response_format.schema",
    ),
    (CHAT, chat(guided_regex="a", guided_whitespace_pattern=" "), 400, "guided_whitespace_pattern"),
    (CHAT, chat(audio={"voice": "x"}), 400, "audio"),
    (CHAT, chat(modalities=["text", "audio"]), 400, "modalities"),
    (CHAT, chat(prediction={"type": "content"}), 400, "prediction"),
    (CHAT, chat(web_search_options={}), 400, "web_search_options"),
    (CHAT, chat(reasoning_effort="much"), 400, "reasoning_effort"),
    (CHAT, chat(prompt_logprobs=21), 400, "prompt_logprobs"),
    (CHAT, chat(prompt_logprobs=-1), 400, "prompt_logprobs"),
    (CHAT, chat(structured_outputs={}), 400, "structured_outputs"),
    (CHAT, chat(structured_outputs={"regex": 3}), 400, "structured_outputs.regex"),
    (CHAT, chat(structured_outputs={"regex": "a", "choice": ["a"]}), 400, "structured_outputs"),
    (CHAT, chat(structured_outputs={"regex": "("}), 400, "structured_outputs"),
    (CHAT, chat(structured_outputs={"choice": []}), 400, "structured_outputs.choice"),
    (CHAT, chat(structured_outputs={"grammar": "start: nothing"}), 400, "structured_outputs"),
    (CHAT, chat(structured_outputs={"json": "{"}), 400, "structured_outputs"),
    (CHAT, chat(guided_regex="("), 400, "guided_regex"),
    (CHAT, chat(guided_json={"type": "x"}), 400, "guided_json"),
    (CHAT, chat(guided_regex="a", guided_choice=["a"]), 400, "guided_choice"),
    (CHAT, chat(guided_regex="a", response_format=JSON_OBJECT), 400, "guided_regex"),
    (CHAT, chat(response_format=JSON_OBJECT, use_beam_search=True), 400, "response_format"),
    (CHAT, chat(chat_template_kwargs={"messages": "x"}), 400, "chat_template_kwargs"),
    (CHAT, chat(chat_template_kwargs={"chat_template": "x"}), 400, "chat_template_kwargs"),
    (CHAT, chat(chat_template_kwargs={"a": [0] * 70_000}), 400, "chat_template_kwargs"),
    (CHAT, said(role="assistant", audio={"id": "a"}), 400, "messages[1].audio"),
    (CHAT, said(role="assistant", refusal=1), 400, "messages[1].refusal"),
    (CHAT, said(role="assistant", function_call={}), 400, "messages[1].function_call.name"),
    (CHAT, chat(chat_template="hi"), 400, "chat_template"),
    (CHAT, chat(documents=[1]), 400, "documents[0]"),
    (CHAT, chat(documents=[{"text": "a"}] * 1025), 400, "documents"),
    (
        CHAT,
        chat(continue_final_message=True, add_generation_prompt=True),
        400,
        "continue_final_message",
    ),
    (CHAT, chat(return_progress=True, stream=False), 400, "return_progress"),
    (CHAT, chat(on_disconnect="stay"), 400, "on_disconnect"),
    (CHAT, chat(moderation={"model": "m"}), 400, "moderation"),
    (CHAT, chat(prompt_cache_options={"mode": "explicit"}), 400, "prompt_cache_options"),
    (CHAT, chat(thinking_token_budget=5), 400, "thinking_token_budget"),
    (CHAT, chat(allowed_token_ids=[]), 400, "allowed_token_ids"),
    (CHAT, chat(allowed_token_ids=[VOCAB_SIZE]), 400, "allowed_token_ids"),
    (CHAT, chat(allowed_token_ids=[1] * 5000), 400, "allowed_token_ids"),
    (CHAT, chat(bad_words=[""]), 400, "bad_words"),
    (CHAT, chat(bad_words=["a"] * 129), 400, "bad_words"),
    (CHAT, chat(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens"),
    (CHAT, chat(truncate_prompt_tokens=-2), 400, "truncate_prompt_tokens"),
    (CHAT, chat(messages=[USER | {"content": "x" * 4000}]), 400, "messages"),
    (CHAT, chat(messages=[USER] * 10_000), 400, "messages"),
    (CHAT, said(role="assistant", tool_calls=[CALL] * 10_000), 400, "messages"),
    (CHAT, chat(stop_token_ids=[1] * 1025), 400, "stop_token_ids"),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(1025)}), 400, "logit_bias"),
    (CHAT, chat(functions=[[1]] * 100_000), 400, "functions"),
    (CHAT, chat(tools=[[1]] * 10_000), 400, "tools[0]"),
    (CHAT, chat(tools=[[1]] * 100_000), 400, "tools"),
    (
        CHAT,
        chat(
            tools=[TOOL | {"function": {"name": "f", "parameters": {"k" * 300_000: 1}}}],
            tool_choice="none",
        ),
        400,
        "tools",
    ),
    (CHAT, chat(tool_choice=allowed("auto", *("f" * 9_000))), 400, "tool_choice"),
    (CHAT, chat(chat_template_kwargs={"k" * 140_000: 1}), 400, "chat_template_kwargs"),
    (CHAT, chat(documents=[{"k" * 5_000_000: ""}]), 400, "documents"),
    (CHAT, chat(guided_choice=["a"] * 300_000), 400, "guided_choice"),
    (CHAT, chat(guided_json={str(i): 1 for i in range(100_000)}), 400, "guided_json"),
    (CHAT, chat(structured_outputs={"regex": "a" * 1_100_000}), 400, "structured_outputs"),
    (CHAT, chat(stop="a" * 300_000), 400, "stop"),
    (CHAT, chat(bad_words=["a"] * 100_000), 400, "bad_words"),
    (CHAT, chat(allowed_token_ids=[1] * 200_000), 400, "allowed_token_ids"),
    (TEXT, text(prompt=[1] * 100_000), 400, "prompt"),
    (TEXT, text(prompt=[*([1] * 100_000), "a"]), 400, "prompt"),
    (TEXT, text(prompt=[[1] * 100_000]), 400, "prompt"),
    (TEXT, text(prompt=["a"] * 1025), 400, "prompt"),
    (TEXT, text(prompt="x" * 100_000), 400, "prompt"),
    (TEXT, text(prompt="x" * 100_000, add_special_tokens=False), 400, "prompt"),
    (TEXT, text(prompt=["a"] * 1024, n=5), 400, "n"),
    (TEXT, {}, 400, "prompt"),
    (TEXT, text(prompt=None), 400, "prompt"),
    (TEXT, text(prompt=""), 400, "prompt"),
    (TEXT, text(prompt=[]), 400, "prompt"),
    (TEXT, text(prompt=[[]]), 400, "prompt"),
    (TEXT, text(prompt=["a", ""]), 400, "prompt"),
    (TEXT, text(prompt=["a", 1]), 400, "prompt"),
    (TEXT, text(prompt=["a", [1]]), 400, "prompt"),
    (TEXT, text(prompt=[True]), 400, "prompt[0]"),
    (TEXT, text(prompt=[1.5]), 400, "prompt[0]"),
    (TEXT, text(prompt=[-1]), 400, "prompt[0]"),
    (TEXT, text(prompt=[VOCAB_SIZE]), 400, "prompt"),
    (TEXT, text(prompt=[2**31]), 400, "prompt[0]"),
    (TEXT, text(prompt=[10**30]), 400, "prompt[0]"),
    (TEXT, text(prompt=["a"] * 1025), 400, "prompt"),
    (TEXT, text(prompt=[5] * MAX_MODEL_LEN), 400, "prompt"),
    (TEXT, text(prompt=[[5], [5] * MAX_MODEL_LEN]), 400, "prompt"),
    (TEXT, text(model="x/y"), 404, "model"),
    (TEXT, text(logprobs=True), 400, "logprobs"),
    (TEXT, text(logprobs=21), 400, "logprobs"),
    (TEXT, text(prompt_logprobs=21), 400, "prompt_logprobs"),
    (TEXT, text(response_format={"type": "xml"}), 400, "response_format.type"),
    (TEXT, text(structured_outputs={"regex": "("}), 400, "structured_outputs"),
    (TEXT, text(return_progress=True, stream=False), 400, "return_progress"),
    (TEXT, text(best_of=2, n=3), 400, "best_of"),
    (TEXT, text(best_of=129), 400, "best_of"),
    (TEXT, text(prompt=["a"] * 1024, best_of=5), 400, "best_of"),
    (TEXT, text(use_beam_search=1), 400, "use_beam_search"),
    (TEXT, text(use_beam_search=True, temperature=0.5), 400, "temperature"),
    (TEXT, text(use_beam_search=True, n=65), 400, "n"),
    (TEXT, text(length_penalty=0.5), 400, "length_penalty"),
    (TEXT, text(use_beam_search=True, early_stopping="soon"), 400, "early_stopping"),
    (TEXT, text(session_id=""), 400, "session_id"),
    (TEXT, text(session_id="x" * 257), 400, "session_id"),
    (TEXT, text(session_id=7), 400, "session_id"),
    (TEXT, text(session_id="s", prompt=["a", "b"]), 400, "session_id"),
    (TEXT, text(session_id="s", session_ttl=-1), 400, "session_ttl"),
    (TEXT, text(session_id="s", session_ttl=1e9), 400, "session_ttl"),
    (TEXT, text(session_ttl=3600), 400, "session_ttl"),
    (CHAT, chat(session_ttl=0), 400, "session_ttl"),
    (TEXT, text(suffix="end"), 400, "suffix"),
    (TEXT, text(prompt_embeds="AA=="), 400, "prompt_embeds"),
    (TEXT, text(max_tokens=0), 400, "max_tokens"),
]


def check_error(answer: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    CASES,
    ids=[f"{path[4:8]}-{param}-{i}" for i, (path, _, _, param) in enumerate(CASES)],
)
def test_a_bad_field_is_named(
    server: Server, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    with server.client() as client:
        for stream in ({}, {"stream": True}):
            check_error(client.post(path, json=stream | body), status, param)


def test_a_field_that_is_sent_twice_is_measured_as_the_one_that_counts(server: Server) -> None:
    """What is never read costs nothing, and a limit that only the last one kept would be none."""
    long, short = f'"stop": "{"a" * 300_000}"', '"stop": "b"'
    with server.client() as client:
        for fields, status in (((long, short), 200), ((short, long), 400)):
            body = f'{{"prompt": "hi", "max_tokens": 1, {fields[0]}, {fields[1]}}}'
            assert client.post(TEXT, content=body).status_code == status


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"prompt": "a"} x',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00 x"}',
    b"\xff\xfe{}",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "a", "unknown": ' + b'{"a":' * 100_000,
    b'{"prompt": "a", "response_format": ' + b"[" * 900 + b"]" * 900 + b"}",
]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_a_body_that_is_no_request_is_a_400(server: Server, body: bytes) -> None:
    with server.client() as client:
        for path in (TEXT, CHAT):
            answer = client.post(path, content=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"


LONE_SURROGATES = [
    b'"\\ud800"',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a\\uDBFF", "n": 1}',
    b'{"prompt": "\\udc00 x"}',
    b'{"prompt": "\\ud800\\u0041"}',
    b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
]


@pytest.mark.parametrize("body", LONE_SURROGATES, ids=range(len(LONE_SURROGATES)))
def test_half_a_surrogate_pair_is_called_so(server: Server, body: bytes) -> None:
    with server.client() as client:
        for path in (TEXT, CHAT):
            error = check_error(client.post(path, content=body), 400, None)
            assert "a string has a lone surrogate" in error["message"]


def test_a_body_that_is_cut_off_is_called_so(server: Server) -> None:
    with server.client() as client:
        for body in (b'{"prompt": "a', b'{"prompt": "\\u00'):
            error = check_error(client.post(TEXT, content=body), 400, None)
            assert "truncated" in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "begins", "never"),
    [
        (chat(messages=[USER | {"content": "x" * 600}]), "messages", "messages: ", "prompt:"),
        (chat(messages=[USER | {"content": "x" * 9000}]), "messages", "messages: ", "prompt:"),
        (chat(messages=[USER] * 600), "messages", "messages: ", "prompt:"),
        (
            chat(max_completion_tokens=10**6),
            "max_completion_tokens",
            "max_completion_tokens: ",
            " max_tokens",
        ),
        (chat(max_tokens=10**6), "max_tokens", "max_tokens: ", "max_completion_tokens"),
    ],
)
def test_a_message_calls_the_fields_by_the_clients_names(
    server: Server, body: dict[str, Any], param: str, begins: str, never: str
) -> None:
    with server.client() as client:
        error = check_error(client.post(CHAT, json=body), 400, param)
    assert error["message"].startswith(begins)
    assert never not in error["message"]


def test_a_request_too_large_for_the_memory_names_the_clients_limit() -> None:
    with serve(fake_runner(num_blocks=4)) as small, small.client() as client:
        body = chat(max_completion_tokens=200)
        error = check_error(client.post(CHAT, json=body), 400, "max_completion_tokens")
        assert "lower max_completion_tokens" in error["message"]
        assert " max_tokens" not in error["message"]


def test_stream_options_need_a_stream(server: Server) -> None:
    with server.client() as client:
        for path, body in ((CHAT, chat()), (TEXT, text())):
            answer = client.post(path, json=body | {"stream_options": {"include_usage": True}})
            check_error(answer, 400, "stream_options")


def test_a_body_over_the_limit_is_a_413_announced_or_not(server: Server) -> None:
    body = json.dumps(text(prompt="x" * 2000)).encode()
    with serve(max_body_bytes=1024) as small, small.client() as client:
        error = check_error(client.post(TEXT, content=body), 413, None)
        assert "1024 bytes" in error["message"]
        chunks = iter([body[:600], body[600:1200], body[1200:]])
        check_error(client.post(TEXT, content=chunks), 413, None)
        assert client.post(TEXT, json=text(model=MODEL)).status_code == 200


def test_errors_have_the_code_and_class_clients_look_for(server: Server) -> None:
    create = server.openai().chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="nope", messages=[USER])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        create(model=MODEL, messages=[USER], max_tokens=10**5, stream=True)
    assert too_long.value.code == "context_length_exceeded"


def test_unknown_paths_and_methods_have_the_same_shape(server: Server) -> None:
    with server.client() as client:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("POST", "/v1/nothing", 404),
            ("GET", "/../etc/passwd", 404),
            ("GET", "/.hidden", 404),
            ("GET", CHAT, 405),
            ("DELETE", "/health", 405),
        ):
            answer = client.request(method, path)
            check_error(answer, status, None)


def test_a_request_id_in_use_is_refused() -> None:
    gate = threading.Semaphore(3)
    body = chat(request_id="twice", max_tokens=20, ignore_eos=True, stream=True)
    with serve(fake_runner(gate=gate)) as gated, gated.client() as client:
        with client.stream("POST", CHAT, json=body) as first:
            lines = first.iter_lines()
            next(lines)
            check_error(client.post(CHAT, json=chat(request_id="twice")), 400, "request_id")
            gate.release(100)
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_bug_of_ours_is_a_500_without_its_text_and_a_traceback_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> list[int]:
        raise ZeroDivisionError("a secret of the server")

    with serve() as buggy, buggy.client() as client:
        monkeypatch.setattr(buggy.tokenizer, "encode", broken)
        for stream in (False, True):
            answer = client.post(TEXT, json=text(stream=stream))
            error = check_error(answer, 500, None)
            assert (error["type"], error["code"]) == ("server_error", "internal_error")
            assert "secret" not in error["message"]
    logged = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert logged == [ZeroDivisionError, ZeroDivisionError]


def test_leaving_in_the_middle_of_a_body_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
    with serve() as running:
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            connection.sendall(head.encode() + b'{"prompt": ')
        with running.client() as client:
            assert client.post(TEXT, json=text()).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


STRANGE = [
    *(None, True, 0, -1, 2**31, 2**63, -(2**70), 10**400, 0.5, -1e308, "", "\0", "😀" * 9),
    *([], [None], [[]], ["a"], [2**40], [[1, 2], [3]], {}, {"a": 1}, {"1": 1}, {"9" * 5000: 1}),
    *([USER], [{"role": "assistant", "content": ""}], {"include_usage": True}),
]


def test_no_mixture_of_strange_values_is_a_500(server: Server) -> None:
    rng = random.Random(11)
    chat_fields = [*ChatRequest.__struct_fields__, *CHAT_NOT_HONOURED]
    text_fields = [*CompletionRequest.__struct_fields__, *TEXT_NOT_HONOURED]
    statuses = set()
    with server.client() as client:
        for _ in range(150):
            path, body, fields = rng.choice(
                ((CHAT, chat(), chat_fields), (TEXT, text(), text_fields))
            )
            for field in rng.sample(fields, rng.randint(1, 3)):
                fits = rng.random() < 0.5  # or it is null
                body[field] = WORKS[path].get(field) if fits else rng.choice(STRANGE)
            body["max_tokens"] = body["max_tokens"] or 1
            answer = client.post(path, json=body)
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
    assert {200, 400} <= statuses
