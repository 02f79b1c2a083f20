"""What frames cost that nobody makes: they are written to the sockets, and nothing else is done.

Owns a server that answers every request with the same frames, one a step for each connection, as
`server/` writes them. Knows as much of HTTP and WebSockets as that takes. What the real server
costs more than this is Python's share.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import socket
from typing import Any, cast

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455
_ID = b"0123456789abcdef0123456789abcdef"
_CHUNK = (
    b'data: {"id":"chatcmpl-%b","object":"chat.completion.chunk","created":1790000000,'
    b'"model":"smollm2-135m-instruct","choices":[{"index":0,"delta":{"content":" river"},'
    b'"logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}\n\n' % _ID
)
_DELTA = (
    b'{"type":"response.output_text.delta","sequence_number":100,"item_id":"msg_%b",'
    b'"output_index":0,"content_index":0,"delta":" river","logprobs":[]}' % _ID
)
_SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_LENGTH = re.compile(rb'"max_(?:output_)?tokens": ?(\d+)')
_KEY = re.compile(rb"sec-websocket-key: *(\S+)", re.IGNORECASE)


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _framed(data: bytes) -> bytes:
    return b"\x81\x7e" + len(data).to_bytes(2, "big") + data


class _Connection(asyncio.Protocol):
    """A step writes `frame` for each of its streams, and `last` for one that has ended."""

    def __init__(self, connections: dict[_Connection, None]) -> None:
        self._connections = connections
        self._received = b""
        self._lengths: list[int] = []  # tokens that each stream has still to get
        self._frame = self._last = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if key := _KEY.search(self._received):
            accept = base64.b64encode(hashlib.sha1(key[1] + _GUID).digest())
            self._transport.write(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Accept: %b\r\n\r\n" % accept
            )
            self._received = b""
        while length := _LENGTH.search(self._received):
            self._begin(int(length[1]), is_socket=not self._received.startswith(b"POST"))
            self._received = self._received[length.end() :]

    def _begin(self, num_tokens: int, *, is_socket: bool) -> None:
        usage = b'"usage":{"output_tokens":%d,"completion_tokens":%d}' % (num_tokens, num_tokens)
        if is_socket:
            self._transport.write(_framed(b'{"type":"response.content_part.added"}'.ljust(126)))
            self._frame = _framed(_DELTA)
            self._last = _framed(b'{"type":"response.completed",%b}' % usage.ljust(126))
        else:
            self._transport.write(_SSE_HEAD)
            self._frame = _chunked(_CHUNK)
            self._last = _chunked(b"data: {%b}\n\ndata: [DONE]\n\n" % usage) + b"0\r\n\r\n"
        self._lengths.append(num_tokens)
        self._connections[self] = None

    def step(self) -> None:
        lengths = [length - 1 for length in self._lengths]
        self._lengths = [length for length in lengths if length]
        num_ended = len(lengths) - len(self._lengths)
        self._transport.write(self._frame * len(lengths) + self._last * num_ended)
        if not self._lengths:
            del self._connections[self]


async def serve_bare(listener: socket.socket, step_s: float) -> None:
    """Until it is cancelled."""
    connections: dict[_Connection, None] = {}
    loop = asyncio.get_running_loop()
    factory: Any = lambda: _Connection(connections)  # noqa: E731
    async with await loop.create_server(factory, sock=listener):
        due_s = loop.time()
        while True:
            due_s = max(due_s + step_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            for connection in list(connections):
                connection.step()
