"""uvicorn's HTTP protocol, whose requests offer a writer of their body.

Owns the framing of that body: in chunks over HTTP/1.1, until the connection is closed over
HTTP/1.0. Knows nothing about endpoints. Invariants:

- A connection has one request at a time. What a client sends behind one that is not answered yet
  is not taken: the connection ends with that answer, as RFC 9112 (9.3.2) allows. So reading goes
  on all the time, and a client that leaves is noticed whatever it has sent.
- What can't be parsed gets an answer of OpenAI's shape, and so does a head that is too long: what
  is read besides a body is bounded.
"""

from __future__ import annotations

import functools
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from .direct_write import WRITE, DirectWriter, WritersProtocol, batch_of
from .wire import encode, http_error_body

MAX_HEAD_BYTES = 64 * 1024  # and what one read brings with its end
_ENDLESS_BYTES = 1 << 62


class _SentAhead(Exception):
    """A request came before the one before it was answered."""


class BodyWriter(DirectWriter):
    """The body of one HTTP answer whose head is sent by `send`: `begin`, the head, any number of
    pieces, `finish`, and an empty last piece by `send`."""

    def __init__(self, protocol: HttpProtocol, cycle: RequestResponseCycle) -> None:
        super().__init__(batch_of(protocol.config), cycle.transport)
        self._protocol = protocol
        self._cycle = cycle
        self._is_chunked = cycle.scope["http_version"] != "1.0"

    def begin(self) -> None:
        """The head comes next."""
        self._protocol.writer = self
        self.is_writable = not self._cycle.flow.write_paused and not self._cycle.disconnected
        if not self._is_chunked:  # the end of the connection is that of the body
            self._cycle.chunked_encoding = False
            self._cycle.expected_content_length = _ENDLESS_BYTES

    def _framed(self, pieces: list[bytes]) -> bytes:
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return b"%b%b\r\n" % (_chunk_head(len(data)), data) if self._is_chunked else data

    def finish(self) -> None:
        """The last piece comes next."""
        self.flush()
        self.release()
        self._protocol.writer = None
        if not self._is_chunked:
            self._cycle.expected_content_length = 0


@functools.lru_cache(4096)
def _chunk_head(num: int) -> bytes:
    return b"%x\r\n" % num


class HttpProtocol(WritersProtocol, HttpToolsProtocol):
    """uvicorn's, whose requests offer a BodyWriter."""

    _is_last = False  # nothing is read behind the present request
    _num_head_bytes = 0  # of a head that isn't whole; or of what follows a body but ends nothing

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            return
        self._num_head_bytes += len(data)
        super().data_received(data)
        is_over = self._is_last or self.transport.is_closing()
        if self._num_head_bytes > MAX_HEAD_BYTES and not is_over:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._refuse(status, f"expected at most {MAX_HEAD_BYTES} bytes of headers, got more")

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()

    def on_message_begin(self) -> None:
        if self._is_answering:
            raise _SentAhead  # the parser stops, and `send_400_response` is called
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        scope: Any = self.scope
        if self.cycle is not before and scope["method"] != "HEAD":  # and its task has not run yet
            scope["extensions"] = {WRITE: BodyWriter(self, self.cycle)}

    def eof_received(self) -> None:
        """The client has left. A close would wait until it has taken what it may never take."""
        if self._is_answering:
            self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """To bytes that are no HTTP; those behind a request only end the connection after it."""
        if self._is_answering and (self.cycle.response_started or not self.cycle.more_body):
            self._is_last = True
            self.cycle.keep_alive = False
            return
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Whatever else the client has to say."""
        body = encode(http_error_body(status, message))
        head = STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\n"
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self.transport.close()
