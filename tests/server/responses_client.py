"""How the tests of the Responses API talk to it, every event checked with the official models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

import pytest
from openai.types.responses import Response, ResponsesServerEvent, ResponseStreamEvent
from pydantic import TypeAdapter
from server.harness import DEADLINE_S, MODEL, Server
from websockets.asyncio.client import ClientConnection, connect

# The official sync client calls websockets in a way that a newer version warns about.
OWN_CLIENT_WARNING = pytest.mark.filterwarnings(r"ignore:connect\(\) must be:DeprecationWarning")
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SERVER_EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
ENDS = {"response.completed", "response.incomplete", "response.failed"}
TERMINAL = {*ENDS, "error"}
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


# --- HTTP -------------------------------------------------------------------------------------


def create(server: Server, **body: Any) -> Response:
    """The answer to a greedy request, strictly as the official model says."""
    with server.client() as client:
        request = {"model": MODEL, "input": "the quick brown fox", "temperature": 0} | body
        answer = client.post("/v1/responses", json=request)
    assert answer.status_code == 200, answer.text
    return Response.model_validate_json(answer.content, strict=True)


def sse_events(body: str) -> list[Any]:
    """All events, each checked against the official union, its `event:` and its `id:` line."""
    events = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        number, name, data = block.split("\n")
        event = STREAM_EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}"
        assert number == f"id: {event.sequence_number}"
        events.append(event)
    return events


def stream(server: Server, **body: Any) -> list[Any]:
    """The events of a greedy request."""
    request = {"model": MODEL, "input": "the quick brown fox", "temperature": 0} | body
    with server.client() as client:
        answer = client.post("/v1/responses", json=request | {"stream": True})
    assert answer.status_code == 200, answer.text
    return sse_events(answer.text)


def text_of(events: list[Any]) -> str:
    """What the deltas of these events tell."""
    return "".join(e.delta for e in events if e.type == "response.output_text.delta")


def assert_in_order(events: list[Any]) -> None:
    """One response's events: whole, in order, numbered without a gap, its text told alike."""
    assert [name for name, _ in groupby(event.type for event in events[:-1])] == ORDER
    assert events[-1].type in ENDS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = next(event for event in events if event.type == "response.output_text.done")
    assert text_of(events) == done.text == events[-1].response.output_text


def answer_text(server: Server, text: str, num: int = 8) -> str:
    """What the model answers to it."""
    prompt = server.chat_prompt({"role": "user", "content": text})
    return server.text(server.answer(prompt, num))


# --- WebSocket --------------------------------------------------------------------------------


class Socket:
    """A connection and what was received on it."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.events: list[Any] = []

    async def create(self, asked: Any, **fields: Any) -> None:
        """Ask for a greedy response of at most 8 tokens, unless told otherwise."""
        body = {"model": MODEL, "input": asked, "temperature": 0, "max_output_tokens": 8}
        await self.send({"type": "response.create"} | body | fields)

    async def send(self, message: dict[str, Any] | str | bytes) -> None:
        await self.connection.send(json.dumps(message) if isinstance(message, dict) else message)

    def send_together(self, *messages: dict[str, Any]) -> None:
        """In one segment, so that the last is there before the first is answered."""
        protocol = self.connection.protocol
        for message in messages:
            protocol.send_text(json.dumps(message).encode())
        self.connection.transport.write(b"".join(protocol.data_to_send()))

    async def receive(self) -> Any:
        data = await self.connection.recv()
        event = SERVER_EVENT.validate_json(data, strict=True)
        assert ("stream_id" in json.loads(data)) == (event.stream_id is not None)
        self.events.append(event)
        return event

    async def receive_until(self, *types: str, lane: str | None = None) -> Any:
        """The next event of one of these types in this lane."""
        while True:
            event = await self.receive()
            if event.type in types and event.stream_id == lane:
                return event

    async def finish(self, lane: str | None = None) -> Response:
        """The response whose end comes next in this lane."""
        event = await self.receive_until(*TERMINAL, lane=lane)
        assert event.type in ENDS, event
        response: Response = event.response
        return response

    async def error(self, lane: str | None = None) -> Any:
        event = await self.receive_until(*TERMINAL, lane=lane)
        assert event.type == "error", event
        return event

    def lane(self, name: str | None) -> list[Any]:
        return [event for event in self.events if event.stream_id == name]


@asynccontextmanager
async def connected(server: Server, **options: Any) -> AsyncIterator[Socket]:
    url = f"ws://{server.host}/v1/responses"
    # A client that stopped reading could not see the server's half of the closing handshake.
    options = {"max_queue": None} | options
    async with asyncio.timeout(DEADLINE_S):
        async with connect(url, compression=None, **options) as connection:
            yield Socket(connection)


def converse(server: Server, talk: Callable[[Socket], Awaitable[None]], **options: Any) -> Socket:
    """Have a conversation on a new connection."""

    async def run() -> Socket:
        async with connected(server, **options) as talking:
            await talk(talking)
            return talking

    return asyncio.run(run())
