"""OpenAI's Responses mode over a WebSocket: many responses at once on one connection.

A small RFC 6455 client, without extensions, for the same reason as `sse_client`. A response has a
lane of its own, by `stream_id`. Invariant: whoever waits for a response gets it or RequestFailed,
also when the connection ends.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import time
from types import TracebackType
from typing import NamedTuple
from urllib.parse import urlsplit

from .stream import RequestFailed, Stream

_TEXT, _CLOSE, _PING, _PONG = 0x1, 0x8, 0x9, 0xA
_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


class _Lane(NamedTuple):
    stream: Stream
    ended: asyncio.Future[None]


class ResponsesSocket:
    """One connection to `url`/v1/responses. Enter it, then `respond` as often as wanted."""

    def __init__(self, url: str, api_key: str) -> None:
        self._target = urlsplit(url)
        self._api_key = api_key
        self._lanes: dict[str, _Lane] = {}
        self._numbers = itertools.count()

    async def __aenter__(self) -> ResponsesSocket:
        host, port = self._target.hostname, self._target.port or 80
        self._reader, self._writer = await asyncio.open_connection(host, port)
        key = base64.b64encode(os.urandom(16)).decode()
        self._writer.write(
            f"GET /v1/responses HTTP/1.1\r\nHost: {self._target.netloc}\r\n"
            f"Authorization: Bearer {self._api_key}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
        except BaseException:
            self._writer.close()
            raise
        if head.split()[1:2] != ["101"]:
            self._writer.close()
            raise RequestFailed(f"WebSocket upgrade: expected 101, got {head.splitlines()[0]}")
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()

    async def respond(self, body: dict, due_s: float) -> Stream:
        """Ask for a response and wait for its end. RequestFailed."""
        name = f"lane-{next(self._numbers)}"
        lane = _Lane(Stream(due_s), asyncio.get_running_loop().create_future())
        self._lanes[name] = lane
        self._send(_TEXT, json.dumps({"type": "response.create", "stream_id": name, **body}))
        try:
            await lane.ended
        finally:
            self._lanes.pop(name, None)
        return lane.stream

    def _send(self, opcode: int, text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        size = len(data)
        head = bytes([0x80 | opcode])
        if size < 126:
            head += bytes([0x80 | size])
        elif size < 1 << 16:
            head += bytes([0x80 | 126]) + size.to_bytes(2, "big")
        else:
            head += bytes([0x80 | 127]) + size.to_bytes(8, "big")
        mask = os.urandom(4)
        key = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        masked = (int.from_bytes(data, "big") ^ key).to_bytes(size, "big")
        self._writer.write(head + mask + masked)

    async def _read(self) -> None:
        reason = "the connection ended"
        try:
            while True:
                self._take(json.loads(await self._message()))
        except (RequestFailed, asyncio.IncompleteReadError, OSError) as error:
            reason = str(error)
        finally:
            for lane in self._lanes.values():
                if not lane.ended.done():
                    lane.ended.set_exception(RequestFailed(reason))

    async def _message(self) -> bytes:
        """The next text message, whole; answers pings meanwhile."""
        parts = []
        while True:
            first, second = await self._reader.readexactly(2)
            size = second & 0x7F
            if size == 126:
                size = int.from_bytes(await self._reader.readexactly(2), "big")
            elif size == 127:
                size = int.from_bytes(await self._reader.readexactly(8), "big")
            data = await self._reader.readexactly(size)
            opcode = first & 0xF
            if opcode == _CLOSE:
                raise RequestFailed(f"the server closed the connection: {data[2:].decode()}")
            if opcode == _PING:
                self._send(_PONG, data)
            elif opcode != _PONG:
                parts.append(data)
                if first & 0x80:
                    return b"".join(parts)

    def _take(self, event: dict) -> None:
        lane = self._lanes.get(event.get("stream_id", ""))
        if lane is None or lane.ended.done():
            return
        kind = event["type"]
        if kind == "response.output_text.delta":
            lane.stream.event_s.append(time.monotonic())
        elif kind in _ENDS:
            lane.stream.end_s = time.monotonic()
            usage = event.get("response", {}).get("usage")
            if usage is None:
                error = event.get("error") or event.get("response", {}).get("error")
                lane.ended.set_exception(RequestFailed(f"{kind}: {error}"))
                return
            lane.stream.prompt_tokens = usage["input_tokens"]
            lane.stream.completion_tokens = usage["output_tokens"]
            lane.stream.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
            lane.ended.set_result(None)
