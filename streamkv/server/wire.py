"""What all endpoints share on the wire: body reading and the one error map.

Owns how bytes become Structs (limits of size and nesting, the path of a bad field as `param`) and
how exceptions become statuses and OpenAI error bodies. Knows nothing about any one endpoint.
Invariant: JSON is read and written by msgspec codecs only, and no number on the wire is NaN or
infinite. A field we know but don't honour is an InvalidRequestError, never ignored; a field we
don't know is skipped.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..config import ServerConfig
from ..engine.async_engine import AsyncEngine, EngineStatus
from ..engine.stream import TokenStream
from ..errors import (
    AuthenticationError,
    EngineDeadError,
    EngineNotReadyError,
    ForbiddenError,
    GenerationError,
    GoneError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    StreamkvError,
)
from .bounds import bounded, fields_decoder, uncollected
from .faults import validation_error

T = TypeVar("T")

MIN_LOGPROB = -9999.0  # stands for -inf, which JSON can't say
NOT_READY_RETRY_AFTER_S = 2

_BODY_PIECE_BYTES = 1 << 20

encode = msgspec.json.Encoder().encode


# --- errors -----------------------------------------------------------------------------------


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object, also the payload of an error event inside a stream."""

    error: ErrorDetail


# exception -> (status, OpenAI's error type, default code); the first match in the class's MRO.
_ERRORS: dict[type[BaseException], tuple[int, str, str | None]] = {
    InvalidRequestError: (400, "invalid_request_error", None),
    PayloadTooLargeError: (413, "invalid_request_error", "payload_too_large"),
    AuthenticationError: (401, "authentication_error", "invalid_api_key"),
    ForbiddenError: (403, "permission_error", "forbidden"),
    GoneError: (410, "gone_error", "gone"),
    NotFoundError: (404, "not_found_error", "not_found"),
    OverloadedError: (429, "rate_limit_error", "overloaded"),
    EngineNotReadyError: (503, "service_unavailable_error", "engine_not_ready"),
    EngineDeadError: (503, "service_unavailable_error", "engine_dead"),
    GenerationError: (500, "server_error", "generation_failed"),
    StreamkvError: (500, "server_error", None),
    BaseException: (500, "server_error", "internal_error"),
}


def _entry(exc: BaseException) -> tuple[int, str, str | None]:
    return next(_ERRORS[cls] for cls in type(exc).__mro__ if cls in _ERRORS)


def status_of(exc: BaseException) -> int:
    """The HTTP status of an exception; 500 for what streamkv didn't raise on purpose."""
    return _entry(exc)[0]


def error_body(exc: BaseException) -> ErrorBody:
    """The OpenAI error body of an exception; foreign exceptions don't show their text."""
    _, kind, code = _entry(exc)
    if isinstance(exc, StreamkvError):
        return ErrorBody(ErrorDetail(exc.message, kind, exc.param, exc.code or code))
    message = "the server failed on this request; its log has the details"
    return ErrorBody(ErrorDetail(message, kind, None, code))


def http_error_body(status: int, detail: str) -> ErrorBody:
    """The same shape for a status that no exception of ours stands for (404, 405, ...)."""
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return ErrorBody(ErrorDetail(detail, kind, None, code))


def error_response(exc: BaseException) -> Response:
    """The whole HTTP answer to an exception, Retry-After and WWW-Authenticate included."""
    headers: dict[str, str] = {}
    if isinstance(exc, OverloadedError):
        headers["retry-after"] = str(max(1, exc.retry_after_s))
    elif isinstance(exc, (EngineNotReadyError, EngineDeadError)):
        headers["retry-after"] = str(NOT_READY_RETRY_AFTER_S)
    elif isinstance(exc, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    elif isinstance(exc, PayloadTooLargeError):
        headers["connection"] = "close"  # the rest of the body is not worth reading
    elif not isinstance(exc, StreamkvError):
        headers["connection"] = "close"  # the server closes it once it has logged the traceback
    return json_response(error_body(exc), status_of(exc), headers)


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """`content` (a Struct) as a JSON answer."""
    return _PiecewiseResponse(encode(content), status, headers, media_type="application/json")


class _PiecewiseResponse(Response):
    """A large body goes out as the client takes it: written in one go, it would be copied twice
    while the event loop stands still, and then wait in memory."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= _BODY_PIECE_BYTES:
            return await super().__call__(scope, receive, send)
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        for begin in range(0, len(self.body), _BODY_PIECE_BYTES):
            end = begin + _BODY_PIECE_BYTES
            piece = bytes(self.body[begin:end])
            more = end < len(self.body)
            await send({"type": "http.response.body", "body": piece, "more_body": more})


# --- reading ----------------------------------------------------------------------------------

_FAULT = re.compile(r"\(byte (\d+)\)")
_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_ESCAPE_LEN = 16  # a pair of escapes and what may close the document after one
_MAX_OFF_BYTES = 256  # no value that means "off" is written longer

NotHonoured = Mapping[str, tuple[Any, ...]]
"""Field name -> the values that mean "off"; null always does. Any other value is a 400."""

Advice = Mapping[str, str]
"""Field name -> what to do instead of sending it, where that is more than to leave it out."""


async def read_body(
    request: Request,
    decoder: msgspec.json.Decoder[T],
    *,
    not_honoured: NotHonoured | None = None,
    advice: Advice | None = None,
) -> T:
    """The request's body as a Struct; InvalidRequestError or PayloadTooLargeError otherwise."""
    limit = server_config(request).max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise _too_large(limit)
    return decode_body(bytes(data), decoder, not_honoured=not_honoured, advice=advice)


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"body: expected at most {limit} bytes; send less")


def decode_body(
    data: bytes | str,
    decoder: msgspec.json.Decoder[T],
    *,
    not_honoured: NotHonoured | None = None,
    advice: Advice | None = None,
) -> T:
    """A JSON document as a Struct; InvalidRequestError names the field at fault as `param`."""
    document = data
    try:
        if isinstance(data, bytes) and not data.isascii():
            data.decode()  # what is skipped, or kept as it is, would not be looked at
        document = bounded(data, decoder.type)
        with uncollected(len(data)):
            body = decoder.decode(document)
        if not_honoured:
            _check_not_honoured(data, not_honoured, advice or {})
    except msgspec.ValidationError as exc:
        raise validation_error(str(exc), document, decoder.type) from None
    except (msgspec.DecodeError, UnicodeError) as exc:
        raise _decode_error(document, str(exc)) from None
    except RecursionError:
        raise InvalidRequestError("body: nested too deeply; send a flatter document") from None
    return body


def _decode_error(data: bytes | str, reason: str) -> InvalidRequestError:
    # Half a pair is called by many names, some misleading; it stands just before the fault.
    found = _FAULT.search(reason)
    data = data.encode(errors="replace") if isinstance(data, str) else data
    end = int(found[1]) if found else len(data)
    fault = data[max(end - _ESCAPE_LEN, 0) : end]
    if "surrogate" in reason or (
        ("escape" in reason or "truncated" in reason) and _SURROGATE.search(fault)
    ):
        reason = "a string has a lone surrogate, half of a character written as two \\u escapes"
    return InvalidRequestError(f"body: expected JSON in UTF-8; {reason}")


def _check_not_honoured(data: bytes | str, not_honoured: NotHonoured, advice: Advice) -> None:
    fields = fields_decoder(tuple(not_honoured)).decode(data)
    for name, off_values in not_honoured.items():
        if not is_off(getattr(fields, name), off_values):
            remedy = advice.get(name, "leave it out")
            raise InvalidRequestError(
                f"{name}: not supported here; {remedy}", param=name, code="unsupported"
            )


def is_off(raw: msgspec.Raw, off_values: tuple[Any, ...], *, null: bool = True) -> bool:
    """Whether the JSON is one of these values, or null. What is long is not even decoded."""
    if len(raw) > _MAX_OFF_BYTES:
        return False
    value = msgspec.json.decode(raw)
    if value is None:
        return null
    return any(value == off and type(value) is type(off) for off in off_values)


# --- naming -----------------------------------------------------------------------------------


@contextmanager
def renaming_fields(names: Mapping[str, str]) -> Iterator[None]:
    """An error that names one of the engine's parameters names the client's field instead, as
    `names` says (`prompt` -> `messages`), in its message too."""
    try:
        yield
    except InvalidRequestError as exc:
        for name, field in names.items():
            # A name like max_tokens is never prose; one like "prompt" only begins a message.
            pattern = rf"\b{name}\b" if "_" in name else rf"^{name}(?=[:.\[])"
            exc.message = re.sub(pattern, field, exc.message)
        exc.args = (exc.message,)
        exc.param = names.get(exc.param or "", exc.param)
        raise


@asynccontextmanager
async def renaming_params(
    source: AbstractAsyncContextManager[TokenStream], names: Mapping[str, str]
) -> AsyncIterator[TokenStream]:
    """Enter `source`, with `renaming_fields` for what goes wrong until it is entered."""
    async with AsyncExitStack() as stack:
        with renaming_fields(names):
            stream = await stack.enter_async_context(source)
        yield stream


def json_logprob(value: float) -> float:
    """A log probability that JSON can carry: -inf and NaN become MIN_LOGPROB."""
    return value if value > MIN_LOGPROB else MIN_LOGPROB


# --- the application's objects ----------------------------------------------------------------


def server_config(request: HTTPConnection) -> ServerConfig:
    config: ServerConfig = request.app.state.config
    return config


def engine_of(request: HTTPConnection) -> AsyncEngine:
    """The engine, whatever its state."""
    engine: AsyncEngine = request.app.state.engine
    return engine


def ready_engine(request: HTTPConnection) -> AsyncEngine:
    """The engine once it serves; EngineNotReadyError or EngineDeadError before and after."""
    engine = engine_of(request)
    if engine.status is EngineStatus.LOADING:
        raise EngineNotReadyError(f"the model is loading ({engine.status_detail}); try again soon")
    if engine.status is not EngineStatus.READY:
        raise EngineDeadError(f"the engine is {engine.status}: {engine.status_detail}")
    return engine
