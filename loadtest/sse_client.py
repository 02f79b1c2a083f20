"""A small HTTP/1.1 client for token streams: one request, one connection, timestamps per event.

Cheap on purpose: the client shares the machine with the server that it measures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from .stream import RequestFailed, Stream


async def stream_sse(url: str, path: str, body: dict, api_key: str, due_s: float) -> Stream:
    """POST `body` to `url` + `path` and read the SSE answer to its end. RequestFailed."""
    target = urlsplit(url)
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {target.netloc}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {api_key}\r\nContent-Length: {len(payload.encode())}\r\n"
        "Connection: close\r\n\r\n"
    )
    result = Stream(due_s)
    reader, writer = await asyncio.open_connection(target.hostname, target.port or 80)
    try:
        writer.write((head + payload).encode())
        status, chunked = await _read_head(reader)
        if status != 200:
            text = (await reader.read()).decode(errors="replace")
            raise RequestFailed(f"HTTP {status}: {text[:200]}")
        async for data in _events(_body(reader, chunked)):
            _take(result, data)
    finally:
        writer.close()
        await writer.wait_closed()
    result.end_s = time.monotonic()
    return result


async def get(url: str, path: str) -> tuple[int, str]:
    """Status and text of what GET gives. RequestFailed."""
    target = urlsplit(url)
    reader, writer = await asyncio.open_connection(target.hostname, target.port or 80)
    try:
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: {target.netloc}\r\nConnection: close\r\n\r\n".encode()
        )
        status, chunked = await _read_head(reader)
        parts = [part async for part in _body(reader, chunked)]
        return status, b"".join(parts).decode(errors="replace")
    finally:
        writer.close()
        await writer.wait_closed()


def _take(result: Stream, data: bytes) -> None:
    if data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        raise RequestFailed(str(event["error"]))
    choices = event.get("choices", ())
    if any(_has_output(choice) for choice in choices):
        result.event_s.append(time.monotonic())
    for choice in choices:
        if token_ids := choice.get("token_ids"):
            result.token_ids.setdefault(choice.get("index", 0), []).extend(token_ids)
    if usage := event.get("usage"):
        result.prompt_tokens = usage["prompt_tokens"]
        result.completion_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        result.cached_tokens = details.get("cached_tokens") or 0


def _has_output(choice: dict) -> bool:
    """A chat's first chunk has a role and no text yet; a completion's chunks all come of tokens."""
    return "text" in choice or bool(choice.get("delta", {}).get("content"))


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        return int(head.split()[1]), "transfer-encoding: chunked" in head
    except (ValueError, IndexError, asyncio.LimitOverrunError):
        raise RequestFailed("the answer isn't HTTP") from None


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
