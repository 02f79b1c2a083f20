"""A scripted stand-in for the server, so that a test decides what the chat page hears, and when.

Owns a uvicorn server in a thread, with the page as the real server sends it and a socket at
/v1/responses, whose answers go on when it is cut. Knows nothing of an engine. Invariant: every
event it sends, and every `response.create` it takes, is valid by the official `openai` package's
types.
"""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from typing import Any

import uvicorn
from openai.types.responses.responses_client_event import ResponseCreate
from openai.types.responses.responses_server_event import ResponsesServerEvent
from playwright.sync_api import Page
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from streamkv.server.page import find_folder, page_routes

DEADLINE_S = 20.0
MODEL = "tiny-model"
KEY_SUBPROTOCOL = "openai-insecure-api-key."

_SERVER_EVENT: TypeAdapter[ResponsesServerEvent] = TypeAdapter(ResponsesServerEvent)


class Step(Enum):
    """What a script does between its texts."""

    HOLD = auto()  # waits for release() or a cancel
    DROP = auto()  # closes the socket; what follows waits for response.resume
    LENGTH = auto()  # ends at the token limit
    FAIL = auto()  # response.failed
    REFUSE = auto()  # an error event


Script = list["str | Step"]
OpenPage = Callable[..., Page]  # the fixture of tests/web/conftest.py


class ScriptedServer:
    """Set `script` and what follows it in `reset` from the test; read `received`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._released: asyncio.Event
        self._answers: dict[str, _Answer] = {}
        self.url = ""
        self.reset()

    def reset(self) -> None:
        self.script: Script = ["Hello."]
        self.health: tuple[int, dict[str, str]] = (200, {"status": "ok"})
        self.key = ""
        self.down = False  # /health answers 500
        self.num_deaf = 0  # so many times a response.create is lost, and its socket with it
        self.received: queue.Queue[dict[str, Any]] = queue.Queue()
        self.forget()

    def forget(self) -> None:
        """As if it had been started anew."""
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            self._loop.call_soon_threadsafe(answer.task.cancel)

    def next_event(self, event_type: str) -> dict[str, Any]:
        """The next event the page sent, which must be of this type."""
        event = self.received.get(timeout=DEADLINE_S)
        assert event["type"] == event_type, event
        return event

    def release(self) -> None:
        """Lets a script at HOLD go on."""
        self._loop.call_soon_threadsafe(self._released.set)

    @contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        listener = socket.create_server(("127.0.0.1", 0))  # takes connections from here on
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self._app(), log_level="error", ws="websockets-sansio", lifespan="off"
        )
        server = uvicorn.Server(config)

        async def serve() -> None:
            self._loop, self._released = asyncio.get_running_loop(), asyncio.Event()
            await server.serve(sockets=[listener])

        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="scripted-server")
        thread.start()
        try:
            yield self
        finally:
            server.should_exit = server.force_exit = True
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "the server did not stop"

    def _app(self) -> Starlette:
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/requests/{id}", self._cancel, methods=["DELETE"]),
            WebSocketRoute("/v1/responses", self._socket),
            *page_routes(find_folder()),
        ]
        return Starlette(routes=routes)

    async def _health(self, request: Request) -> Response:
        status, body = (500, {"status": "down"}) if self.down else self.health
        return JSONResponse(body, status)

    async def _models(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            error = {"message": "wrong API key", "type": "invalid_request_error"}
            return JSONResponse({"error": error}, 401)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _socket(self, websocket: WebSocket) -> None:
        offered = websocket.scope["subprotocols"]
        if self.key and KEY_SUBPROTOCOL + self.key not in offered:
            return await websocket.close()
        plain = [name for name in offered if not name.startswith(KEY_SUBPROTOCOL)]
        await websocket.accept(subprotocol=plain[0] if plain else None)
        with suppress(WebSocketDisconnect, RuntimeError):  # RuntimeError: a script's DROP closed it
            while True:
                event = await websocket.receive_json()
                self.received.put(event)
                await self._handle(websocket, event)

    async def _handle(self, websocket: WebSocket, event: dict[str, Any]) -> None:
        if event["type"] == "response.create":
            ResponseCreate.model_validate(event)
            if self.num_deaf:
                self.num_deaf -= 1
                return await websocket.close(1012)
            answer = _Answer(websocket, event["stream_id"], event["request_id"])
            self._answers[answer.response_id] = answer
            answer.task = asyncio.create_task(self._play(answer))
        elif event["type"] == "response.resume":
            found = self._answers.get(event["response_id"])
            if found is None:
                return await _refuse(websocket, event["stream_id"])
            found.read_on(websocket, event["stream_id"], event["starting_after"])
            await found.flush()
        else:
            self._answers[f"resp_{event['stream_id']}"].task.cancel()

    async def _cancel(self, request: Request) -> Response:
        self.received.put({"type": "DELETE", "id": request.path_params["id"]})
        self._answers[request.path_params["id"]].task.cancel()
        return JSONResponse({})

    async def _play(self, answer: _Answer) -> None:
        await answer.event("response.created", response=answer.response("in_progress"))
        try:
            for step in list(self.script):
                if isinstance(step, str):
                    await answer.delta(step)
                elif step is Step.HOLD:
                    await self._released.wait()
                    self._released.clear()
                elif step is Step.DROP:
                    await answer.drop()
                else:
                    return await answer.end(step)
        except asyncio.CancelledError:
            if self._answers.get(answer.response_id) is not answer:
                return
            cancelled = answer.response("cancelled")
            return await answer.event("response.incomplete", response=cancelled)
        await answer.event("response.completed", response=answer.response("completed"))


async def _refuse(websocket: WebSocket, stream_id: str) -> None:
    error = {"type": "invalid_request_error", "code": "request_not_found", "message": "not here"}
    event = {"type": "error", "status": 404, "error": error, "stream_id": stream_id}
    _SERVER_EVENT.validate_python(event)
    await websocket.send_text(json.dumps(event))


class _Answer:
    """One response on its way to the page, over one socket or the next."""

    task: asyncio.Task[None]

    def __init__(self, websocket: WebSocket, stream_id: str, request_id: str) -> None:
        self.response_id = f"resp_{request_id}"
        self.websocket = websocket
        self.stream_id = stream_id
        self._events: list[dict[str, Any]] = []
        self._num_sent = 0
        self._num_tokens = 0
        self._turn = asyncio.Lock()
        self._resumed = asyncio.Event()

    def read_on(self, websocket: WebSocket, stream_id: str, after: int) -> None:
        self.websocket, self.stream_id, self._num_sent = websocket, stream_id, after + 1
        self._resumed.set()

    async def drop(self) -> None:
        self._resumed.clear()
        await self.websocket.close(1012, "the server restarts")
        await self._resumed.wait()

    async def flush(self) -> None:
        """Send what there is, if somebody reads it."""
        async with self._turn:
            while (
                self._num_sent < len(self._events)
                and self.websocket.client_state is WebSocketState.CONNECTED
                and self.websocket.application_state is WebSocketState.CONNECTED
            ):
                event = self._events[self._num_sent] | {"stream_id": self.stream_id}
                self._num_sent += 1
                with suppress(WebSocketDisconnect):
                    await self.websocket.send_text(json.dumps(event))

    async def event(self, event_type: str, **fields: Any) -> None:
        envelope = {"sequence_number": len(self._events), "stream_id": self.stream_id}
        event = {"type": event_type, **envelope, **fields}
        _SERVER_EVENT.validate_python(event)
        self._events.append(event)
        await self.flush()

    async def delta(self, text: str) -> None:
        self._num_tokens += 1
        position = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        await self.event("response.output_text.delta", delta=text, logprobs=[], **position)

    async def end(self, step: Step) -> None:
        if step is Step.LENGTH:
            reason = {"reason": "max_output_tokens"}
            response = self.response("incomplete", incomplete_details=reason)
            await self.event("response.incomplete", response=response)
        elif step is Step.FAIL:
            error = {"code": "server_error", "message": "the device went away"}
            await self.event("response.failed", response=self.response("failed", error=error))
        else:
            error = {"type": "invalid_request_error", "code": "invalid_value", "param": "top_p"}
            error["message"] = "expected top_p in (0, 1]"
            await self.event("error", status=400, error=error)

    def response(self, status: str, **fields: Any) -> dict[str, Any]:
        usage = {
            "input_tokens": 40,
            "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 0},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 40 + self._num_tokens,
        }
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": 1,
            "status": status,
            "model": MODEL,
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": None if status == "in_progress" else usage,
            **fields,
        }
