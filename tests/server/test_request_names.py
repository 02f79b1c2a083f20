"""What a request is called: by `request_id`, by the header X-Request-Id, in the answer's header."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from server.harness import Server, fake_runner, read_events, serve

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 2},
    TEXT: {"prompt": "hi", "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
}
PREFIXES = {CHAT: "chatcmpl-", TEXT: "cmpl-", RESPONSES: "resp_"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_the_header_names_the_answer_which_has_its_id_as_header(
    server: Server, path: str, stream: bool
) -> None:
    name, body = f"of-{stream}", BODIES[path] | {"stream": stream}
    with server.client(headers={"X-Request-Id": name}) as client:
        by_header = client.post(path, json=body)
        by_body = client.post(path, json=body | {"request_id": "own"})
    assert by_header.headers["x-request-id"] == f"{PREFIXES[path]}{name}"
    assert by_body.headers["x-request-id"] == f"{PREFIXES[path]}own"
    if not stream:
        assert by_header.json()["id"] == f"{PREFIXES[path]}{name}"


def test_the_official_client_knows_the_id_of_its_request(server: Server) -> None:
    completion = server.openai().chat.completions.create(
        model="", messages=[{"role": "user", "content": "hi"}], max_tokens=1
    )
    assert completion._request_id == completion.id


def test_a_background_response_has_its_id_as_header(server: Server) -> None:
    with server.client() as client:
        answer = client.post(RESPONSES, json=BODIES[RESPONSES] | {"background": True})
    assert answer.headers["x-request-id"] == answer.json()["id"]


@pytest.mark.parametrize("name", ["a/b", "a b", "..", "x" * 129, "a%2Fb"])
def test_a_header_that_can_be_no_id_is_passed_over(server: Server, name: str) -> None:
    with server.client(headers={"X-Request-Id": name}) as client:
        answer = client.post(TEXT, json=BODIES[TEXT])
    assert answer.status_code == 200 and name not in answer.json()["id"]


def test_a_header_in_use_is_passed_over_and_a_request_id_in_use_refused_by_its_name() -> None:
    gate = threading.Semaphore(3)
    body = {"prompt": "hi", "max_tokens": 20, "ignore_eos": True, "stream": True}
    named = {"X-Request-Id": "twice"}
    with serve(fake_runner(gate=gate)) as gated, gated.client() as client:
        with client.stream("POST", TEXT, json=body, headers=named) as first:
            lines = first.iter_lines()  # the stream ends with its iterator
            next(lines)
            assert first.headers["x-request-id"] == "cmpl-twice"
            error = client.post(TEXT, json=body | {"request_id": "twice"}).json()["error"]
            assert error["message"].endswith("got 'twice'")
            gate.release(100)
            second = client.post(TEXT, json=body | {"stream": False}, headers=named)
    assert second.status_code == 200 and second.json()["id"] != "cmpl-twice"


@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_goes_on_says_with_what(server: Server, path: str) -> None:
    with server.client() as client:
        body = BODIES[path] | {"stream": True}
        answer = client.post(path, json=body, headers={"Last-Event-ID": "3"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "request_id"
    assert "Last-Event-ID" in error["message"]


def test_a_request_goes_on_by_the_header_too(server: Server) -> None:
    body = BODIES[TEXT] | {"stream": True, "stream_options": {"resumable": True}}
    with server.client(headers={"X-Request-Id": "again"}) as client:
        whole = client.post(TEXT, json=body).text
        rest = client.post(TEXT, json=body, headers={"Last-Event-ID": "0"}).text
    assert rest and whole.endswith(rest) and len(rest) < len(whole)


def test_what_was_cached_of_a_prompt_is_the_same_in_each_chunk_of_progress() -> None:
    prompt = [5 + i % 300 for i in range(100)]
    with serve(engine={"max_num_batched_tokens": 16}) as server, server.client() as client:
        body = {"prompt": prompt[:52], "max_tokens": 1, "stream": True, "return_progress": True}
        client.post(TEXT, json=body)
        server.wait_idle()
        events = read_events(client.post(TEXT, json=body | {"prompt": prompt}).text)
    told = [event["prompt_progress"] for event in events[:-1] if "prompt_progress" in event]
    assert len(told) > 1
    assert {progress["cache"] for progress in told} == {52}


def test_a_paused_request_is_said_to_be_paused() -> None:
    gate = threading.Semaphore(3)
    body = {"prompt": "hi", "max_tokens": 20, "ignore_eos": True, "stream": True}
    body |= {"on_disconnect": "pause", "request_id": "it"}
    with serve(fake_runner(gate=gate)) as gated, gated.client() as client:
        with client.stream("POST", TEXT, json=body) as first:
            lines = first.iter_lines()
            next(lines)
            assert client.get("/v1/requests/it").json()["status"] == "running"
        answers = gated.serving.app.state.answers
        gated.wait_until(lambda: all(one.is_paused for one in answers._running.values()))
        assert client.get("/v1/requests/it").json()["status"] == "paused"
        assert client.delete("/v1/requests/it").json()["status"] == "cancelled"
        gate.release(100)  # for the step that was under way


@pytest.mark.parametrize(
    ("fields", "needed"),
    [({}, "stream: true"), ({"stream": True}, "stream_options.resumable: true")],
)
def test_pause_says_what_it_needs(server: Server, fields: dict[str, Any], needed: str) -> None:
    body = BODIES[TEXT] | {"on_disconnect": "pause"} | fields
    if "stream" in fields:
        body |= {"stream_options": {"resumable": False}}
    with server.client() as client:
        error = client.post(TEXT, json=body).json()["error"]
    assert error["param"] == "on_disconnect" and f"only for {needed}" in error["message"]
