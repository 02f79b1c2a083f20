"""Connections over HTTP: one request at a time, HEAD, and HTTP/1.0."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator

import pytest
from server.harness import DEADLINE_S, fake_runner, serve
from server.raw_client import NEXT, RESPONSES, TEXT, UPGRADE, Client, Device, Gate

from streamkv.server import http_protocol, sse


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    gate = Gate()
    with serve(fake_runner(gate=gate.semaphore)) as server:
        yield Device(server, gate)
        gate.let(10_000)
        server.wait_idle()


@pytest.mark.parametrize("transport", ["json", "sse"])
@pytest.mark.parametrize("is_together", [True, False])
@pytest.mark.parametrize("ahead", [NEXT, NEXT * 3, UPGRADE, b"no HTTP\r\n\r\n", b"\0" * 100_000])
def test_what_is_sent_before_the_answer_ends_the_connection_after_it(
    device: Device, transport: str, is_together: bool, ahead: bytes
) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True, "stream": transport == "sse"}
    request = device.client(transport, TEXT, body).request
    device.wait(lambda: device.num_inside == 1)
    client = device.client("bytes", data=request + ahead * is_together)
    device.wait(lambda: device.num_inside == 2)
    if not is_together:
        client.socket.sendall(ahead)
        device.wait_read()
    device.gate.let(1000)
    head, _, answer = client.socket.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK") and b"connection: close" in head
    if transport == "sse":
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert f"content-length: {len(answer)}".encode() in head
    device.wait_idle()


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
def test_a_broken_body_is_a_400_and_not_the_end_of_an_answer(
    device: Device, caplog: pytest.LogCaptureFixture, expect: bytes
) -> None:
    head = POST + expect + b"Transfer-Encoding: chunked\r\n\r\n"
    client = device.client("bytes", data=head + b"no number\r\n")
    head, _, body = client.socket.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    client.leave()
    device.wait_idle()
    assert not caplog.records


def test_a_client_of_http_1_0_is_not_told_to_go_on(device: Device) -> None:
    body = b'{"prompt": [5, 6, 7], "max_tokens": 1}'
    head = POST.replace(b"1.1", b"1.0") + b"Expect: 100-continue\r\n"
    client = device.client("bytes", data=head + b"Content-Length: %d\r\n\r\n" % len(body))
    device.wait_read()
    client.socket.sendall(body)
    device.gate.let(1000)
    assert client.socket.makefile("rb").read().startswith(b"HTTP/1.1 200 OK")
    device.wait_idle()


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\n{} \r\n"
HEADER = b"X-Some: " + b"x" * 1000 + b"\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (POST, HEADER),
        (POST + b"X-Long: ", b"x" * 1000),
        (b"GET /", b"x" * 1000),
        (CHUNKED + b"0\r\n", HEADER),
        (CHUNKED + b"3;x=", b"x" * 1000),
    ],
    ids=["headers", "header", "path", "trailers", "chunk"],
)
def test_a_head_without_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: Device, begin: bytes, more: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.05)
    client = device.client("bytes", data=begin)
    deadline_s = time.monotonic() + DEADLINE_S
    with pytest.raises(OSError):
        while time.monotonic() < deadline_s:
            client.socket.sendall(more)
    device.wait_idle()


@pytest.mark.parametrize(
    ("num", "end", "status"),
    [(40, b"Connection: close\r\n\r\n", b"HTTP/1.1 404"), (66, b"", b"HTTP/1.1 431")],
)
def test_a_long_head_is_read_and_a_longer_one_is_told_so(
    device: Device, num: int, end: bytes, status: bytes
) -> None:
    head = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n" + HEADER * num
    client = device.client("bytes", data=head + end)
    assert client.socket.makefile("rb").read().startswith(status)


@pytest.mark.parametrize(
    ("data", "limit", "answer"),
    [
        (b"", "HEAD_S", b""),
        (b"GET /hea", "HEAD_S", b"HTTP/1.1 408"),
        (POST + HEADER, "HEAD_S", b"HTTP/1.1 408"),
        (b"\r\n", "HEAD_S", b"HTTP/1.1 408"),
        (NEXT + b"\r\n", "", b"HTTP/1.1 200"),
        (POST + b"Content-Length: 9\r\n\r\n{", "STALL_S", b"HTTP/1.1 408"),
        (POST + b"Content-Length: 9\r\n\r\n", "STALL_S", b"HTTP/1.1 408"),
        (CHUNKED, "STALL_S", b"HTTP/1.1 408"),
    ],
    ids=["nothing", "path", "headers", "line", "behind", "body", "no body", "chunks"],
)
def test_a_request_without_end_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, device: Device, data: bytes, limit: str, answer: bytes
) -> None:
    for name in ("HEAD_S", "STALL_S"):
        monkeypatch.setattr(http_protocol, name, 0.01 if name == limit else 1000.0)
    client = device.client("bytes", data=data)
    if not limit:  # the next head is late
        monkeypatch.setattr(http_protocol, "HEAD_S", 0.01)
        assert client.receive_until(b"}").startswith(answer)
        client.socket.sendall(b"GET /heal")
        answer = b"HTTP/1.1 408"
    received = client.socket.makefile("rb").read()
    assert received.startswith(answer) and bool(answer) == bool(received)


@pytest.mark.parametrize(
    "request_", [NEXT, POST + b"Content-Length: 2\r\n\r\n{}"], ids=["no body", "body"]
)
def test_who_has_sent_a_request_has_no_deadline(device: Device, request_: bytes) -> None:
    client = device.client("bytes", data=request_)
    client.receive_until(b"\r\n\r\n")
    port = client.socket.getsockname()[1]
    connections = device.server.serving.server_state.connections
    [found] = [one for one in connections if getattr(one, "client", ("", 0))[1] == port]
    assert isinstance(found, http_protocol.HttpProtocol)
    device.wait(lambda: found.timeout_keep_alive_task is not None)
    assert found._deadline is None


@pytest.mark.parametrize("method", [b"POST /v1/completions", b"POST /v1/nothing"])
@pytest.mark.parametrize("length", [b"5", b"9999999"])
@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
def test_who_is_refused_before_the_body_is_read_is_told_so(
    closed: Device, method: bytes, length: bytes, expect: bytes
) -> None:
    head = method + b" HTTP/1.1\r\nHost: localhost\r\n" + expect
    client = closed.client("bytes", data=head + b"Content-Length: " + length + b"\r\n\r\n")
    received = client.socket.makefile("rb").read()
    assert received.startswith(b"HTTP/1.1 401") and b"\r\nconnection: close" in received
    client.leave()
    closed.wait_idle()


@pytest.fixture(scope="module")
def closed() -> Iterator[Device]:
    """A server that wants a key."""
    with serve(api_key=["secret"]) as server:
        yield Device(server, Gate())


MORE = b"x" * 20_000_000  # more than there is room for on the way


def test_who_sends_a_whole_body_first_reads_why_it_was_refused(closed: Device) -> None:
    client = closed.client("bytes", data=POST + b"Content-Length: %d\r\n\r\n{" % (len(MORE) + 1))
    closed.wait_read()
    client.socket.sendall(MORE)
    assert client.socket.makefile("rb").read().startswith(b"HTTP/1.1 401")
    client.leave()
    closed.wait_idle()


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_was_sent_ahead_takes_nothing_from_the_answer(
    monkeypatch: pytest.MonkeyPatch, device: Device, is_slow: bool
) -> None:
    monkeypatch.setattr(device.server.serving.config, "timeout_keep_alive", 0.05)
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.05 if is_slow else 2.0)
    tokenizer = device.server.tokenizer
    ordinary = set(range(tokenizer.vocab_size)) - set(tokenizer.special_token_ids)
    token_id = max(ordinary, key=lambda one: len(tokenizer.token_bytes(one)))
    body = json.dumps({"tokens": [token_id] * 1_000_000}).encode()
    head = b"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    client = device.client("bytes", data=head + body + NEXT)
    is_read = threading.Event()

    def go_on() -> None:
        with contextlib.suppress(OSError):  # once it has been answered
            client.socket.sendall(MORE)
            while not is_read.wait(0.001):
                client.socket.sendall(MORE[: 1 << 16])

    sender = threading.Thread(target=go_on)
    sender.start()
    received = bytearray()
    while piece := client.socket.recv(1 << 16):
        received += piece
        time.sleep(0.003 * is_slow)
    head, _, answer = received.partition(b"\r\n\r\n")
    is_read.set()
    sender.join()
    assert head.startswith(b"HTTP/1.1 200 OK") and b"connection: close" in head
    assert f"content-length: {len(answer)}".encode() in head and len(answer) > 1_000_000
    client.leave()
    device.wait_idle()


def test_who_does_not_close_is_waited_for_a_while(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.05)
    client = device.client("bytes", data=b"no HTTP\r\n\r\n")
    connections = device.server.serving.server_state.connections
    assert client.socket.makefile("rb").read().startswith(b"HTTP/1.1 400")
    port = client.socket.getsockname()[1]
    device.wait(lambda: all(getattr(one, "client", ("", 0))[1] != port for one in connections))


@pytest.mark.parametrize("path", ["/v1/streams/resp_it", "/v1/responses/resp_it?stream=true"])
def test_a_head_has_no_body_and_takes_the_stream_from_nobody(device: Device, path: str) -> None:
    body = {"input": "hi", "max_output_tokens": 5, "ignore_eos": True, "request_id": "it"}
    reader = device.client("sse", RESPONSES, body | {"stream_options": {"resumable": True}})
    device.wait(lambda: device.num_inside == 1)
    request = f"HEAD {path} HTTP/1.1\r\nHost: {device.server.host}\r\n\r\n".encode()
    looker = device.client("bytes", data=request)
    head = looker.receive_until(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK") and b"text/event-stream" in head
    looker.socket.sendall(NEXT)
    assert (head + looker.receive_until(b"\r\n\r\n")).count(b"HTTP/1.1 200 OK") == 2
    device.gate.let(1000)
    received = reader.receive_until(b"\r\n0\r\n\r\n")
    assert received.count(b"event: response.output_text.delta") >= 1
    assert b"event: response.incomplete" in received
    with device.server.client() as client:
        assert client.head("/v1/streams/nothing").status_code == 404
        client.delete("/v1/responses/resp_it")
    device.wait_idle()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_error_that_only_comments_came_before_is_an_event(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    gate = threading.Event()
    runner = fake_runner(gate=gate)
    with serve(runner) as server:
        body = json.dumps({"prompt": [5, 6, 7], "stream": True}).encode()
        head = f"POST {TEXT} HTTP/{version}\r\nHost: {server.host}\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        client = Client(server, "bytes", data=head.encode() + body)
        received = client.receive_until(b": keep-alive\n\n")
        runner.fail_next = "the device caught a cold"
        gate.set()
        received += client.receive_until(b"}\n\n")
        [event] = [one for one in received.split(b"\n") if b"data: " in one]
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "generation_failed"
        assert b"[DONE]" not in received
        client.leave()
    assert not [one for one in caplog.records if "ASGI" in one.message]


@pytest.mark.parametrize("where", ["together", "apart", "chunked"])
def test_an_offer_of_another_protocol_is_ignored(device: Device, where: str) -> None:
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}).encode()
    head = POST + b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\n"
    head += b"HTTP2-Settings: AAMAAABkAAQ\r\n"
    if where == "chunked":
        data = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        data = head + b"Content-Length: %d\r\n\r\n" % len(body)
    client = device.client("bytes", data=data)
    if where == "apart":
        device.wait_read()
    if where != "chunked":
        client.socket.sendall(body)
    device.gate.let(1000)
    head, _, answer = client.socket.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK"), head
    assert json.loads(answer)["usage"]["completion_tokens"] == 3
    device.wait_idle()


def test_too_long_a_head_is_not_told_inside_an_answer(device: Device) -> None:
    body = b'{"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": true, "stream": true}'
    request = POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    client = device.client("bytes", data=request)
    device.wait(lambda: device.num_inside == 1)
    client.socket.sendall(b"\r\n" * (http_protocol.MAX_HEAD_BYTES // 2 + 1))
    connections = device.server.serving.server_state.connections
    device.wait(lambda: any(getattr(one, "_is_last", False) for one in connections))
    device.gate.let(1000)
    answer = client.socket.makefile("rb").read()
    assert b"431" not in answer and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    device.wait_idle()
