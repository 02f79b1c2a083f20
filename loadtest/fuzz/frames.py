"""WebSocket frames by hand, right and wrong, and a connection that reads what the server sends.

Owns RFC 6455's framing. Knows nothing of what the messages say. Invariant: what the server sends
is read strictly, or an Offence.
"""

from __future__ import annotations

import asyncio
import base64
import random
from typing import NamedTuple

from .http import Answer, Gone, Offence, Target, hang_up, read_answer

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
PATH = "/v1/responses"
FAIR_CLOSES = (1000, 1001, 1002, 1003, 1005, 1007, 1008, 1009)
_MASK = bytes(4)  # as good as any other, and what was sent stays readable


def frame(
    payload: bytes,
    opcode: int = TEXT,
    *,
    fin: bool = True,
    rsv: int = 0,
    masked: bool = True,
    size: int = -1,
    width: int = 0,
) -> bytes:
    """A client's frame. `size` is what it says its payload has, in at least `width` bytes."""
    size = len(payload) if size < 0 else size
    head = bytes([(0x80 if fin else 0) | rsv << 4 | opcode])
    mark = 0x80 if masked else 0
    if size < 126 and width < 2:
        head += bytes([mark | size])
    elif size < 1 << 16 and width < 8:
        head += bytes([mark | 126]) + size.to_bytes(2, "big")
    else:
        head += bytes([mark | 127]) + size.to_bytes(8, "big")
    return head + (_MASK if masked else b"") + payload


def fragments(rng: random.Random, payload: bytes, count: int) -> bytes:
    """One message in pieces, cut anywhere, also inside a character."""
    cuts = sorted(rng.randrange(len(payload) + 1) for _ in range(count - 1))
    edges = [0, *cuts, len(payload)]
    pieces = [payload[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    return b"".join(
        frame(piece, CONTINUATION if i else TEXT, fin=i == len(pieces) - 1)
        for i, piece in enumerate(pieces)
    )


def upgrade(target: Target, *headers: tuple[str, str], path: str = PATH, key: str = "") -> bytes:
    """A handshake. A header given here stands instead of the usual one; "" leaves it out."""
    usual = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": key or base64.b64encode(b"0123456789abcdef").decode(),
        "Sec-WebSocket-Version": "13",
    }
    usual |= dict(headers)
    return target.head("GET", path, *((name, value) for name, value in usual.items() if value))


class Closed(NamedTuple):
    """The server closed; 1005: it said no code, 1006: it just hung up."""

    code: int
    reason: str


class Socket:
    """One connection after its handshake. `receive` gives messages, then a Closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.num_pongs = 0

    @classmethod
    async def open(cls, target: Target, *headers: tuple[str, str]) -> Socket:
        answer, reader, writer = await handshake(target, upgrade(target, *headers))
        if answer is None or answer.status != 101:
            await hang_up(writer)
            raise Offence(f"WebSocket handshake: expected 101, got {answer}")
        return cls(reader, writer)

    async def receive(self) -> bytes | Closed:
        """A text message, whole; answers pings meanwhile."""
        parts: list[bytes] = []
        while True:
            try:
                first, second = await self._reader.readexactly(2)
                size = second & 0x7F
                if size >= 126:
                    data = await self._reader.readexactly(2 if size == 126 else 8)
                    size = int.from_bytes(data, "big")
                payload = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return Closed(1006, "")
            opcode = first & 0xF
            if first & 0x70 or second & 0x80:
                raise Offence(f"a frame that no server may send: {first:#x} {second:#x}")
            if opcode == CLOSE:
                code = int.from_bytes(payload[:2], "big") if payload else 1005
                return Closed(code, payload[2:].decode(errors="replace"))
            if opcode == PING:
                self.writer.write(frame(payload, PONG))
            elif opcode == PONG:
                self.num_pongs += 1
            elif opcode in (TEXT, CONTINUATION):
                parts.append(payload)
                if first & 0x80:
                    return b"".join(parts)
            else:
                raise Offence(f"expected text frames, got opcode {opcode:#x}")


async def handshake(
    target: Target, data: bytes
) -> tuple[Answer | None, asyncio.StreamReader, asyncio.StreamWriter]:
    """The answer to the bytes of a handshake; None if the server hung up without one."""
    reader, writer = await target.connect()
    writer.write(data)
    try:
        return await target.within(read_answer(reader, "GET")), reader, writer
    except Gone:
        return None, reader, writer
    except BaseException:
        await hang_up(writer)
        raise
