"""uvicorn's WebSocket protocol, whose connections offer a writer of text frames.

Owns the framing, and what uvicorn leaves unanswered. Knows nothing about endpoints. Invariants:
every handshake is answered in OpenAI's shape of an error, also one that can't be parsed; a
connection that was lost without a close frame is told from one that the client closed (1006);
whoever writes hears of a close at once, and not when the client has taken what waits for it.
"""

from __future__ import annotations

import asyncio
import functools
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.exceptions import SecurityError
from websockets.frames import Frame
from websockets.http11 import Request as Handshake
from websockets.http11 import Response
from websockets.server import ServerProtocol

from .direct_write import WRITE, DirectWriter, WritersProtocol, batch_of
from .wire import encode, http_error_body

_READ_HERE = ("connection", "upgrade", "sec-websocket-")  # names of headers
ABNORMAL_CLOSURE = 1006  # RFC 6455, section 7.4.1
STUCK_S = 20.0  # a client that takes nothing for so long after a close is dropped


class _Handshake(ServerProtocol):
    """Refusals are errors in JSON, also that of a header that the parser can't read."""

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Handshake(max_size=self.config.ws_max_size, logger=self.conn.logger)

    def handle_connect(self, event: Handshake) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # not refused; its task has not run yet
            self.writer = FrameWriter(self)
            scope: Any = self.scope
            scope["extensions"][WRITE] = self.writer

    # --- its end -----------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stuck_timer is not None:
            self._stuck_timer.cancel()
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

    # --- its beginning, and what is sent -----------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:
            data = _without_cookies(data)
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse_handshake(self.conn.handshake_exc)

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


def _without_cookies(head: bytes) -> bytes:
    """A request's head as uvicorn writes it anew, less what browsers fill beyond the parser's
    limit on localhost, where all servers share their cookies; nothing here reads any."""
    lines = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith(b"cookie:"))
