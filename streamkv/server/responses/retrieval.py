"""/v1/responses/{id}: responses that were made before, read, cancelled and deleted; their input's
items; and the tokens that an input would take.

Owns these endpoints. Knows the store, and answers that run by their ids. Invariant: an id that is
unknown, gone, or another key's is one and the same 404.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec import Struct, structs
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from ...errors import GoneError, InvalidRequestError, NotFoundError
from ..answer import Answer, Generation
from ..answers import answers_of
from ..sse import event_number, frame, last_event_id, resume_answer
from ..wire import json_response, read_body, renaming_fields
from .input import off_loop
from .items import ItemBody, item_body
from .object import Response
from .opening import ask
from .replay import replay
from .request import HTTP_ADVICE, HTTP_NOT_HONOURED, ResponseRequest
from .store import Record, shelves_of, store_of

CANCEL_S = 1.0  # a response whose reader is slow ends when that has read
MAX_ITEMS = 100
NUM_ITEMS = 20
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

_decoder = msgspec.json.Decoder(ResponseRequest)


class Deleted(Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ItemBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Struct, frozen=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


def _record(request: Request) -> Record:
    return shelves_of(request).get(request.path_params["id"])


# --- the response -----------------------------------------------------------------------------


async def get_response(request: Request) -> ASGIApp:
    record, query = _record(request), request.query_params
    if not _flag(query, "stream"):
        return json_response(record.response)
    after = last_event_id(request, "starting_after")
    answer = _answer_with_log(request, record)
    if answer is not None:
        with renaming_fields({"after": "starting_after"}):
            return resume_answer(answer, request, -1 if after is None else after)
    if not record.has_ended:
        raise NotFoundError(
            f"{record.id}: its events are not kept; create it with background: true, or stream it "
            'with stream_options {"resumable": true}',
            code="not_resumable",
        )
    if after is not None:
        raise GoneError(
            f"{record.id}: its events were not kept, or were dropped; ask without starting_after "
            "for all of it anew",
            code="events_dropped",
        )
    frames = _frames(record.response)
    return StreamingResponse(frames, media_type="text/event-stream", headers=_HEADERS)


def _answer_with_log(request: Request, record: Record) -> Answer | None:
    try:
        return answers_of(request).find_answer(request, record.id, exact=True)
    except NotFoundError:
        return None


def _frames(response: Response) -> Iterator[bytes]:
    for number, event in enumerate(replay(response)):
        yield frame(number, event)


async def delete_response(request: Request) -> ASGIApp:
    record = _record(request)
    if not record.has_ended:
        await _cancel(request, record)
    store_of(request).remove(record.owner, record.id)
    answers_of(request).forget(record.owner, record.id)
    return json_response(Deleted(record.id))


async def cancel_response(request: Request) -> ASGIApp:
    """Idempotent; what has ended stays as it is."""
    record = _record(request)
    if not record.has_ended:
        await _cancel(request, record)
    response = record.response
    if not record.has_ended:
        response = structs.replace(response, status="cancelled")
    return json_response(response)


async def _cancel(request: Request, record: Record) -> None:
    """End it, and wait for that, unless somebody takes too long to read it."""
    running = answers_of(request).find(request, record.id, exact=True)
    if not isinstance(running, Generation):
        return
    ended = asyncio.Event()
    running.on_ended(ended.set)
    running.cancel()
    try:
        async with asyncio.timeout(CANCEL_S):
            await ended.wait()
    except TimeoutError:
        pass


# --- what it was made from --------------------------------------------------------------------


async def list_input_items(request: Request) -> ASGIApp:
    """All items that the response was made from, those of the responses before it included."""
    record, query = _record(request), request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order: expected asc or desc, got {order!r:.100}", param="order")
    limit = event_number(query.get("limit", str(NUM_ITEMS)), "limit")
    if not 1 <= limit <= MAX_ITEMS:
        raise InvalidRequestError(f"limit: expected 1 to {MAX_ITEMS}, got {limit}", param="limit")
    listed = await off_loop(record.turn.num_items, lambda: _page(record, query, order, limit))
    return json_response(listed)


def _page(record: Record, query: QueryParams, order: str, limit: int) -> ItemList:
    items = record.turn.before()
    if order == "desc":
        items.reverse()
    ids = [item_id for item_id, _ in items]
    start = _place(ids, query, "after") + 1 if "after" in query else 0
    end = _place(ids, query, "before") if "before" in query else len(items)
    page = items[start : min(end, start + limit)]
    return ItemList(
        data=[item_body(item, item_id) for item_id, item in page],
        first_id=page[0][0] if page else None,
        last_id=page[-1][0] if page else None,
        has_more=start + limit < end,
    )


def _place(ids: list[str], query: QueryParams, name: str) -> int:
    wanted = query[name]
    if wanted not in ids:
        raise InvalidRequestError(
            f"{name}: expected the id of an item of this list, got {wanted!r:.300}", param=name
        )
    return ids.index(wanted)


async def count_input_tokens(request: Request) -> ASGIApp:
    """How many tokens a response of the same input would read."""
    body = await read_body(request, _decoder, not_honoured=HTTP_NOT_HONOURED, advice=HTTP_ADVICE)
    asked = await ask(request, body, shelves_of(request))
    with body.own_field_names():
        prompt = await asked.prompt()
    return json_response(InputTokens(len(prompt)))


def _flag(query: QueryParams, name: str) -> bool:
    text = query.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"{name}: expected true or false, got {text!r:.100}", param=name)
    return text in ("true", "1")


routes: list[BaseRoute] = [
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{id}", get_response, methods=["GET"]),
    Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", list_input_items, methods=["GET"]),
]
