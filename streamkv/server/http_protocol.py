"""uvicorn's HTTP protocol, whose requests offer a writer of their body.

Owns the framing of that body: in chunks over HTTP/1.1, until the connection is closed over
HTTP/1.0. Knows nothing about endpoints. Invariants:

- A connection has one request at a time. What a client sends behind one that is not answered yet
  is not taken: the connection ends with that answer, as RFC 9112 (9.3.2) allows. So reading goes
  on all the time, and a client that leaves is noticed whatever it has sent.
- What can't be parsed gets an answer of OpenAI's shape, and so does a head that is too long: what
  is read besides a body is bounded.
- A request that doesn't come ends its connection: a head has HEAD_S in all, a body STALL_S for each
  of its pieces.
- A connection goes on only behind a request that was read to its end. Otherwise its end comes in
  two steps (RFC 9112, 9.6): a connection that is closed with something unread is reset, which may
  take the answer with it. So the client is told that nothing more comes, and what it sends is read
  and thrown away until it closes too, or has had some seconds for that.
"""

from __future__ import annotations

import asyncio
import functools
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from ..errors import EngineDeadError
from .direct_write import WRITE, DirectWriter, WritersProtocol, batch_of, num_on_its_way
from .wire import error_response, http_error_body, json_response

MAX_HEAD_BYTES = 64 * 1024  # and what one read brings with its end
HEAD_S = 30.0  # from the connection, or from the first byte behind a request
STALL_S = 30.0  # between two pieces of a body
LINGER_S = 2.0  # for a client to close, once it has been sent everything
_ENDLESS_BYTES = 1 << 62


class _SentAhead(Exception):
    """A request came before the one before it was answered."""


class BodyWriter(DirectWriter):
    """The body of one HTTP answer whose head is sent by `send`: `begin`, the head, any number of
    pieces, `finish`, and an empty last piece by `send`."""

    def __init__(self, protocol: HttpProtocol, cycle: RequestResponseCycle) -> None:
        super().__init__(batch_of(protocol.config), protocol.transport)
        self._protocol = protocol
        self._cycle = cycle
        self._is_chunked = cycle.scope["http_version"] != "1.0"

    def begin(self) -> None:
        """The head comes next."""
        self._protocol.writer = self
        self._is_lost = self._cycle.disconnected
        self.is_writable = not self._cycle.flow.write_paused and not self._is_lost
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


def _http_error(status: HTTPStatus, message: str) -> Response:
    return json_response(http_error_body(status, message), status)


@functools.lru_cache(4096)
def _chunk_head(num: int) -> bytes:
    return b"%x\r\n" % num


class _Connection:
    """What a request and its answer have of the connection: how it ends is the protocol's, and
    nothing is written behind its end."""

    def __init__(self, protocol: HttpProtocol) -> None:
        self.close = protocol.end
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._protocol.is_over or self._protocol.transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._protocol.transport.write(data)


class HttpProtocol(WritersProtocol, HttpToolsProtocol):
    """uvicorn's, whose requests offer a BodyWriter."""

    is_over = False  # nothing more is sent
    _is_last = False  # nothing is read behind the present request
    _keeps_alive = False  # as the present request asks for, once it is whole
    _num_head_bytes = 0  # of a head that isn't whole; or of what follows a body but ends nothing
    _deadline: asyncio.TimerHandle | None = None  # of what the client has yet to send

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)
        if self.cycle is not None:
            self.cycle.transport = self.transport  # which knows nothing of this protocol now
            self.cycle.scope.pop("extensions", None)  # nor does anything in there

    def shutdown(self) -> None:
        """What isn't whole yet would only be refused once it is."""
        self._keeps_alive = False
        if self._is_awaited:
            error = EngineDeadError("the server is shutting down: send the request again")
            self._refuse(error_response(error))
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            return
        self._num_head_bytes += len(data)
        self._parse(data)
        if self._is_last or self.transport.is_closing():
            return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._reject(status, f"expected at most {MAX_HEAD_BYTES} bytes of headers, got more")
        elif self._is_answering:
            if self.cycle.more_body:
                self._wait_no_more()
                self._wait(STALL_S)
        elif self._num_head_bytes and self._deadline is None:
            self._wait(HEAD_S)

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self._ignores_upgrade:
                self._parse(self._without_upgrade() + data[upgrade.args[0] :])

    @property
    def _ignores_upgrade(self) -> bool:
        """Whether the client asks for a protocol besides HTTP that we don't speak. The parser then
        takes what follows for that protocol."""
        can_upgrade: bool = self.parser.should_upgrade()
        return can_upgrade and self.parser.get_method() != b"CONNECT" and not self._should_upgrade()

    def _without_upgrade(self) -> bytes:
        """The present head without that offer, for a parser that starts anew."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"", b""])

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._ignores_upgrade:
            return
        self._num_head_bytes = 0
        self._wait_no_more()
        if self._is_answering and not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
        super().on_message_complete()

    def on_message_begin(self) -> None:
        if self._is_answering:
            raise _SentAhead  # the parser stops, and `send_400_response` is called
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._ignores_upgrade:
            return  # it comes again
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # it doesn't know the answer
        before = self.cycle
        super().on_headers_complete()
        self._wait_no_more()
        scope: Any = self.scope
        if self.cycle is before:
            return  # it becomes a WebSocket
        self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
        self.cycle.transport = cast(asyncio.Transport, _Connection(self))
        if scope["method"] != "HEAD":  # and its task has not run yet
            scope["extensions"] = {WRITE: BodyWriter(self, self.cycle)}

    def eof_received(self) -> None:
        """The client has left. A close would wait until it has taken what it may never take."""
        if self._is_answering:
            self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_awaited(self) -> bool:
        """Whether some of a request has come, not all of it, and no answer has begun."""
        if self._is_last or self.transport.is_closing():
            return False
        if self._is_answering:
            return self.cycle.more_body and not self.cycle.response_started
        return self._num_head_bytes > 0

    def send_400_response(self, msg: str) -> None:
        self._reject(HTTPStatus.BAD_REQUEST, msg)

    def _reject(self, status: HTTPStatus, message: str) -> None:
        """Refuse what can't be read; behind a request it only ends the connection after it."""
        if self._is_answering and (self.cycle.response_started or not self.cycle.more_body):
            self._is_last = True
            self.cycle.keep_alive = False
            return
        self._refuse(_http_error(status, message))

    def _wait(self, limit_s: float) -> None:
        """For the client to send the rest of a head, or more of a body."""
        self._deadline = self.loop.call_later(limit_s, self._wait_in_vain)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _wait_in_vain(self) -> None:
        self._deadline = None
        if self._is_answering and self.cycle.response_started:
            return  # without what it did not wait for
        if self._is_answering or self._num_head_bytes:
            message = "expected the rest of the request, got nothing of it in time"
            return self._refuse(_http_error(HTTPStatus.REQUEST_TIMEOUT, message))
        self.transport.close()

    def _refuse(self, response: Response) -> None:
        """Answer with this, whatever else the client has to say."""
        headers = [*response.raw_headers, (b"connection", b"close")]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        head = STATUS_LINE[response.status_code] + lines
        self.transport.write(b"%b\r\n%b" % (head, bytes(response.body)))
        if self._is_answering:  # by this
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._is_last = True
        self.end()

    def end(self) -> None:
        """Nothing more is sent. If something may be unread, the client closes first. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        is_read = not (self._is_last or self.cycle.more_body)
        if is_read or self.transport.is_closing() or not self.transport.can_write_eof():
            return self.transport.close()
        self._is_last = True
        self.transport.write_eof()
        self.flow.resume_reading()
        self._linger()

    def _linger(self, num_unsent: int = 0, waited_s: float = 0.0) -> None:
        """Until the client has been sent everything, and some time to close. Of one that reads
        nothing for STALL_S nothing is read any more either."""
        self._wait_no_more()
        before, num_unsent = num_unsent, num_on_its_way(self.transport)
        waited_s = 0.0 if num_unsent < before else waited_s + LINGER_S
        if not num_unsent or waited_s > STALL_S:
            self._deadline = self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self._deadline = self.loop.call_later(LINGER_S, self._linger, num_unsent, waited_s)

    def timeout_keep_alive_handler(self) -> None:
        if not self.is_over:  # then the end has its own time
            super().timeout_keep_alive_handler()
