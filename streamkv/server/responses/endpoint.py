"""POST /v1/responses: a response as JSON, as server-sent events, or in the background.

Owns the HTTP face of making responses; knows nothing of lanes. Invariant: the JSON answer is the
last event's response, the stream collected. One in the background goes on whoever leaves.
"""

from __future__ import annotations

import math

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from ...errors import InvalidRequestError
from ..answer import OnDisconnect, Policy
from ..answers import answers_of
from ..ids import RESPONSE
from ..sse import REQUEST_ID, collect_answer, last_event_id, resume_answer, stream_answer
from ..streams import policy_of, request_name
from ..wire import json_response, read_body
from .object import response_id_of
from .opening import OpenedResponse, ask, open_response
from .request import HTTP_ADVICE, HTTP_NOT_HONOURED, ResponseRequest
from .store import shelves_of, store_of

IN_BACKGROUND = Policy(True, OnDisconnect.CONTINUE, math.inf)

_decoder = msgspec.json.Decoder(ResponseRequest)


async def create_response(request: Request) -> ASGIApp:
    body = await read_body(request, _decoder, not_honoured=HTTP_NOT_HONOURED, advice=HTTP_ADVICE)
    _check(request, body)
    streams = bool(body.stream)
    body.request_id = request_name(request, RESPONSE, body.request_id, streams=streams)
    after = last_event_id(request)
    if after is not None:  # the same request again, to go on with what came of it
        response_id = response_id_of(body.request_id)
        answer = answers_of(request).find_answer(request, response_id, exact=True)
        return resume_answer(answer, request, after)
    shelves, store = shelves_of(request), store_of(request)
    asked = await ask(request, body, shelves)
    is_stored = store.takes(asked.turn, body.store, background=bool(body.background))
    opened = await open_response(request, asked, shelves, store if is_stored else None)
    try:
        return await _answer(request, opened)
    except BaseException:
        opened.abandon()
        raise


def _check(request: Request, body: ResponseRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options: only allowed with stream: true; leave it out", param="stream_options"
        )
    if body.background_options is not None and not body.background:
        raise InvalidRequestError(
            "background_options: only allowed with background: true; leave it out",
            param="background_options",
        )
    if body.background:
        _check_background(request, body)


def _check_background(request: Request, body: ResponseRequest) -> None:
    """It goes on whoever leaves, and its client comes back for it."""
    if body.on_disconnect not in (None, OnDisconnect.CONTINUE):
        raise InvalidRequestError(
            f"on_disconnect: expected 'continue' with background, got '{body.on_disconnect}'; "
            "leave it out",
            param="on_disconnect",
        )
    if body.stream_options is not None and body.stream_options.resumable is False:
        raise InvalidRequestError(
            "stream_options.resumable: expected true with background; leave it out",
            param="stream_options.resumable",
        )
    if not store_of(request).is_on:
        raise InvalidRequestError(
            "background: this server stores no responses (--response-store-mib 0), so nobody could "
            "come back for it; leave it out",
            param="background",
            code="unsupported",
        )


async def _answer(request: Request, opened: OpenedResponse) -> ASGIApp:
    """Let it begin, and answer with it."""
    body, writer, response_id = opened.asked.body, opened.writer, opened.record.id
    if body.background and not body.stream:
        answer = answers_of(request).new(request, response_id, writer, IN_BACKGROUND)
        await answer.start([opened.source])
        return json_response(opened.record.response, headers={REQUEST_ID: response_id})
    options = body.stream_options
    policy = IN_BACKGROUND
    if not body.background:
        resumable = None if options is None else options.resumable
        streams = bool(body.stream)
        policy = policy_of(request, body.on_disconnect, resumable, streams=streams)
    if body.stream:
        return await stream_answer(request, response_id, [opened.source], writer, policy=policy)
    return await collect_answer(
        request, response_id, [opened.source], opened.collect, policy=policy
    )


routes: list[BaseRoute] = [Route("/v1/responses", create_response, methods=["POST"])]
