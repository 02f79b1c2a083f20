"""GET /v1/streams/{id}: a stream that was cut, from where it was. GET and DELETE
/v1/requests/{id}: what came of a request so far, and its end.

Owns these three answers, the name that a request has, and the policy that its fields ask for. Knows
nothing about any endpoint that generates. Invariant: an id that is unknown, gone, or another key's
is one and the same 404.
"""

from __future__ import annotations

import re

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from ..errors import InvalidRequestError
from .answer import PLAIN, OnDisconnect, Policy
from .answers import Ended, answers_of, result_of
from .generation import Generation
from .ids import answer_id_of
from .request_fields import MAX_REQUEST_ID_LEN, REQUEST_ID_PATTERN
from .sse import REQUEST_ID, last_event_id, resume_answer
from .wire import json_response


def policy_of(
    connection: HTTPConnection,
    on_disconnect: str | None,
    resumable: bool | None,
    *,
    streams: bool = True,
    default: OnDisconnect = OnDisconnect.ABORT,
) -> Policy:
    """How an answer deals with the loss of its reader, by the request's fields `on_disconnect` and
    `stream_options.resumable`. A resumable one goes on by itself unless told otherwise, and one
    that goes on is resumable. `default` is what holds where neither was said. InvalidRequestError.
    """
    window_s = answers_of(connection).window_s
    if on_disconnect is None:
        chosen = OnDisconnect.CONTINUE if resumable else default
    else:
        chosen = OnDisconnect(on_disconnect)
    is_asked_for = bool(on_disconnect or resumable)
    if not window_s:
        if is_asked_for and chosen is not OnDisconnect.ABORT:
            raise InvalidRequestError(
                f"{'on_disconnect' if on_disconnect else 'stream_options.resumable'}: this server "
                "keeps no answer whose reader is gone (--resume-window 0); leave it out",
                param="on_disconnect" if on_disconnect else "stream_options.resumable",
            )
        return PLAIN
    if chosen is OnDisconnect.PAUSE and (not streams or resumable is False):
        needed = "stream_options.resumable: true" if streams else "stream: true"
        raise InvalidRequestError(
            "on_disconnect: expected 'abort' or 'continue', got 'pause', which is only for "
            f"{needed}: nobody could go on reading this answer",
            param="on_disconnect",
        )
    if resumable is None:
        resumable = chosen is not OnDisconnect.ABORT
    return Policy(resumable and streams, chosen, window_s)


def request_name(
    connection: HTTPConnection, prefix: str, request_id: str | None, *, streams: bool
) -> str | None:
    """What the client calls its request: in the body, or else in the header X-Request-Id. That
    one, which proxies write and services hand on, is passed over where it can't be an id or is in
    use. A request that shows the last event it got goes on with one that is known: it must stream
    too, and name that one. InvalidRequestError."""
    resumes = last_event_id(connection) is not None
    if resumes and not streams:
        raise InvalidRequestError(
            "Last-Event-ID: only allowed with stream: true, as what follows is a stream; leave the "
            "header out",
            param="Last-Event-ID",
        )
    if request_id is not None:
        return request_id
    name = connection.headers.get(REQUEST_ID, "")
    is_fit = len(name) <= MAX_REQUEST_ID_LEN and re.match(REQUEST_ID_PATTERN, name) is not None
    if is_fit and (resumes or answers_of(connection).is_free(connection, prefix + name)):
        return name
    if resumes:
        raise InvalidRequestError(
            "request_id: expected that of the request to go on with beside the header "
            "Last-Event-ID, got none; send both or neither",
            param="request_id",
        )
    return None


def new_answer_id(
    connection: HTTPConnection, prefix: str, request_id: str | None, *, streams: bool
) -> str:
    """The id of a request's answer, by its `request_name`."""
    return answer_id_of(prefix, request_name(connection, prefix, request_id, streams=streams))


async def get_stream(request: Request) -> ASGIApp:
    answer_id = request.path_params["id"]
    answer = answers_of(request).find_answer(request, answer_id)
    after = last_event_id(request, "after")
    return resume_answer(answer, request, -1 if after is None else after)


async def get_request(request: Request) -> ASGIApp:
    found = answers_of(request).find(request, request.path_params["id"])
    return await _result_response(found)


async def cancel_request(request: Request) -> ASGIApp:
    found = answers_of(request).find(request, request.path_params["id"])
    if isinstance(found, Generation):
        found.cancel()
    return await _result_response(found)


async def _result_response(found: Generation | Ended) -> Response:
    """What came of it. One that is cancelled gets no more tokens, but more prompts while they are
    admitted: its counts are those at its end."""
    if isinstance(found, Ended):
        return json_response(found.result)
    if found.is_cancelled:
        await found.wait_settled()
    return json_response(result_of(found))


routes: list[BaseRoute] = [
    Route("/v1/streams/{id}", get_stream, methods=["GET"]),
    Route("/v1/requests/{id}", get_request, methods=["GET"]),
    Route("/v1/requests/{id}", cancel_request, methods=["DELETE"]),
]
