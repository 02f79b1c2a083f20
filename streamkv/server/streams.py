"""GET /v1/streams/{id}: a stream that was cut, from where it was. GET and DELETE
/v1/requests/{id}: what came of a request so far, and its end.

Owns these three answers, and the policy that a request's fields ask for. Knows nothing about any
endpoint that generates. Invariant: an id that is unknown, gone, or another key's is one and the
same 404.
"""

from __future__ import annotations

from starlette.requests import HTTPConnection, Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from ..errors import InvalidRequestError
from .answer import PLAIN, OnDisconnect, Policy
from .answers import Ended, answers_of, result_of
from .sse import last_event_id, resume_answer
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
        raise InvalidRequestError(
            "on_disconnect: expected 'abort' or 'continue', got 'pause', which is for resumable "
            "streams: nobody could go on reading this answer",
            param="on_disconnect",
        )
    if resumable is None:
        resumable = chosen is not OnDisconnect.ABORT
    return Policy(resumable and streams, chosen, window_s)


async def get_stream(request: Request) -> ASGIApp:
    answer_id = request.path_params["id"]
    answer = answers_of(request).find_answer(request, answer_id)
    after = last_event_id(request, "after")
    return resume_answer(answer, request, -1 if after is None else after)


async def get_request(request: Request) -> ASGIApp:
    found = answers_of(request).find(request, request.path_params["id"])
    return json_response(found.result if isinstance(found, Ended) else result_of(found))


async def cancel_request(request: Request) -> ASGIApp:
    found = answers_of(request).find(request, request.path_params["id"])
    if isinstance(found, Ended):
        return json_response(found.result)
    found.cancel()
    return json_response(result_of(found))


routes: list[BaseRoute] = [
    Route("/v1/streams/{id}", get_stream, methods=["GET"]),
    Route("/v1/requests/{id}", get_request, methods=["GET"]),
    Route("/v1/requests/{id}", cancel_request, methods=["DELETE"]),
]
