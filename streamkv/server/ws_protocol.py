"""uvicorn's WebSocket protocol, whose connections offer a writer of text frames.

Owns the framing, and what uvicorn leaves unanswered. Knows nothing about endpoints. Invariants:
every handshake is answered in OpenAI's shape of an error, also one that can't be parsed; a
connection that was lost without a close frame is told from one that the client closed (1006);
whoever writes hears of a close at once, and not when the client has taken what waits for it. No
client takes the loop from others, or memory without bound, by how it cuts what it sends: a turn has
MAX_FRAMES of a connection, the rest waits, unread, until the application has taken their messages;
a message in fragments is one buffer; a client that reads no pongs has one that waits.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Generator
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.exceptions import SecurityError
from websockets.frames import Frame
from websockets.http11 import Request as Handshake
from websockets.http11 import Response
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

from .direct_write import WRITE, DirectWriter, WritersProtocol, batch_of
from .wire import encode, http_error_body

_READ_HERE = ("connection", "upgrade", "sec-websocket-")  # names of headers
ABNORMAL_CLOSURE = 1006  # RFC 6455, section 7.4.1
MESSAGE_TOO_BIG = 1009
STUCK_S = 20.0  # a client that takes nothing for so long after a close is dropped
MAX_FRAMES = 64  # of a connection in a turn of the loop
MAX_FRAGMENTS = 16384  # of a message


class _PacedReader(StreamReader):
    """The bytes of a connection, of which the parser sees so many frames before it waits."""

    num_frames = MAX_FRAMES  # that may still be read

    def at_eof(self) -> Generator[None, None, bool]:
        """The parser asks before each frame."""
        while not self.num_frames:
            yield
        is_at_eof = yield from super().at_eof()
        self.num_frames -= 1
        return is_at_eof

    @property
    def has_more(self) -> bool:
        """Whether the parser waits for its turn, and not for the client."""
        return not self.num_frames and bool(self.buffer)


class _Sansio(ServerProtocol):
    """Frames come from a _PacedReader. Refusals are errors in JSON, also that of a header that the
    parser can't read."""

    def parse(self) -> Generator[None]:
        self.reader = self.paced = _PacedReader()
        yield from super().parse()

    def accept(self, request: Handshake) -> Response:
        for name, value in request.headers.raw_items():
            if not value.isascii() and name.lower().startswith(_READ_HERE):
                return self.reject(HTTPStatus.BAD_REQUEST, f"{name}: expected ASCII")
        return super().accept(request)

    def reject(self, status: Any, text: str) -> Response:
        response = super().reject(status, text)
        reason = text.removeprefix("Failed to open a WebSocket connection: ").partition("\n")[0]
        error = http_error_body(response.status_code, f"WebSocket handshake: {reason}")
        headers = {"Connection": "close", "Content-Type": "application/json"}
        body = encode(error)
        headers["Content-Length"] = str(len(body))
        return Response(response.status_code, response.reason_phrase, Headers(headers), body)


class FrameWriter(DirectWriter):
    """Text frames of one WebSocket, once it is accepted: each piece is the UTF-8 of one."""

    def __init__(self, protocol: WebSocketProtocol) -> None:
        super().__init__(batch_of(protocol.config), protocol.transport)

    def _framed(self, pieces: list[bytes]) -> bytes:
        if len(pieces) == 1:
            return _frame_head(len(pieces[0])) + pieces[0]
        return b"".join([part for piece in pieces for part in (_frame_head(len(piece)), piece)])


@functools.lru_cache(4096)
def _frame_head(num: int) -> bytes:
    """What comes before a text of so many bytes: RFC 6455, section 5.2."""
    if num < 126:
        return bytes([0x81, num])
    if num < 1 << 16:
        return b"\x81\x7e" + num.to_bytes(2, "big")
    return b"\x81\x7f" + num.to_bytes(8, "big")


class WebSocketProtocol(WritersProtocol, WebSocketsSansIOProtocol):
    """uvicorn's, whose scopes offer a FrameWriter. A handshake that fails is answered and closed,
    and neither a refusal nor a close by the protocol itself is an error of the application."""

    _stuck_timer: asyncio.TimerHandle | None = None
    _turn: asyncio.Handle | None = None  # the next one for frames that have come
    _pong = b""  # the last one, while the client takes nothing
    _num_fragments = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: _Sansio = _Sansio(max_size=self.config.ws_max_size, logger=self.conn.logger)
        self._message = bytearray()  # the present one, of which some has come

    def handle_connect(self, event: Handshake) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # not refused; its task has not run yet
            self.writer = FrameWriter(self)
            scope: Any = self.scope
            scope["extensions"][WRITE] = self.writer

    # --- its end -----------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        for handle in (self._stuck_timer, self._turn):
            if handle is not None:
                handle.cancel()
        self._queue_loss()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Without a close frame. A close would wait until the client has taken what it may never
        take."""
        if not self.close_sent:
            self.transport.abort()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._queue_loss()
        self._begin_close()

    def handle_close(self, event: Frame) -> None:
        super().handle_close(event)
        self._begin_close()

    def handle_parser_exception(self) -> None:
        super().handle_parser_exception()
        self._begin_close()

    def _queue_loss(self) -> None:
        """To uvicorn a client that closed without a code and one that broke off are the same. This
        code comes second where a close was seen, and nobody reads it then."""
        self.queue.put_nowait({"type": "websocket.disconnect", "code": ABNORMAL_CLOSURE})

    def _begin_close(self) -> None:
        """The transport closes once the client has taken what was sent."""
        self.lose_writer()
        if self._stuck_timer is None:
            self._drop_if_stuck()

    def _drop_if_stuck(self, num_bytes: int = -1) -> None:
        """Unless it has taken some, of the so many bytes that waited the last time."""
        num_waiting = self.transport.get_write_buffer_size()
        if num_waiting == num_bytes:
            self.transport.abort()
        else:
            self._stuck_timer = self.loop.call_later(STUCK_S, self._drop_if_stuck, num_waiting)

    # --- what comes --------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:
            data = _without_cookies(data)
        self._parse(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse_handshake(self.conn.handshake_exc)

    def _parse(self, data: bytes = b"") -> None:
        """This turn's frames, of what has come before and of these bytes."""
        self.conn.paced.num_frames = MAX_FRAMES
        super().data_received(data)
        self._go_on()

    def _on_turn(self) -> None:
        self._turn = None
        if not (self.read_paused or self.transport.is_closing()):
            self._parse()

    def _go_on(self) -> None:
        """Read frames that have come, or else more, unless messages wait to be taken."""
        if self.read_paused or self.transport.is_closing():
            return
        if not self.conn.paced.has_more:
            self.transport.resume_reading()
            return
        self.transport.pause_reading()
        if self._turn is None:
            self._turn = self.loop.call_soon(self._on_turn)

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._go_on()
        return message

    def handle_text(self, event: Frame) -> None:
        self.curr_msg_data_type = "text"
        self._begin(event)

    def handle_bytes(self, event: Frame) -> None:
        self.curr_msg_data_type = "bytes"
        self._begin(event)

    def _begin(self, event: Frame) -> None:
        self._num_fragments = 1
        if event.fin:
            self.frames = [bytes(event.data)]
            self.send_receive_event_to_app()
        else:
            self._message = bytearray(event.data)

    def handle_cont(self, event: Frame) -> None:
        if self.close_sent:
            return
        self._num_fragments += 1
        if self._num_fragments > MAX_FRAGMENTS:
            return self._refuse_fragments()
        self._message += event.data
        if event.fin:
            self.frames = [bytes(self._message)]
            self._message = bytearray()
            self.send_receive_event_to_app()

    def _refuse_fragments(self) -> None:
        self._message = bytearray()
        if self.conn.state is State.OPEN:  # no close came right behind
            reason = f"expected at most {MAX_FRAGMENTS} fragments a message"
            self.conn.send_close(MESSAGE_TOO_BIG, reason)
            self.handle_parser_exception()

    def handle_ping(self) -> None:
        """A client that doesn't read is sent the last pong alone, once it does: RFC 6455, section
        5.5.3, allows it."""
        output = self.conn.data_to_send()
        if not output or self.transport.is_closing():
            return
        if self.writable.is_set() or self.conn.state is not State.OPEN:
            self.transport.write(b"".join(output))
        else:
            self._pong = output[-1]

    def resume_writing(self) -> None:
        pong, self._pong = self._pong, b""
        if pong and not self.close_sent:
            self.transport.write(pong)
        super().resume_writing()

    # --- its beginning, and what is sent -----------------------------------------------------

    def _refuse_handshake(self, error: Exception) -> None:
        self.handshake_initiated = self.handshake_complete = self.close_sent = True
        reason = error.__cause__ or error
        too_much = isinstance(reason, SecurityError)  # too long a line, too many headers
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if too_much else HTTPStatus.BAD_REQUEST
        response = self.conn.reject(status, str(reason))
        self.transport.write(response.serialize())
        self.transport.close()

    async def send(self, message: Any) -> None:
        if self.writer is not None:
            self.writer.flush()
        await self.writable.wait()
        if self.close_sent and self.handshake_complete:
            raise ClientDisconnected  # it was closed for a wrong frame or a missing pong
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # by a refusal
        if self.close_sent:
            self._begin_close()
            self._go_on()  # to its answer


def _without_cookies(head: bytes) -> bytes:
    """A request's head as uvicorn writes it anew, less what browsers fill beyond the parser's
    limit on localhost, where all servers share their cookies; nothing here reads any."""
    lines = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith(b"cookie:"))
