"""Streams that were cut go on where they were: over SSE, by GET and by the same POST again."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fakes import expected_tokens
from server.harness import DEADLINE_S, VOCAB_SIZE, ScriptedRunner, Server, fake_runner, serve
from server.raw_client import Client
from tiny import tiny_tokenizer
from websockets.sync.client import connect

from streamkv.config import ServerConfig
from streamkv.engine.async_engine import AsyncEngine
from streamkv.server.app import create_app

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAID = 'naïve 🙂👩‍👩‍👧‍👦 日本語の文字, e\N{COMBINING ACUTE ACCENT} "quoted"\n\u2028 end'
RESUMABLE = {"stream": True, "temperature": 0, "stream_options": {"resumable": True}}
ASKS = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": ["hi", "ho"], "max_tokens": 300, "n": 2},
    RESPONSES: {"input": "hi"},
}
PREFIXES = {CHAT: "chatcmpl-", TEXT: "cmpl-", RESPONSES: "resp_"}


@pytest.fixture(scope="module")
def speaker() -> Iterator[Server]:
    """A server whose model says SAID to everybody."""
    script = [*tiny_tokenizer().encode(SAID), 2]
    with serve(ScriptedRunner(script)) as running:
        yield running
        running.wait_idle()


def events_of(body: str) -> list[str]:
    """The events of a stream as they stand there, without comments."""
    return [one + "\n\n" for one in body.split("\n\n") if one and not one.startswith(":")]


@contextmanager
def cut(client: httpx.Client, path: str, body: dict[str, Any], num_events: int) -> Iterator[str]:
    """A stream that is left after so many events: what came until then."""
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        got = ""
        for text in response.iter_text():
            got += text
            if len(events_of(got)) >= num_events:
                break
        yield "".join(events_of(got)[:num_events])


# --- from the log ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ASKS)
def test_from_every_event_on_the_rest_is_the_same_bytes(speaker: Server, path: str) -> None:
    name = f"again{path.replace('/', '-')}"
    body = {**ASKS[path], **RESUMABLE, "request_id": name}
    with speaker.client() as client:
        whole = events_of(client.post(path, json=body).text)
        assert [event.split("\n")[0] for event in whole] == [f"id: {i}" for i in range(len(whole))]
        assert len(whole) > 10
        for number in range(-1, len(whole) - 1):
            rest = "".join(whole[number + 1 :])
            header = {"last-event-id": str(number)} if number >= 0 else {}
            for answer_id in (name, PREFIXES[path] + name):
                url = f"/v1/streams/{answer_id}"
                assert client.get(url, headers=header).text == rest
            assert client.get(f"/v1/streams/{name}", params={"after": number}).text == rest or (
                number < 0
            )
            if number >= 0:
                assert client.post(path, json=body, headers=header).text == rest
        ended = client.get(f"/v1/streams/{name}", params={"after": len(whole) - 1})
        assert (ended.status_code, ended.content) == (204, b"")


def test_who_connects_again_to_the_same_address_goes_on_after_the_event_that_it_got_last(
    speaker: Server,
) -> None:
    for path, where in ((CHAT, "/v1/streams/{}?after=1"), (RESPONSES, "{}?starting_after=1")):
        body = {**ASKS[path], **RESUMABLE, "request_id": "reconnects"}
        with speaker.client() as client:
            whole = events_of(client.post(path, json=body).text)
            name = PREFIXES[path] + "reconnects"
            url = where.format(name if path == CHAT else f"{RESPONSES}/{name}")
            url += "" if path == CHAT else "&stream=true"
            assert client.get(url).text == "".join(whole[2:])
            again = client.get(url, headers={"last-event-id": "5"})  # as an EventSource does
            assert again.text == "".join(whole[6:])


def test_looking_whether_a_stream_is_there_is_no_reading(speaker: Server) -> None:
    answers = speaker.serving.app.state.answers
    body = {**ASKS[CHAT], **RESUMABLE, "request_id": "seen"}
    with speaker.client() as client:
        client.post(CHAT, json=body)
        num_resumed = answers.num_resumed
        assert client.head("/v1/streams/seen").status_code == 200
        assert answers.num_resumed == num_resumed
        assert client.get("/v1/streams/seen").status_code == 200
        assert answers.num_resumed == num_resumed + 1


def test_a_request_id_of_several_requests_that_run_is_told_from_their_ids() -> None:
    gate = threading.Semaphore(0)
    names = ["chatcmpl-same", "cmpl-same"]
    with serve(fake_runner(gate=gate)) as server, server.client() as client:
        answers = server.serving.app.state.answers
        bodies = [{**ASKS[path], **RESUMABLE, "request_id": "same"} for path in (CHAT, TEXT)]
        asked = [
            Client(server, "sse", path, body)
            for path, body in zip((CHAT, TEXT), bodies, strict=True)
        ]
        server.wait_until(lambda: answers.num_running == 2)
        for method, where in (("GET", "streams"), ("GET", "requests"), ("DELETE", "requests")):
            error = client.request(method, f"/v1/{where}/same").json()["error"]
            assert error["param"] == "request_id"
            assert error["message"].endswith(f"by its id: {', '.join(names)}")
        for name in names:
            assert client.delete(f"/v1/requests/{name}").json()["id"] == name
        gate.release(1000)
        server.wait_until(lambda: answers.num_running == 0)
        for name in names:
            assert client.get(f"/v1/requests/{name}").json()["id"] == name
        assert client.get("/v1/requests/same").json()["id"] == names[-1], "which ended last"
        for one in asked:
            one.leave()


def test_a_request_goes_on_with_its_own_endpoints_answer_whatever_others_are_called(
    speaker: Server,
) -> None:
    with speaker.client() as client:
        for path, prefix in PREFIXES.items():
            other = TEXT if path == CHAT else CHAT
            body = {**ASKS[other], **RESUMABLE, "request_id": f"{prefix}like"}
            assert client.post(other, json=body).status_code == 200
            again = {**ASKS[path], **RESUMABLE, "request_id": "like"}
            answer = client.post(path, json=again, headers={"last-event-id": "0"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                404,
                "request_not_found",
            )


@pytest.mark.parametrize("path", ASKS)
def test_only_a_stream_goes_on_after_an_event(speaker: Server, path: str) -> None:
    with speaker.client() as client:
        body = ASKS[path] | {"request_id": "no-stream"}
        answer = client.post(path, json=body, headers={"last-event-id": "0"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_of_many_candidates_none_is_shown_before_the_best_are_known() -> None:
    gate = threading.Semaphore(8)
    body = {"prompt": [5, 6, 7], "max_tokens": 20, "best_of": 3, "n": 2, "request_id": "best"}
    with serve(fake_runner(gate=gate)) as server, server.client() as client:
        asked = Client(server, "json", TEXT, body)
        server.wait_until(lambda: server.engine.stats().generation_tokens_total >= 6)
        result = client.get("/v1/requests/best").json()
        assert result["usage"]["completion_tokens"] >= 6
        assert result["choices"] == [
            {"index": index, "text": "", "finish_reason": None} for index in range(2)
        ]
        gate.release(1000)
        server.wait_idle()
        asked.leave()


def test_texts_of_a_resumed_stream_are_whole_characters(speaker: Server) -> None:
    body = {**ASKS[CHAT], **RESUMABLE, "request_id": "characters"}
    with speaker.client() as client:
        whole = events_of(client.post(CHAT, json=body).text)
        for number in range(len(whole) - 1):
            rest = client.get("/v1/streams/characters", params={"after": number}).text
            said = ""
            for event in [*whole[: number + 1], *events_of(rest)]:
                data = event.split("data: ")[1]
                if data.startswith("{"):
                    said += json.loads(data)["choices"][0]["delta"].get("content") or ""
            assert said == SAID


def test_plain_events_have_no_id_and_plain_streams_can_not_be_resumed() -> None:
    gate = threading.Semaphore(4)
    body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with serve(fake_runner(gate=gate)) as server, server.client() as client, server.client() as two:
        with client.stream("POST", TEXT, json=body | {"request_id": "plain"}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {"), "as programs expect that know no ids"
            answer = two.get("/v1/streams/plain")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_resumable"
            gate.release(1000)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        answer = two.get("/v1/streams/plain")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_resumable")


def test_what_is_unknown_or_makes_no_sense_is_said(speaker: Server) -> None:
    body = {**ASKS[CHAT], **RESUMABLE, "request_id": "known"}
    with speaker.client() as client:
        num = len(events_of(client.post(CHAT, json=body).text))
        missing = client.get("/v1/streams/unknown")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")
        header = {"last-event-id": "3"}
        again = client.post(CHAT, json=body | {"request_id": "unknown"}, headers=header)
        error = again.json()["error"]  # to begin anew isn't what was asked for
        assert (again.status_code, error["code"]) == (404, "request_not_found")
        for after in ("x", "-1", "1.5", "٣", "9" * 30):
            answer = client.get("/v1/streams/known", params={"after": after})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")
        answer = client.get("/v1/streams/known", params={"after": num})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")
        answer = client.get("/v1/streams/known", headers={"last-event-id": "?"})
        assert answer.json()["error"]["param"] == "Last-Event-ID"
        assert client.head("/v1/streams/known").status_code == 200


def test_events_that_were_dropped_are_gone() -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "request_id": "long"}
    with serve(resume_memory_bytes=1 << 16) as server, server.client() as client:
        whole = events_of(client.post(TEXT, json=body | RESUMABLE).text)
        dropped = client.get("/v1/streams/long", params={"after": 3})
        assert (dropped.status_code, dropped.json()["error"]["code"]) == (410, "events_dropped")
        kept = client.get("/v1/streams/long", params={"after": len(whole) - 5})
        assert kept.text == "".join(whole[-4:])


def test_an_answer_is_kept_for_the_window_only() -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, **RESUMABLE, "request_id": "short"}
    with serve(resume_window=0.05) as server, server.client() as client:
        assert client.post(TEXT, json=body).status_code == 200
        answers = server.serving.app.state.answers
        server.wait_until(lambda: not answers.num_kept)
        assert client.get("/v1/streams/short").status_code == 404
        assert answers.budget.num_bytes == 0


def test_without_a_window_nothing_is_resumable_and_who_asks_for_it_is_told() -> None:
    with serve(resume_window=0) as server, server.client() as client:
        for more, param in (
            ({"stream_options": {"resumable": True}}, "stream_options.resumable"),
            ({"on_disconnect": "continue"}, "on_disconnect"),
        ):
            body = {"prompt": [5, 6], "max_tokens": 2, "stream": True, **more}
            answer = client.post(TEXT, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert client.post(TEXT, json={"prompt": [5, 6], "stream": True}).status_code == 200


def test_a_long_log_is_replayed_as_its_reader_takes_it() -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "n": 16, **RESUMABLE}
    with serve() as server, server.client() as client:
        whole = client.post(TEXT, json=body | {"request_id": "long"}).content
        assert len(whole) > 500_000
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(DEADLINE_S)
            slow.connect(("127.0.0.1", server.port))
            head = f"GET /v1/streams/long HTTP/1.0\r\nHost: {server.host}\r\n\r\n"
            slow.sendall(head.encode())

            def waiting() -> int:
                connections = server.serving.server_state.connections
                return max(one.transport.get_write_buffer_size() for one in connections)

            server.wait_until(lambda: waiting() > 0)
            assert client.get("/health").status_code == 200
            assert waiting() < 200_000
            received = b""
            while data := slow.recv(1 << 20):
                received += data
        assert received.partition(b"\r\n\r\n")[2] == whole


# --- while it runs ---------------------------------------------------------------------------


@pytest.mark.parametrize("on_disconnect", [None, "continue", "pause"])
def test_a_stream_that_was_cut_goes_on_while_it_runs(on_disconnect: str | None) -> None:
    prompt, gate = [5, 6, 7], threading.Semaphore(6)
    body = {
        **{"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "return_token_ids": True},
        **RESUMABLE,
        **{"request_id": "cut", "on_disconnect": on_disconnect},
    }
    with serve(fake_runner(gate=gate)) as server, server.client() as client:
        with cut(client, TEXT, body, 3) as begin:
            pass
        gate.release(2000)
        other = {"prompt": [9, 9], "max_tokens": 30, "ignore_eos": True}
        assert client.post(TEXT, json=other).status_code == 200, "others go on meanwhile"
        rest = client.get("/v1/streams/cut", headers={"last-event-id": "2"}).text
        ids = sum((token_ids(event) for event in [*events_of(begin), *events_of(rest)]), [])
        assert ids == expected_tokens(prompt, 300, VOCAB_SIZE)
        assert rest.endswith("data: [DONE]\n\n")
        server.wait_idle()


def token_ids(event: str) -> list[int]:
    data = event.split("data: ")[1]
    if data.startswith("[DONE]"):
        return []
    return [one for choice in json.loads(data)["choices"] for one in choice["token_ids"]]


def test_a_second_reader_takes_over_and_the_first_stream_ends_with_an_error() -> None:
    gate = threading.Semaphore(6)
    body = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, **RESUMABLE}
    with serve(fake_runner(gate=gate)) as server, server.client() as client, server.client() as two:
        with client.stream("POST", TEXT, json=body | {"request_id": "both"}) as first:
            lines = first.iter_lines()
            next(lines)
            with two.stream("GET", "/v1/streams/both") as second:
                other = second.iter_lines()
                assert next(other) == "id: 0"
                rest = [line for line in lines if line.startswith("data: ")]
                gate.release(1000)
                assert [line for line in other if line][-1] == "data: [DONE]"
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "taken_over"
        assert "data: [DONE]" not in rest
        server.wait_idle()


def test_a_stream_that_failed_tells_so_again() -> None:
    runner = fake_runner(gate=threading.Semaphore(4))
    body = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, **RESUMABLE}
    with serve(runner) as server, server.client() as client:
        with client.stream("POST", TEXT, json=body | {"request_id": "late"}) as response:
            lines = response.iter_lines()
            next(lines)
            runner.fail_next = "the device caught a cold"
            runner.gate.release(500)
            last = [line for line in lines if line][-1]
        again = client.get("/v1/streams/late", params={"after": 0})
        assert events_of(again.text)[-1].split("\n")[1] == last
        runner.fail_next = "at once"
        answer = client.post(TEXT, json=body | {"request_id": "early"})
        assert answer.status_code == 500
        again = client.get("/v1/streams/early")
        assert (again.status_code, again.json()) == (500, answer.json())


# --- whose it is -----------------------------------------------------------------------------


def test_only_the_key_that_asked_may_read_or_cancel() -> None:
    gate = threading.Semaphore(6)
    body = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, **RESUMABLE}
    with serve(fake_runner(gate=gate), api_key=("one", "two")) as server:
        mine, others = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        with server.client(headers=mine) as client, server.client(headers=others) as other:
            with cut(client, TEXT, body | {"request_id": "mine"}, 2):
                for request_id in ("mine", "nobody's"):
                    refusals = [
                        other.get(f"/v1/streams/{request_id}"),
                        other.get(f"/v1/requests/{request_id}"),
                        other.delete(f"/v1/requests/{request_id}"),
                    ]
                    assert [one.status_code for one in refusals] == [404, 404, 404]
                    assert {one.json()["error"]["code"] for one in refusals} == {
                        "request_not_found"
                    }
            theirs = {"prompt": [5, 6], "max_tokens": 2, "request_id": "mine", **RESUMABLE}
            gate.release(20)
            with cut(other, TEXT, theirs, 1):
                pass  # nobody is told what others call theirs, also while it runs
            gate.release(1000)
            assert other.get("/v1/requests/mine").json()["id"] == "cmpl-mine"
            assert other.delete("/v1/requests/mine").status_code == 200
            assert other.post(TEXT, json=theirs | {"request_id": "theirs"}).status_code == 200
            assert client.get("/v1/streams/mine").text.endswith("data: [DONE]\n\n")
            assert client.delete("/v1/requests/mine").json()["status"] == "finished"
            assert other.delete("/v1/requests/theirs").json()["status"] == "finished"


# --- connections -----------------------------------------------------------------------------


def test_a_connection_serves_one_stream_after_the_other(speaker: Server) -> None:
    body = json.dumps(ASKS[CHAT] | RESUMABLE)
    request = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {speaker.host}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()
    with socket.create_connection(("127.0.0.1", speaker.port), timeout=DEADLINE_S) as client:
        received = b""
        for num in range(1, 4):
            client.sendall(request)
            while received.count(b"\r\n0\r\n\r\n") < num:
                received += client.recv(1 << 16)
    assert received.count(b"HTTP/1.1 200 OK") == received.count(b"data: [DONE]") == 3


def test_over_http_1_0_the_stream_ends_with_its_connection(speaker: Server) -> None:
    body = json.dumps(ASKS[CHAT] | RESUMABLE | {"request_id": "old"})
    head = f"POST {CHAT} HTTP/1.0\r\nHost: {speaker.host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", speaker.port), timeout=DEADLINE_S) as client:
        client.sendall((head + body).encode())
        answer_head, _, received = client.makefile("rb").read().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in answer_head.lower()
    assert b"connection: close" in answer_head.lower()
    with speaker.client() as new:
        assert new.get("/v1/streams/old").content == received


@contextmanager
def foreign_server(gate: threading.Semaphore) -> Iterator[str]:
    """The application under a server that offers no direct writes; its URL."""
    engine = AsyncEngine("fake", runner=fake_runner(gate=gate), tokenizer=tiny_tokenizer())
    app = create_app(engine, ServerConfig())
    config = uvicorn.Config(app, http="h11", ws="websockets-sansio", log_config=None)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        gate.release(10_000)
        server.should_exit = True
        thread.join(DEADLINE_S)
        listener.close()
        assert not thread.is_alive()


def test_under_another_asgi_server_lanes_of_a_websocket_are_the_same() -> None:
    gate = threading.Semaphore(0)
    body = {"input": "fox", "max_output_tokens": 50, "ignore_eos": True, "temperature": 0}
    with foreign_server(gate) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        while client.get("/health").status_code != 200:
            pass
        gate.release(10_000)
        whole = client.post(RESPONSES, json=body).json()["output"][0]["content"][0]["text"]
        with connect(url.replace("http", "ws") + RESPONSES, proxy=None) as websocket:
            for lane in ("a", "b"):
                message = {"type": "response.create", "stream_id": lane, **body}
                websocket.send(json.dumps(message))
            texts, numbers = {"a": "", "b": ""}, {"a": [], "b": []}
            num_ended = 0
            while num_ended < 2:
                event = json.loads(websocket.recv(DEADLINE_S))
                numbers[event["stream_id"]].append(event["sequence_number"])
                texts[event["stream_id"]] += event["delta"] if "delta" in event else ""
                num_ended += event["type"] == "response.incomplete"
        assert texts == {"a": whole, "b": whole}
        assert all(one == list(range(len(one))) for one in numbers.values())


def test_under_another_asgi_server_streams_are_the_same() -> None:
    gate = threading.Semaphore(8)
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, **RESUMABLE}
    with foreign_server(gate) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        while client.get("/health").status_code != 200:
            pass
        with cut(client, TEXT, body | {"request_id": "cut"}, 3) as begin:
            pass
        gate.release(1000)
        rest = client.get("/v1/streams/cut", headers={"last-event-id": "2"}).text
        numbers = [int(one.split()[1]) for one in events_of(begin + rest)]
        assert numbers == list(range(len(numbers)))
        texts = [
            json.loads(one.split("data: ")[1])["choices"][0]["text"]
            for one in events_of(begin + rest)[:-1]
        ]
        whole = client.post(TEXT, json=body | {"stream": False, "stream_options": None}).json()
        assert "".join(texts) == whole["choices"][0]["text"]
