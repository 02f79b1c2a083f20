"""Every way in which a client can leave, at every moment, from every endpoint that answers slowly.

The device takes as many steps as a test says, so that no answer ends by itself. Each time the
requests are aborted, the connection and its task are gone, and nothing is logged.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from server.harness import fake_runner, serve
from server.raw_client import CHAT, NEXT, RESPONSES, TEXT, UPGRADE, Client, Device, Gate

from streamkv.server import ws_protocol
from streamkv.server.ws_protocol import WebSocketProtocol

SMALL_BUFFER = 4096
LONG = {"ignore_eos": True, "temperature": 0, "on_disconnect": "abort", "request_id": "it"}
MANY = LONG | {"max_tokens": 400, "n": 8}
# Each with log-probabilities, which soon fill all buffers; how many sequences it becomes.
ASKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "completion": (TEXT, MANY | {"prompt": [5, 6, 7], "logprobs": 5}, 8),
    "chat": (
        CHAT,
        MANY
        | {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20},
        8,
    ),
    "response": (
        RESPONSES,
        LONG
        | {
            "input": "hi",
            "max_output_tokens": 400,
            "top_logprobs": 20,
            "include": ["message.output_text.logprobs"],
        },
        1,
    ),
}


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    gate = Gate()
    with serve(fake_runner(gate=gate.semaphore), engine={"max_num_seqs": 8}) as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        yield Device(server, gate)
        gate.let(10_000)
        server.wait_idle()


def connections(device: Device) -> Any:
    return device.server.serving.server_state.connections


def is_gone(device: Device) -> bool:
    return not connections(device) and not device.server.serving.server_state.tasks


def waits_for_its_reader(device: Device) -> bool:
    return any(one.transport.get_write_buffer_size() > 1 << 16 for one in connections(device))


# --- ways ------------------------------------------------------------------------------------


def half_close(client: Client, device: Device) -> None:
    client.socket.shutdown(socket.SHUT_WR)


def after(data: bytes, leave: Callable[[Client], None]) -> Callable[[Client, Device], None]:
    """Leave behind these bytes."""

    def leave_after(client: Client, device: Device) -> None:
        client.socket.sendall(data)
        device.wait_read()
        leave(client)

    return leave_after


def no_pong(client: Client, device: Device) -> None:
    [socket] = [one for one in connections(device) if isinstance(one, WebSocketProtocol)]
    device.server.engine_call(socket.keepalive_timeout)


def no_pong_unread(client: Client, device: Device) -> None:
    """The server doesn't read either: it waits for its answers to be taken."""
    for _ in range(3):
        client.send_text(b"{}")
    device.wait_read()
    no_pong(client, device)


WAYS: dict[str, Callable[[Client, Device], None]] = {
    "close": lambda client, device: client.leave(),
    "reset": lambda client, device: client.reset(),
    "half close": half_close,
}
HTTP_WAYS = WAYS | {
    "request, close": after(NEXT, Client.leave),
    "request, reset": after(NEXT, Client.reset),
    "requests, close": after(NEXT * 300, Client.leave),
    "request with a long body, reset": after(
        b"POST /tokenize HTTP/1.1\r\nContent-Length: 10000000\r\n\r\n" + b"x" * 200_000,
        Client.reset,
    ),
    "upgrade, reset": after(UPGRADE, Client.reset),
    "no HTTP, close": after(b"\0\r\n\r\n", Client.leave),
}
SOCKET_WAYS = WAYS | {
    "close frame": lambda client, device: client.send_frame(0x88, b"\x03\xe8"),
    "too large": lambda client, device: client.socket.sendall(b"\x81\xff" + b"\x00\x0f" * 6),
    "no UTF-8": lambda client, device: client.send_frame(0x81, b"\xff"),
    "no frame": lambda client, device: client.socket.sendall(b"\xff" * 20),
    "no pong": no_pong,
    "no pong, unread": no_pong_unread,
}
MOMENTS = ["before the head", "midway", "full"]


def cases() -> list[Any]:
    found = []
    for name in ASKS:
        ways = HTTP_WAYS if name == "completion" else [*WAYS, "request, reset"]
        found += [(name, "json", "before the head", way) for way in ways]
        found += [(name, "sse", moment, way) for moment in MOMENTS for way in ways]
    found += [("response", "websocket", moment, way) for moment in MOMENTS for way in SOCKET_WAYS]
    return [pytest.param(*case, id=", ".join(case)) for case in found]


# --- leaving an answer -----------------------------------------------------------------------


def bring_to(device: Device, moment: str) -> None:
    """Let all that runs come so far."""
    if moment == "midway":
        let_tokens(device, 2)
    while moment == "full" and not waits_for_its_reader(device):
        let_tokens(device, 1)


def let_tokens(device: Device, num: int) -> None:
    for _ in range(num):
        num_before = device.stats.generation_tokens_total
        device.gate.let(2)
        device.wait(lambda: device.stats.generation_tokens_total > num_before)  # noqa: B023


@pytest.mark.parametrize(("name", "transport", "moment", "way"), cases())
def test_who_leaves_is_noticed(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    transport: str,
    moment: str,
    way: str,
) -> None:
    monkeypatch.setattr(ws_protocol, "STUCK_S", 0.001)
    path, body, num = ASKS[name]
    num_before = device.num_aborted
    client = device.client(transport, path, body, receive_buffer=SMALL_BUFFER)
    device.wait(lambda: device.num_inside == num)
    bring_to(device, moment)
    (HTTP_WAYS | SOCKET_WAYS)[way](client, device)
    device.wait(lambda: device.num_aborted == num_before + num)
    device.wait(lambda: is_gone(device))
    device.gate.let(10)
    device.wait_idle()
    assert caplog.records == []


@pytest.mark.parametrize("path", ["/v1/streams/resp_it", "/v1/responses/resp_it?stream=true"])
@pytest.mark.parametrize("moment", MOMENTS[1:])
@pytest.mark.parametrize("way", [*WAYS, "request, close"])
def test_who_leaves_an_answer_that_goes_on_is_noticed(
    device: Device, caplog: pytest.LogCaptureFixture, path: str, moment: str, way: str
) -> None:
    num_before = device.num_aborted
    body = ASKS["response"][1] | {"background": True, "on_disconnect": "continue"}
    device.client("json", RESPONSES, body).receive_until(b"queued")
    client = device.client("sse", path, receive_buffer=SMALL_BUFFER)
    assert client.receive_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
    bring_to(device, moment)
    HTTP_WAYS[way](client, device)
    device.wait(lambda: len(connections(device)) == 1)  # that of who asked
    assert device.num_inside == 1
    with device.server.client() as other:
        assert other.delete("/v1/responses/resp_it").status_code == 200
    device.wait(lambda: device.num_aborted == num_before + 1)
    device.gate.let(10)
    device.wait_idle()
    assert caplog.records == []


# --- leaving while nothing runs --------------------------------------------------------------

POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        POST,
        POST + b"Content-Length: 100\r\n\r\n",
        POST + b'Content-Length: 100\r\n\r\n{"prompt": ',
        POST + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"p\r\n',
        UPGRADE[:-10],
        UPGRADE,
        UPGRADE + b"\x81\xfe\x01\x00\0\0\0\0{",
        NEXT,
        NEXT * 3,
    ],
)
def test_who_leaves_before_asking_for_anything_leaves_nothing_behind(
    device: Device, caplog: pytest.LogCaptureFixture, sent: bytes, way: str
) -> None:
    client = device.client("bytes", "", data=sent)
    device.wait_read()
    WAYS[way](client, device)
    device.wait(lambda: is_gone(device))
    device.wait_idle()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "transport"),
    [*itertools.product(ASKS, ["json", "sse"]), ("response", "websocket")],
)
@pytest.mark.parametrize("way", WAYS)
def test_who_leaves_after_the_end_aborts_nothing(
    device: Device, caplog: pytest.LogCaptureFixture, name: str, transport: str, way: str
) -> None:
    num_before = device.num_aborted
    path, body, _ = ASKS[name]
    device.gate.let(1000)
    short = {"max_output_tokens" if name == "response" else "max_tokens": 2}
    client = device.client(transport, path, body | short)
    last = {"json": b'"total_tokens"', "sse": b"\r\n0\r\n\r\n", "websocket": b"response.incomplete"}
    client.receive_until(last[transport])
    WAYS[way](client, device)
    device.wait(lambda: is_gone(device))
    device.wait_idle()
    assert device.num_aborted == num_before
    assert caplog.records == []
