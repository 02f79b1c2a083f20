"""best_of, beams and sessions as clients ask for them, over HTTP and the WebSocket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes import expected_tokens, fake_logprobs
from server.harness import MODEL, VOCAB_SIZE, Server, fake_runner, read_events, serve
from websockets.sync.client import connect

PROMPT = [5, 6, 7]
TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "hi"}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True}


def best(prompt: list[int], num: int, n: int, best_of: int) -> list[list[int]]:
    """What should be given of the candidates."""
    candidates = [
        expected_tokens(prompt, num, VOCAB_SIZE, temperature=1.0, seed=7, choice=i)
        for i in range(best_of)
    ]
    return sorted(candidates, key=lambda ids: -sum(fake_logprobs(i, 0, 1).logprob for i in ids))[:n]


def test_the_best_completions_are_given_and_all_are_counted(server: Server) -> None:
    completion = server.openai().completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=6,
        n=2,
        best_of=5,
        temperature=1.0,
        seed=7,
        logprobs=1,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    expected = best(PROMPT, 6, 2, 5)
    assert [choice.token_ids for choice in completion.choices] == expected
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert all(len(choice.logprobs.token_logprobs) == 6 for choice in completion.choices)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 30


def test_best_of_may_equal_n(server: Server) -> None:
    completion = server.openai().completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, n=2, best_of=2
    )
    assert len(completion.choices) == 2


def test_a_stream_brings_the_best_at_the_end(server: Server) -> None:
    body = {"messages": [USER], "max_tokens": 5, "n": 1, "best_of": 4, "stream": True, **SAMPLED}
    prompt = server.chat_prompt(USER)
    with server.client() as client:
        text = client.post(CHAT, json=body | {"return_token_ids": True}).text
        whole = client.post(CHAT, json={**body, "stream": False}).json()
    chunks = read_events(text)[:-1]
    (expected,) = best(prompt, 5, 1, 4)
    token_ids = [chunk["choices"][0].get("token_ids") for chunk in chunks]
    assert [ids for ids in token_ids if ids] == [expected]
    assert whole["choices"][0]["message"]["content"] == server.text(expected)
    assert whole["usage"]["completion_tokens"] == 20


def test_a_response_may_be_the_best_of_several(server: Server) -> None:
    body = {"input": "hi", "max_output_tokens": 5, "best_of": 3, **SAMPLED}
    (expected,) = best(server.chat_prompt(USER), 5, 1, 3)
    with server.client() as client:
        response = client.post(RESPONSES, json=body).json()
    assert response["output"][0]["content"][0]["text"] == server.text(expected)
    with connect(f"ws://{server.host}{RESPONSES}") as socket:
        socket.send(json.dumps({"type": "response.create", **body}))
        while (event := json.loads(socket.recv(10)))["type"] != "response.incomplete":
            pass
    assert event["response"]["output"][0]["content"][0]["text"] == server.text(expected)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_beams_give_their_hypotheses_best_first(server: Server, path: str) -> None:
    prompt = {"prompt": PROMPT} if path == TEXT else {"messages": [USER]}
    body = {**prompt, "max_tokens": 4, "n": 2, "best_of": 3, "use_beam_search": True}
    with server.client() as client:
        answer = client.post(path, json=body | {"return_token_ids": True}).json()
        again = client.post(path, json=body | {"return_token_ids": True, "stream": True}).text
    first, second = answer["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert first["token_ids"] != second["token_ids"]
    for choice in (first, second):
        assert f'"token_ids":{json.dumps(choice["token_ids"], separators=(",", ":"))}' in again
        assert not choice["logprobs"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_beams_take_what_chooses_no_tokens(server: Server, path: str) -> None:
    body = {
        **({"prompt": PROMPT, "logprobs": 1} if path == TEXT else {"messages": [USER]}),
        **{"max_tokens": 4, "n": 2, "best_of": 4, "use_beam_search": True},
        **{"length_penalty": 0.5, "early_stopping": "never", "temperature": 0, "seed": 7},
        **{"stop_token_ids": [9], "ignore_eos": True, "skip_special_tokens": False},
        **{"include_stop_str_in_output": True, "cache_salt": "s", "session_id": "a"},
    }
    with server.client() as client:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8, "of those that are given"


@pytest.mark.parametrize("stream", [False, True])
def test_beams_give_as_many_answers_as_there_are(stream: bool) -> None:
    body = {"prompt": [4, 5, 3], "max_tokens": 1, "n": 16, "use_beam_search": True}
    with serve(fake_runner(vocab_size=8)) as server, server.client() as client:
        answer = client.post(TEXT, json=body | {"stream": stream, "return_token_ids": True})
        best = client.post(TEXT, json=body | {"n": 1, "best_of": 16}).json()
    if not stream:
        chunks = [answer.json()]
    else:
        *chunks, done = read_events(answer.text)
        assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["index"] for choice in choices] == list(range(8))
    assert sorted(choice["token_ids"] for choice in choices) == [[i] for i in range(8)]
    assert all(choice["finish_reason"] for choice in choices)
    assert len(best["choices"]) == 1


def sessions(server: Server) -> int:
    return server.engine.stats().num_sessions


def test_a_session_is_kept_by_field_or_header_for_its_salt_alone() -> None:
    body = {"prompt": list(range(5, 40)), "max_tokens": 20, "ignore_eos": True}
    with serve() as server, server.client() as client:
        for more in ({}, {"session_id": "a"}, {"session_id": "a"}, {"session_id": "b"}):
            assert client.post(TEXT, json=body | more).status_code == 200
        server.wait_idle()
        assert sessions(server) == 2
        timed = body | {"session_ttl": 60}
        answer = client.post(TEXT, json=timed, headers={"X-Session-Id": "c"})
        assert answer.status_code == 200, "the header names a session too"
        refused = client.post(TEXT, json=timed)
        assert refused.status_code == 400
        assert "expected a session_id (or the header X-Session-Id)" in refused.text
        for wrong in (-1, 604_801):
            refused = client.post(TEXT, json=body | {"session_id": "a", "session_ttl": wrong})
            expected = f"session_ttl: expected seconds, 0 to 604800, got {wrong}.0"
            assert refused.json()["error"]["message"] == expected
        salted = body | {"session_id": "a", "cache_salt": "of another"}
        assert client.post(TEXT, json=salted).status_code == 200
        server.wait_idle()
        assert sessions(server) == 4
        assert server.engine.stats().num_pinned_blocks > 0
        # Sessions that nobody wants any more: their time is soon over.
        for session_id, ttl in (("a", 1e-6), ("b", 0)):
            again = body | {"session_id": session_id, "session_ttl": ttl}
            assert client.post(TEXT, json=again).status_code == 200
        server.wait_idle()
        assert sessions(server) == 2, "while nobody asks for anything"
        refused = client.post(TEXT, json=body, headers={"X-Session-Id": "x" * 257})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_id")


def test_the_socket_takes_sessions_too() -> None:
    event = {"type": "response.create", "input": "hi " * 20, "max_output_tokens": 2}
    event |= {"ignore_eos": True}
    with serve() as server:
        with connect(f"ws://{server.host}{RESPONSES}") as socket:
            socket.send(json.dumps(event | {"session_ttl": 60}))
            refused = json.loads(socket.recv(10))
            assert (refused["status"], refused["error"]["param"]) == (400, "session_ttl")
        headers = {"X-Session-Id": "of the connection"}
        with connect(f"ws://{server.host}{RESPONSES}", additional_headers=headers) as socket:
            for more in ({"session_ttl": 60}, {"session_id": "another"}):
                socket.send(json.dumps(event | more))
                while json.loads(socket.recv(10))["type"] != "response.incomplete":
                    pass
        server.wait_idle()
        assert sessions(server) == 2


def test_without_prefix_caching_no_session_is_promised() -> None:
    with serve(engine={"enable_prefix_caching": False}) as server, server.client() as client:
        answer = client.post(TEXT, json={"prompt": PROMPT, "session_id": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")
