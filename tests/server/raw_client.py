"""Clients on raw sockets, which can leave in any way, and a device that takes the steps it is told
to."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from fakes import FakeRunner
from server.harness import DEADLINE_S, Server

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NEXT = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)


class Gate:
    """How many steps the device may take."""

    def __init__(self) -> None:
        self.semaphore = threading.Semaphore(0)

    def let(self, num: int) -> None:
        self.semaphore.release(num)

    def close(self) -> None:
        while self.semaphore.acquire(blocking=False):
            pass


class Device:
    """A server and its gate."""

    def __init__(self, server: Server, gate: Gate) -> None:
        self.server, self.gate = server, gate
        self._clients: list[Client] = []

    def client(
        self, way: str, path: str = "", body: dict[str, Any] | None = None, **options: Any
    ) -> Client:
        self._clients.append(Client(self.server, way, path, body, **options))
        return self._clients[-1]

    def wait_idle(self) -> None:
        """Until no request is known and no block held; then the device stands still again."""
        answers = self.server.serving.app.state.answers
        self.wait(lambda: not answers.num_running)
        self.server.wait_idle()
        self.gate.close()
        while self._clients:
            self._clients.pop().leave()

    def wait_read(self) -> None:
        """Until the server has read what was sent so far: it reads all connections in turn."""
        for _ in range(2):
            other = Client(self.server, "bytes", data=NEXT)
            other.receive_until(b"\r\n\r\n")
            other.leave()

    @property
    def stats(self) -> Any:
        return self.server.engine.stats()

    @property
    def runner(self) -> FakeRunner:
        assert isinstance(self.server.runner, FakeRunner)
        return self.server.runner

    @property
    def num_inside(self) -> int:
        """Sequences that run or wait."""
        return int(self.stats.num_requests_running + self.stats.num_requests_waiting)

    @property
    def num_aborted(self) -> int:
        return int(self.stats.request_success_total["abort"])

    def wait(self, condition: Callable[[], bool]) -> None:
        self.server.wait_until(condition)


class Client:
    """A request on a raw socket: by "json", "sse" or "websocket"; by "bytes" it sends `data`."""

    def __init__(
        self,
        server: Server,
        way: str,
        path: str = "",
        body: dict[str, Any] | None = None,
        *,
        data: bytes = b"",
        receive_buffer: int | None = None,
    ) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(("127.0.0.1", server.port))
        if way == "bytes":
            self.socket.sendall(data)
            return
        if way == "websocket":
            self._upgrade(server, path)
            self.send_text(json.dumps({"type": "response.create", **(body or {})}).encode())
            return
        method = "GET" if body is None else "POST"
        content = b"" if body is None else json.dumps(body | {"stream": way == "sse"}).encode()
        self.request = (
            f"{method} {path} HTTP/1.1\r\nHost: {server.host}\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        self.socket.sendall(self.request)

    def _upgrade(self, server: Server, path: str) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {server.host}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            received += self.socket.recv(1)

    def send_text(self, data: bytes) -> None:
        self.send_frame(0x81, data)

    def send_frame(self, first: int, data: bytes) -> None:
        """A frame of a WebSocket, by its first byte."""
        size = len(data)
        length = bytes([size]) if size < 126 else b"\x7e" + size.to_bytes(2, "big")
        head = bytes([first, 0x80 | length[0]]) + length[1:]
        self.socket.sendall(head + bytes(4) + data)  # a mask of zeros

    def receive_until(self, what: bytes) -> bytes:
        received = b""
        while what not in received:
            piece = self.socket.recv(1 << 16)
            assert piece, f"the end, after {received!r}"
            received += piece
        return received

    def leave(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Leave without a word: RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
