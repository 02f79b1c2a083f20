"""Writing straight to the transports: `send` of the ASGI costs a coroutine, a dict and some checks
for each piece.

Owns the batch of a turn's writes, and what connections and their writers have in common over HTTP
and WebSockets. A request's scope offers its writer as the extension WRITE; under a server that
isn't ours it isn't there, and who writes uses `send`. Knows nothing about what is written.
Invariants:

- What is written here arrives in order with what is sent by `send`.
- The transport's pause and resume reach the one who writes, and so does the loss of the connection,
  after which nothing is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sys
import termios
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import Scope

logger = logging.getLogger(__name__)

WRITE = "streamkv.write"
MAX_PIECES = 64  # that wait for the end of a turn; then the transport says whether it is full


def _nothing() -> None: ...


class WriteBatch:
    """What was written to many connections in one turn of the engine, sent in one go after it.

    Each piece is a system call, and one that finds its reader asleep costs several times as much as
    one that finds it busy: in between lies the work on other streams. A connection that was
    written to several times has them joined.
    """

    def __init__(self) -> None:
        self._writers: list[DirectWriter] = []

    def add(self, writer: DirectWriter) -> None:
        """It has something, for the first time since it was flushed."""
        if not self._writers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._writers.append(writer)

    def _flush(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            try:
                writer.flush()
            except Exception:  # of one connection: the others are served
                logger.exception("writing to a connection failed")
                writer.lose()


class DirectWriter:
    """Writes to one connection. `on_paused`, `on_resumed` and `on_lost` are its user's to set."""

    def __init__(self, batch: WriteBatch, transport: asyncio.Transport) -> None:
        self.is_writable = True
        self.on_paused: Callable[[], None] = _nothing
        self.on_resumed: Callable[[], None] = _nothing
        self.on_lost: Callable[[], None] = _nothing
        self._batch = batch
        self._transport = transport
        self._fd = _plain_socket(transport)
        self._is_lost = False
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> None:
        """Some bytes, not none. All of them are taken; `is_writable` says whether more should
        follow."""
        pieces = self._pieces
        if not pieces:
            self._batch.add(self)
        pieces.append(piece)
        if len(pieces) >= MAX_PIECES:
            self.flush()

    def flush(self) -> None:
        """Send now what was written."""
        pieces = self._pieces
        if pieces:
            self._pieces = []
            if not self._is_lost:
                self._send(self._framed(pieces))

    def _send(self, data: bytes) -> None:
        """Give it to the socket, and to the transport what the socket doesn't take: an eighth of
        what a token costs is on the transport's way to the same system call.

        The transport has nothing that would be overtaken, and isn't closing: the socket is its own
        until it has said so.
        """
        transport, fd = self._transport, self._fd
        if fd >= 0 and not transport.get_write_buffer_size() and not transport.is_closing():
            try:
                num_sent = os.write(fd, data)
            except OSError:  # it is full, or broken: the transport finds out
                num_sent = 0
            if num_sent == len(data):
                return
            data = data[num_sent:]
        transport.write(data)

    def _framed(self, pieces: list[bytes]) -> bytes:
        """As they stand on the wire."""
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pause(self) -> None:
        self.is_writable = False
        self.on_paused()

    def resume(self) -> None:
        self.is_writable = True
        self.on_resumed()

    def lose(self) -> None:
        """The connection is lost, or being closed: nothing is sent any more."""
        self.is_writable = False
        self._is_lost = True
        self._pieces.clear()
        self.on_lost()
        self.release()

    def release(self) -> None:
        """Its user is told nothing any more."""
        self.on_paused = self.on_resumed = self.on_lost = _nothing


def _plain_socket(transport: asyncio.Transport) -> int:
    """The number of the socket whose bytes are the transport's; -1 if there is none."""
    socket = transport.get_extra_info("socket")
    if socket is None or transport.get_extra_info("sslcontext") is not None:
        return -1
    number: int = socket.fileno()
    return number


def num_on_its_way(transport: asyncio.Transport) -> int:
    """Bytes that the client's machine has not acknowledged yet, where the system tells (Linux:
    ioctl SIOCOUTQ); else those that the transport holds."""
    held = bytearray(4)
    with contextlib.suppress(OSError):
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, held)
    return transport.get_write_buffer_size() + int.from_bytes(held, sys.byteorder)


class WritersProtocol(asyncio.Protocol):
    """A connection that tells its writer, while it has one, what becomes of the transport. Stands
    before the protocol that it extends."""

    writer: DirectWriter | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.writer is not None:
            self.writer.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.writer is not None:
            self.writer.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lose_writer()

    def lose_writer(self) -> None:
        """Nothing is written any more. Idempotent."""
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.lose()


class Config(uvicorn.Config):
    """uvicorn's, with what the connections of a server share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batch = WriteBatch()


def batch_of(config: uvicorn.Config) -> WriteBatch:
    assert isinstance(config, Config)
    return config.batch


def direct_writer(scope: Scope) -> Any:
    """The BodyWriter or FrameWriter that the server offers; None under one that doesn't."""
    return scope.get("extensions", {}).get(WRITE)
