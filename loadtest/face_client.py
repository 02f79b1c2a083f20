"""Many streams at once that are only counted, over SSE and over WebSockets.

Owns connections, framing and counts. It looks at as little as tells events, tokens and ends apart:
parsing what it reads would take more CPU than the server that it measures. Invariant: `mark` is
called four times: before connecting, when every stream has had an event, when the first three
quarters of the events have come, and at the end.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from .stream import RequestFailed

_USAGE = re.compile(rb'"(?:completion|output)_tokens": ?(\d+)')
_DELTA = b"output_text.delta"
_TYPE_LEN = 80  # of a message's first bytes, among which its type stands


class Api(NamedTuple):
    """One way to ask for a stream."""

    path: str
    is_socket: bool
    ask: dict[str, Any]  # besides length, model and the like
    length_field: str


_WORDS = "Tell me a long story about a river, a mill and a very old clock."
APIS = {
    "chat": Api(
        "/v1/chat/completions",
        False,
        {"messages": [{"role": "user", "content": _WORDS}]},
        "max_tokens",
    ),
    "completions": Api("/v1/completions", False, {"prompt": _WORDS}, "max_tokens"),
    "responses-ws": Api("/v1/responses", True, {"input": _WORDS}, "max_output_tokens"),
}


class Counter:
    """What came on all connections together."""

    def __init__(self, num_streams: int, output_len: int, mark: Callable[[Counter], None]) -> None:
        self.num_events = 0  # with text
        self.num_tokens = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._mark = mark
        self._num_begun = self._num_ended = 0
        self._num_streams = num_streams
        self._late = 3 * num_streams * output_len // 4
        self._num_marks = 0

    def count(self, num: int) -> None:
        self.num_events += num
        if self._num_marks == 2 and self.num_events >= self._late:
            self.mark()

    def begin(self) -> None:
        """A stream has had its first event."""
        self._num_begun += 1
        if self._num_begun == self._num_streams:
            self.mark()

    def end(self, num_tokens: int) -> None:
        """A stream has ended well."""
        self._num_ended += 1
        self.num_tokens += num_tokens
        if self._num_marks < 3:
            self.fail(
                "a stream ended before others had come far; ask for longer ones (--output-len)"
            )
        elif self._num_ended == self._num_streams and not self.ended.done():
            self.mark()
            self.ended.set_result(None)

    def mark(self) -> None:
        self._num_marks += 1
        self._mark(self)

    def fail(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(RequestFailed(reason))


class _Stream(asyncio.Protocol):
    """One connection of a counter's."""

    def __init__(self, counter: Counter, requests: Sequence[bytes]) -> None:
        self._counter = counter
        self._requests = requests
        self._rest = b""  # read, and not yet a whole event or frame
        self._is_done = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._requests[0])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_done:
            self._counter.fail(f"the connection ended early: {exc}")

    def finish(self) -> None:
        self._is_done = True
        self._transport.close()


class _SseStream(_Stream):
    """One stream."""

    _has_head = _has_begun = False
    _num_tokens = 0

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        if not self._has_head:
            data = self._without_head(data)
        end = data.rfind(b"\n\n") + 2 if self._has_head else 0
        self._rest = data[end:]
        data = data[:end]
        num = data.count(b"\ndata: {")
        if num and not self._has_begun:
            self._has_begun = True
            self._counter.begin()
        self._counter.count(num)
        if b'_tokens"' in data:
            self._num_tokens = int(_USAGE.findall(data)[-1])
        if b"data: [DONE]" in data:
            self._counter.end(self._num_tokens)
            self.finish()

    def _without_head(self, data: bytes) -> bytes:
        """What follows the head, with the line end before it; everything while it isn't whole."""
        head, end, body = data.partition(b"\r\n\r\n")
        if not end:
            return data
        if head.split(b" ", 2)[1:2] != [b"200"]:
            if body:
                self._counter.fail(f"{head[:20].decode()}: {body.decode(errors='replace')[:300]}")
            return data
        self._has_head = True
        return b"\r\n" + body


class _Socket(_Stream):
    """The streams of one WebSocket: the handshake's request, then a message for each."""

    _is_open = False

    def __init__(self, counter: Counter, requests: Sequence[bytes]) -> None:
        super().__init__(counter, requests)
        self._num_left = len(requests) - 1

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        position = num_deltas = 0
        if not self._is_open:
            position = self._read_head(data)
        while self._is_open:
            start, end = _frame(data, position)
            if end > len(data):
                break
            if data.find(_DELTA, start, start + _TYPE_LEN) >= 0:
                num_deltas += 1
            else:
                self._counter.count(num_deltas)
                num_deltas = 0
                self._take(data[position] & 15, data[start:end])
            position = end
        self._rest = data[position:]
        self._counter.count(num_deltas)

    def _read_head(self, data: bytes) -> int:
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            return 0
        if data.split(b" ", 2)[1:2] != [b"101"]:
            self._counter.fail(data.decode(errors="replace")[:300])
            return len(data)
        self._is_open = True
        for message in self._requests[1:]:
            self._transport.write(_masked(0x1, message))
        return end

    def _take(self, opcode: int, data: bytes) -> None:
        """A frame that is no delta of text."""
        kind = data[:_TYPE_LEN]
        if opcode == 0x9:
            self._transport.write(_masked(0xA, data))
        elif opcode == 0x8 or b'"error"' in kind or b"response.failed" in kind:
            self._counter.fail(data.decode(errors="replace")[:300])
        elif b"content_part.added" in kind:
            self._counter.begin()
        elif b"response.completed" in kind or b"response.incomplete" in kind:
            self._counter.end(int(_USAGE.findall(data)[-1]))
            self._num_left -= 1
            if not self._num_left:
                self.finish()


def _frame(data: bytes, position: int) -> tuple[int, int]:
    """Where the payload of the frame at `position` begins and ends; the end lies beyond the data
    if it is not all there."""
    size = data[position + 1] & 0x7F if len(data) > position + 1 else 0x7D
    start = position + 2
    if size >= 126:
        length = 2 if size == 126 else 8
        start += length
        size = int.from_bytes(data[start - length : start], "big") if len(data) >= start else 0
        return start, max(start + size, start + (len(data) < start))
    return start, start + size


def _masked(opcode: int, data: bytes) -> bytes:
    size = len(data)
    if size < 126:
        head = bytes([0x80 | opcode, 0x80 | size])
    else:
        head = bytes([0x80 | opcode, 0x80 | 126]) + size.to_bytes(2, "big")
    return head + bytes(4) + data  # a mask of zeros


async def run_streams(
    api: Api,
    url: str,
    *,
    num_streams: int,
    num_connections: int,
    output_len: int,
    model: str | None,
    api_key: str,
    mark: Callable[[Counter], None],
) -> Counter:
    """Run them all to their end. RequestFailed, OSError."""
    counter = Counter(num_streams, output_len, mark)
    target = urlsplit(url)
    body: dict[str, Any] = {**api.ask, api.length_field: output_len}
    body |= {"temperature": 0, "ignore_eos": True}
    if model:
        body["model"] = model
    head = f"Host: {target.netloc}\r\nAuthorization: Bearer {api_key}\r\n"
    counter.mark()
    loop, connections = asyncio.get_running_loop(), list[asyncio.Task[Any]]()
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(num_connections if api.is_socket else num_streams):
                if api.is_socket:
                    lanes = range(number, num_streams, num_connections)
                    requests = _socket_requests(api, head, body, lanes)
                    factory = functools.partial(_Socket, counter, requests)
                else:
                    requests = [_sse_request(api, head, body)]
                    factory = functools.partial(_SseStream, counter, requests)
                connecting = loop.create_connection(factory, target.hostname, target.port or 80)
                connections.append(group.create_task(connecting))
        await counter.ended
    finally:
        for connection in connections:
            if not connection.cancelled() and connection.exception() is None:
                connection.result()[0].abort()
        await asyncio.sleep(0)  # for that to happen
    return counter


def _sse_request(api: Api, head: str, body: dict[str, Any]) -> bytes:
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    return (
        f"POST {api.path} HTTP/1.1\r\n{head}Content-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n{payload}"
    ).encode()


def _socket_requests(api: Api, head: str, body: dict[str, Any], lanes: range) -> list[bytes]:
    key = base64.b64encode(os.urandom(16)).decode()
    handshake = (
        f"GET {api.path} HTTP/1.1\r\n{head}Upgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    create = {"type": "response.create", **body}
    if len(lanes) > 1:
        messages = [{**create, "stream_id": f"lane-{lane}"} for lane in lanes]
    else:
        messages = [create]
    return [handshake.encode(), *(json.dumps(message).encode() for message in messages)]
