"""WebSocket upgrades that are large or wrong: each gets an HTTP answer, none leaves a log line."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator

import pytest
from server.harness import DEADLINE_S, Server, serve

UPGRADE = [
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==",
]
BIG = "x" * 9000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One whose connections are those of these tests only."""
    with serve() as running:
        yield running


def upgrade(server: Server, request_line: str, *headers: str, usual: bool = True) -> int:
    """The status of an upgrade; an answer other than 101 must be whole and the end."""
    lines = [request_line, f"Host: {server.host}", *(UPGRADE if usual else []), *headers, "", ""]
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as client:
        client.sendall("\r\n".join(lines).encode("latin-1"))
        answer = client.makefile("rb")
        status = int(answer.readline().split()[1])
        if status != 101:
            head, _, body = answer.read().partition(b"\r\n\r\n")
            assert f"content-length: {len(body)}".encode() in head.lower()
        if status in (400, 431) and body.startswith(b"{"):
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
    return status


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("GET /v1/responses HTTP/1.1", [f"Cookie: {BIG}"], 101),
        ("GET /v1/responses HTTP/1.1", [f"X-Big: {BIG}"], 431),
        ("GET /v1/responses HTTP/1.1", [f"X-{i}: {i}" for i in range(200)], 431),
        (f"GET /v1/responses?{BIG} HTTP/1.1", [], 431),
        ("GET /v1/responses HTTP/1.1", ["Content-Length: 5"], 400),
        ("GET /v1/responses HTTP/1.1", ["Transfer-Encoding: chunked"], 400),
        ("POST /v1/responses HTTP/1.1", [], 400),  # 405 from newer parsers
        ("GET /v1/nothing HTTP/1.1", [], 404),
        ("GET /v1/responses HTTP/1.1", ["Origin: https://evil.example"], 403),
    ],
)
def test_every_upgrade_is_answered_and_none_is_logged(
    server: Server,
    caplog: pytest.LogCaptureFixture,
    request_line: str,
    headers: list[str],
    status: int,
) -> None:
    answered = upgrade(server, request_line, *headers)
    assert answered == status or (request_line.startswith("POST") and answered == 405)
    server.wait_until(lambda: not server.serving.server_state.connections)
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("value", [b"\xff\xfe", "Ü".encode(), b"MDEyMzQ1Njc4OWFiY2RlZg==\xe9"])
@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("Connection: Upgrade,", 400),
        ("Sec-WebSocket-Version:", 400),
        ("Sec-WebSocket-Key:", 400),
        ("Sec-WebSocket-Protocol:", 400),
        ("Sec-WebSocket-Extensions:", 400),
        ("Origin:", 403),
        ("Authorization:", 101),
        ("User-Agent:", 101),
    ],
)
def test_bytes_that_are_no_ascii_are_refused_where_they_would_be_read(
    server: Server, caplog: pytest.LogCaptureFixture, name: str, value: bytes, status: int
) -> None:
    header = f"{name} {value.decode('latin-1')}"
    others = [one for one in UPGRADE if not one.startswith(name.partition(":")[0])]
    request_line = "GET /v1/responses HTTP/1.1"
    assert upgrade(server, request_line, *others, header, usual=False) == status
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Upgrade: websocket", "Connection: Upgrade"], 400),
        (["Upgrade: h2c", "Connection: Upgrade"], 405),
    ],
)
def test_half_an_upgrade_is_answered(
    server: Server, caplog: pytest.LogCaptureFixture, headers: list[str], status: int
) -> None:
    request = [*headers, "Connection: close"] if status == 405 else headers
    assert upgrade(server, "GET /tokenize HTTP/1.1", *request, usual=False) == status
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_what_is_not_http_is_a_400_and_not_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        assert client.makefile("rb").readline().split()[1] == b"400"
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
