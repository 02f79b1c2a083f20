"""HTTP/1.1 by hand: requests as bytes, many in a row on one connection, and their answers.

Owns one connection at a time, and strict reading: what isn't HTTP is an Offence. Knows nothing of
what is asked.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

_LIMIT = 1 << 24  # of a line of an answer
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by a reset


class Offence(Exception):
    """The server did what no server may."""


class Gone(Exception):
    """The server closed the connection where it may."""


@dataclass(frozen=True)
class Target:
    """The server, and how long it may take for any one answer."""

    url: str
    api_key: str
    deadline_s: float

    @property
    def authority(self) -> str:
        return urlsplit(self.url).netloc

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        return await asyncio.open_connection(parts.hostname, parts.port or 80, limit=_LIMIT)

    async def within(self, what: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.deadline_s):
                return await what
        except TimeoutError:
            raise Offence(f"no end within {self.deadline_s:g} s") from None

    def head(self, method: str, path: str, *headers: tuple[str, str]) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.authority}"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Ask(NamedTuple):
    """A well-formed request; what it asks for may be nonsense."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    chunks: tuple[int, ...] = ()  # where the body is cut; none: it goes in one piece

    def to_bytes(self, target: Target) -> bytes:
        headers = list(self.headers)
        if not self.body and self.method in ("GET", "HEAD", "OPTIONS"):
            return target.head(self.method, self.path, *headers)
        headers.append(("Content-Type", "application/json"))
        if not self.chunks:
            headers.append(("Content-Length", str(len(self.body))))
            return target.head(self.method, self.path, *headers) + self.body
        headers.append(("Transfer-Encoding", "chunked"))
        edges = sorted({0, len(self.body), *(cut % (len(self.body) + 1) for cut in self.chunks)})
        pieces = [self.body[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        data = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        return target.head(self.method, self.path, *headers) + data + b"0\r\n\r\n"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").split(";")[0].strip()


async def read_answer(reader: asyncio.StreamReader, method: str) -> Answer:
    """Gone if the connection ends before its first byte; Offence if in the middle."""
    head = await _until(reader, b"\r\n\r\n")
    if head is None:
        raise Gone
    status, headers = _head(head)
    if method == "HEAD" or status in (204, 304) or 100 <= status < 200:
        body = b""
    elif headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _chunked(reader)
    elif "content-length" in headers:
        body = await _exactly(reader, int(headers["content-length"]))
    else:
        body = await reader.read()
    if status == 100:
        return await read_answer(reader, method)
    return Answer(status, headers, body)


def _head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if version != "HTTP/1.1" or not rest[:3].isdigit():
        raise Offence(f"expected a status line of HTTP/1.1, got {first[:80]!r}")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise Offence(f"expected a header, got {line[:80]!r}")
        headers[name.lower()] = value.strip()
    return int(rest[:3]), headers


async def _until(reader: asyncio.StreamReader, end: bytes) -> bytes | None:
    try:
        return await reader.readuntil(end)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise Offence(f"the connection ended inside an answer: {error.partial[:80]!r}") from None
    except asyncio.LimitOverrunError:
        raise Offence("a head or a chunk without an end") from None
    except ConnectionError:
        return None


async def _exactly(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise Offence(f"the connection ended inside a body of {size} bytes: {error}") from None


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while True:
        line = await _until(reader, b"\r\n")
        if line is None:
            raise Offence("the connection ended between the chunks of a body")
        try:
            size = int(line, 16)
        except ValueError:
            raise Offence(f"expected the size of a chunk, got {line[:40]!r}") from None
        data = await _exactly(reader, size + 2)
        if not data.endswith(b"\r\n"):
            raise Offence("a chunk is longer than its size says")
        if not size:
            return b"".join(parts)
        parts.append(data[:-2])


async def hang_up(writer: asyncio.StreamWriter, *, hard: bool = False) -> None:
    """Close; `hard`: by a reset, as a process that was killed does."""
    if hard:
        raw = writer.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
        return
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
