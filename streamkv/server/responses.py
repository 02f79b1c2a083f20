"""POST /v1/responses: a response as JSON, or as server-sent events.

Owns the HTTP face, and `open_response`, with which both faces begin. Knows nothing of lanes and
of earlier responses: nothing outlives a request here, so `previous_response_id` works only on
the socket. Invariant: the JSON answer is the last event's response, the stream collected.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from ..engine.stream import TokenStream
from .metrics import metrics_of, observed
from .request_fields import limit_tokens
from .response_events import ResponseBuilder, response_events
from .response_history import previous_response_not_found
from .response_object import Response
from .response_request import NOT_HONOURED, ResponseRequest, TemplateMessage, own_field_names
from .sse import EventStream, cancel_on_disconnect, event_frame
from .wire import json_response, read_body, ready_engine

_decoder = msgspec.json.Decoder(ResponseRequest)


class OpenedResponse(NamedTuple):
    """A checked request: enter `source`, and `builder` makes the events of its deltas."""

    conversation: list[TemplateMessage]  # what a next turn goes on from
    stream: TokenStream  # to cancel it
    source: AbstractAsyncContextManager[TokenStream]  # admits the stream, and observes it
    builder: ResponseBuilder


async def open_response(
    connection: HTTPConnection,
    body: ResponseRequest,
    *,
    previous: Sequence[TemplateMessage] = (),
    stream_id: str | None = None,
) -> OpenedResponse:
    """Check a request and encode its prompt. InvalidRequestError names the field at fault."""
    engine = ready_engine(connection)
    body.check()
    sampling = body.sampling_params(engine.sampling_defaults)
    conversation = body.conversation(previous, engine.info)
    with own_field_names():
        prompt = await engine.encode_chat(body.prompt(conversation))
    response = body.to_response(body.model or engine.model_ids[0], sampling)
    stream = engine.generate(
        prompt,
        limit_tokens(sampling, engine, len(prompt)),
        request_id=response.id,
        **body.for_engine(connection),
    )
    builder = ResponseBuilder(response, stream_id=stream_id)
    source = _admitted(observed(metrics_of(connection), stream))
    return OpenedResponse(conversation, stream, source, builder)


@asynccontextmanager
async def _admitted(
    source: AbstractAsyncContextManager[TokenStream],
) -> AsyncIterator[TokenStream]:
    with own_field_names():
        async with source as stream:
            yield stream


async def create_response(request: Request) -> ASGIApp:
    body = await read_body(request, _decoder, not_honoured=NOT_HONOURED)
    if body.previous_response_id is not None:
        raise previous_response_not_found(
            body.previous_response_id,
            "over HTTP no response is kept; send the whole conversation as input, or use the "
            "WebSocket at this path",
        )
    opened = await open_response(request, body)
    if body.stream:
        return EventStream(opened.source, lambda stream: _frames(stream, opened.builder))
    async with opened.source as stream, cancel_on_disconnect(request.receive, stream):
        return json_response(await _collect(stream, opened.builder))


async def _frames(stream: TokenStream, builder: ResponseBuilder) -> AsyncIterator[bytes]:
    async for events in response_events(stream, builder):
        for event in events:
            yield event_frame(event.event_type, event)


async def _collect(stream: TokenStream, builder: ResponseBuilder) -> Response:
    builder.begin()
    async for delta in stream:
        builder.push(delta, stream.usage)
    return builder.response


routes: list[BaseRoute] = [Route("/v1/responses", create_response, methods=["POST"])]
