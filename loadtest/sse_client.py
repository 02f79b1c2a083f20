"""A small HTTP/1.1 client for token streams: one request, one connection, timestamps per event.

Cheap on purpose: the client shares the machine with the server that it measures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Stream:
    """What one streamed request gave, times in seconds on the monotonic clock."""

    started_s: float
    event_s: list[float] = field(default_factory=list)  # arrival of each event with text or tokens
    completion_tokens: int = 0
    error: str = ""

    @property
    def first_token_s(self) -> float:
        """Time to first token."""
        return self.event_s[0] - self.started_s


async def stream_completion(url: str, body: dict) -> Stream:
    """POST `body` to `url`/v1/completions and read the SSE answer to its end."""
    target = urlsplit(url)
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {target.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload.encode())}\r\n"
        "Connection: close\r\n\r\n"
    )
    result = Stream(started_s=time.monotonic())
    reader, writer = await asyncio.open_connection(target.hostname, target.port or 80)
    try:
        writer.write((head + payload).encode())
        status, chunked = await _read_head(reader)
        if status != 200:
            result.error = f"HTTP {status}: {(await reader.read()).decode(errors='replace')[:200]}"
            return result
        async for data in _events(_body(reader, chunked)):
            _take(result, data)
    finally:
        writer.close()
        await writer.wait_closed()
    return result


def _take(result: Stream, data: bytes) -> None:
    if data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        result.error = str(event["error"])
    if event.get("choices"):
        result.event_s.append(time.monotonic())
    if event.get("usage"):
        result.completion_tokens = event["usage"]["completion_tokens"]


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    return int(head.split()[1]), "transfer-encoding: chunked" in head


async def _body(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        while data := await reader.read(65536):
            yield data
        return
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each SSE event; an event may straddle parts."""
    buffer = b""
    async for part in parts:
        *events, buffer = (buffer + part).split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
