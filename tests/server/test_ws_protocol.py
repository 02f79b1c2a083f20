"""The WebSocket protocol under clients that cut what they send into very many, or never read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from uvicorn.server import ServerState
from websockets.frames import Opcode

from streamkv.server.direct_write import Config
from streamkv.server.ws_protocol import MAX_FRAGMENTS, MAX_FRAMES, WebSocketProtocol

MAX_BYTES = 1 << 20
TEXT, CONT, CLOSE, PING, PONG = (Opcode[name] for name in ("TEXT", "CONT", "CLOSE", "PING", "PONG"))
HEAD = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    b"Sec-WebSocket-Version: 13\r\n\r\n"
)


def frame(code: Opcode, data: bytes = b"", *, fin: bool = True) -> bytes:
    """As a client sends it, under a mask of zeros."""
    assert len(data) < 126
    return bytes([fin << 7 | code, 0x80 | len(data)]) + bytes(4) + data


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.reads = True
        self.closes = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def close(self) -> None:
        self.closes = True

    def is_closing(self) -> bool:
        return self.closes

    def get_write_buffer_size(self) -> int:
        return 0


class Connection:
    """One that the application has accepted, and whose messages it takes."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.transport = Transport()
        config = Config(self._app, interface="asgi3", ws_max_size=MAX_BYTES, ws_ping_interval=None)
        config.ws_per_message_deflate = False
        self.protocol = WebSocketProtocol(config, ServerState(), {})
        self.num_frames = 0
        handle = self.protocol.conn.recv_frame

        def count(one: Any) -> None:
            self.num_frames += 1
            handle(one)

        self.protocol.conn.recv_frame = count  # type: ignore[method-assign]

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            self.taken.append(message.get("text"))
        self.taken.append(message["code"])

    async def send(self, data: bytes) -> int:
        """All of it at once; the most frames that a turn had of it."""
        most = 0
        self.num_frames = 0
        self.protocol.data_received(data)
        while self.num_frames or not (self.transport.reads or self.transport.closes):
            most, self.num_frames = max(most, self.num_frames), 0
            await asyncio.sleep(0)
        return most


def connected(talk: Callable[[Connection], Awaitable[None]]) -> None:
    async def run() -> None:
        connection = Connection()
        connection.protocol.connection_made(connection.transport)
        connection.protocol.data_received(HEAD)
        while not connection.protocol.handshake_complete:
            await asyncio.sleep(0)
        connection.transport.written.clear()
        await talk(connection)
        connection.protocol.connection_lost(None)
        await asyncio.gather(*connection.protocol.tasks)

    asyncio.run(run())


@pytest.mark.parametrize(
    "many",
    [
        frame(TEXT) * 5000,
        frame(TEXT, b"{}") * 5000,
        frame(PING) * 5000,
        frame(PONG) * 5000,
        frame(TEXT, b"a", fin=False) + frame(CONT, fin=False) * 5000 + frame(CONT),
    ],
    ids=["empty", "small", "pings", "pongs", "fragments"],
)
def test_a_turn_has_few_frames_of_a_client_and_all_are_read_in_order(many: bytes) -> None:
    async def talk(connection: Connection) -> None:
        behind = frame(TEXT, b"behind") + frame(CLOSE, (4000).to_bytes(2, "big"))
        assert await connection.send(many + behind) <= MAX_FRAMES
        while 4000 not in connection.taken:
            await asyncio.sleep(0)
        assert connection.taken[-2:] == ["behind", 4000]
        texts = connection.taken[:-2]
        assert len(texts) == (1 if many[0] == 1 else 5000 * (many[0] == 0x81))
        pongs = b"".join(connection.transport.written).count(bytes([0x80 | PONG, 0]))
        assert pongs == 5000 * (many[0] == 0x80 | PING)

    connected(talk)


def test_no_frame_is_parsed_while_messages_wait_to_be_taken() -> None:
    async def talk(connection: Connection) -> None:
        protocol = connection.protocol
        protocol.data_received(frame(TEXT) * 1000)
        assert protocol.queue.qsize() <= MAX_FRAMES and not connection.transport.reads

    connected(talk)


def test_a_client_that_reads_no_pongs_has_the_last_one_only() -> None:
    async def talk(connection: Connection) -> None:
        connection.protocol.pause_writing()
        pings = b"".join(frame(PING, b"%d" % number) for number in range(1000))
        await connection.send(pings)
        assert not connection.transport.written
        connection.protocol.resume_writing()
        assert connection.transport.written == [bytes([0x80 | PONG, 3]) + b"999"]

    connected(talk)


@pytest.mark.parametrize("data", [b"", b"a"])
def test_a_message_of_too_many_fragments_is_the_end_of_its_connection(data: bytes) -> None:
    async def talk(connection: Connection) -> None:
        begin, more = frame(TEXT, data, fin=False), frame(CONT, data, fin=False)
        await connection.send(begin + more * (MAX_FRAGMENTS - 2) + frame(CONT, data))
        assert connection.taken == [(data * MAX_FRAGMENTS).decode()]
        connection.protocol.data_received(begin + more * (MAX_FRAGMENTS + 10))
        while not connection.transport.closes:
            await asyncio.sleep(0)
        assert b"fragments" in connection.transport.written[-1]
        while len(connection.taken) < 2:
            await asyncio.sleep(0)
        assert connection.taken[1] == 1009

    connected(talk)
