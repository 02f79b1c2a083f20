"""The official client as it is: its sessions, its reconnection, its helpers, sync and async."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import openai
import pydantic
import pytest
from openai.lib.responses_websocket import (
    AsyncResponsesWebSocketSession,
    ResponsesWebSocketAccumulator,
    ResponsesWebSocketLimits,
    ResponsesWebSocketSession,
)
from openai.types.responses.responses_client_event import ResponseCreate
from server.harness import DEADLINE_S, MODEL, Server, fake_runner, serve
from server.responses_client import (
    ENDS,
    OWN_CLIENT_WARNING,
    SERVER_EVENT,
    answer_text,
    assert_in_order,
)
from server.test_responses_output import CALL, TOOL, saying

LIMITS = ResponsesWebSocketLimits(
    max_lanes=8,
    max_events_per_lane=1000,
    max_events=4000,
    max_bytes_per_lane=1 << 22,
    max_bytes=1 << 24,
)
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
LONG: dict[str, Any] = ASKED | {"max_output_tokens": 100, "min_tokens": 100}


def creation(text: str, **fields: Any) -> Any:
    return {"type": "response.create", "input": text} | ASKED | fields


def break_connections(server: Server) -> None:
    """Drop every WebSocket's TCP connection, as a network does."""

    def abort() -> None:
        for connection in list(server.serving.server_state.connections):
            if hasattr(connection, "conn"):
                connection.transport.abort()

    server.engine_call(abort)


# --- sessions --------------------------------------------------------------------------------


def test_an_async_session_has_many_lanes_at_once(server: Server) -> None:
    async def run() -> None:
        async with server.async_openai() as client, client.responses.connect() as connection:
            async with AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session:
                lanes = [session.lane(f"lane-{i}") for i in range(5)] + [session.default]
                for i, lane in enumerate(lanes):
                    await lane.send(creation(f"question {i}"))
                responses = await asyncio.gather(*(lane.get_final_response() for lane in lanes))
                for i, response in enumerate(responses):
                    assert response.output_text == answer_text(server, f"question {i}")
                await lanes[0].send(creation("no", model="other"))
                with pytest.raises(Exception, match="error event") as wrong:
                    await lanes[0].get_final_response()
                assert wrong.value.event.error.code == "model_not_found"
                await lanes[0].send(creation("on", previous_response_id=responses[1].id))
                assert (await lanes[0].get_final_response()).status == "incomplete"

    asyncio.run(run())


@OWN_CLIENT_WARNING
def test_a_sync_session_collects_and_prepares(server: Server) -> None:
    with server.openai().responses.connect() as connection:
        with ResponsesWebSocketSession(connection, limits=LIMITS) as session:
            lane = session.lane("one")
            prepared = ResponseCreate(
                type="response.create", model=MODEL, input="the sun", generate=False
            )
            lane.send(prepared)
            warm = lane.get_final_response(timeout=DEADLINE_S)
            assert (warm.status, warm.output) == ("completed", [])
            lane.send(creation("why?", previous_response_id=warm.id))
            response = lane.get_final_response(timeout=DEADLINE_S)
            messages = [{"role": "user", "content": text} for text in ("the sun", "why?")]
            prompt = server.chat_prompt(*messages)
            assert response.output_text == server.text(server.answer(prompt, 8))


def test_a_session_steers_one_lane_while_another_goes_on() -> None:
    gate = threading.Semaphore(8)
    with serve(fake_runner(gate=gate)) as server:

        async def run() -> None:
            async with server.async_openai() as client, client.responses.connect() as connection:
                async with AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session:
                    steered, other = session.lane("steered"), session.lane("other")
                    await steered.send(creation("tell me", **LONG))
                    accumulator = ResponsesWebSocketAccumulator()
                    while accumulator.snapshot().output_text == "":
                        accumulator.add_event(await steered.recv())
                    response_id = accumulator.snapshot().response_id
                    assert response_id is not None
                    await other.send(creation("the moon"))
                    command = {"type": "response.steer", "previous_response_id": response_id}
                    await steered.send(command | {"input": "shorter"})  # type: ignore[arg-type]
                    gate.release(1000)
                    event = await steered.recv()
                    while event.type not in ENDS:
                        accumulator.add_event(event)
                        event = await steered.recv()
                    accumulator.add_event(event)
                    first = accumulator.get_final_response()
                    assert first.incomplete_details is not None
                    assert first.incomplete_details.reason == "steered"
                    assert first.output_text == accumulator.snapshot().output_text
                    created = await steered.recv()
                    assert created.type == "response.created"
                    second = await steered.get_final_response()
                    assert second.previous_response_id == first.id == response_id
                    moon = await other.get_final_response()
                    assert moon.output_text == answer_text(server, "the moon")

        asyncio.run(run())


def test_steering_waits_for_the_output_of_calls() -> None:
    with saying(CALL) as server:

        async def run() -> None:
            async with server.async_openai() as client, client.responses.connect() as connection:
                extra: Any = {"credits": 2, "max_output_tokens": 200}
                await connection.send(creation("weather?", tools=[TOOL], **extra))
                created = (await connection.recv()).response
                # All of its call is there before it can be cut: it has not been read yet.
                await asyncio.to_thread(
                    server.wait_until,
                    lambda: server.engine.stats().request_success_total["stop"] == 1,
                )
                await connection.response.steer(previous_response_id=created.id, input="in Celsius")
                await connection.send_raw(json.dumps({"type": "response.grant", "credits": 999}))
                events = [await connection.recv()]
                while events[-1].type != "response.steer.pending":
                    events.append(await connection.recv())
                pending = SERVER_EVENT.validate_json(events[-1].to_json(), strict=True)
                completed = next(e for e in events if e.type == "response.completed").response
                [call] = [item for item in completed.output if item.type == "function_call"]
                [stub] = pending.required_input
                assert (stub.type, stub.call_id, stub.name) == (
                    "function_call_output",
                    call.call_id,
                    "weather",
                )
                fork = creation("aside", previous_response_id=completed.id, stream_id="fork")
                await connection.send(fork)
                await finish(connection)
                wrong = creation("", previous_response_id=completed.id, input=[stub.to_dict()])
                await connection.send(wrong)
                assert (await connection.recv()).error.param == "input[0].output"
                output = stub.model_dump(include={"type", "call_id"}) | {"output": "20"}
                goes_on = creation("", previous_response_id=completed.id, input=[output])
                await connection.send(goes_on)
                last = await finish(connection)
                items = await client.responses.input_items.list(last.id, order="asc")
                kinds = [item.type for item in items.data]
                assert kinds == ["message", "function_call", "message", "function_call_output"]
                assert items.data[2].content[0].text == "in Celsius"  # type: ignore[union-attr]
                await connection.send(goes_on)
                once_more = await finish(connection)
                items = await client.responses.input_items.list(once_more.id, order="asc")
                assert len(items.data) == 3, "what has gone into a response is not said again"

        asyncio.run(run())


async def finish(connection: Any) -> Any:
    while True:
        event = await connection.recv()
        if event.type in ENDS:
            return event.response
        assert event.type != "error", event


# --- reconnection ----------------------------------------------------------------------------


def test_the_async_client_reconnects_and_loses_nothing() -> None:
    gate = threading.Semaphore(8)
    with serve(fake_runner(gate=gate)) as server:

        async def run() -> list[Any]:
            events: list[Any] = []
            sending: list[asyncio.Task[None]] = []

            def on_reconnecting(lost: Any) -> None:
                assert lost.close_code == 1006
                resume = {
                    "type": "response.resume",
                    "response_id": events[0].response.id,
                    "starting_after": events[-1].sequence_number,
                }
                # It waits in the client's queue until there is a connection again.
                sending.append(asyncio.create_task(connection.send_raw(json.dumps(resume))))

            async with server.async_openai() as client:
                options: Any = {"on_reconnecting": on_reconnecting, "initial_delay": 0.01}
                async with client.responses.connect(**options) as connection:
                    await connection.send(creation("one", **LONG))
                    async for event in connection:
                        events.append(event)
                        if event.type in ENDS:
                            return events
                        if event.type == "response.output_text.delta" and not sending:
                            await asyncio.to_thread(break_connections, server)
                            gate.release(1000)
            raise AssertionError("the connection ended before the response")

        events = asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
        assert_in_order(events)
        prompt = server.chat_prompt({"role": "user", "content": "one"})
        text = server.text(server.answer(prompt, 100, min_tokens=100))
        assert events[-1].response.output_text == text


@OWN_CLIENT_WARNING
def test_the_sync_session_goes_on_with_its_lanes_after_a_reconnection() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:
        reconnected = threading.Event()
        options: Any = {"initial_delay": 0.01}
        options["on_reconnecting"] = lambda event: reconnected.set()
        with server.openai().responses.connect(**options) as connection:
            with ResponsesWebSocketSession(connection, limits=LIMITS) as session:
                lanes = [session.lane("a"), session.lane("b")]
                for lane in lanes:
                    lane.send(creation("one", **LONG))
                ids = [lane.recv(timeout=DEADLINE_S).response.id for lane in lanes]
                gate.release(6)
                last = {}
                for lane in lanes:
                    event = lane.recv(timeout=DEADLINE_S)
                    while event.type != "response.output_text.delta":
                        event = lane.recv(timeout=DEADLINE_S)
                    last[lane] = event.sequence_number
                break_connections(server)
                assert reconnected.wait(DEADLINE_S)
                gate.release(1000)
                for lane, response_id in zip(lanes, ids, strict=True):
                    resume = {"type": "response.resume", "response_id": response_id}
                    drained = drain(lane, last[lane])
                    send_when_connected(lane, resume | {"starting_after": drained})
                texts = {lane.get_final_response(timeout=DEADLINE_S).output_text for lane in lanes}
        prompt = server.chat_prompt({"role": "user", "content": "one"})
        assert texts == {server.text(server.answer(prompt, 100, min_tokens=100))}


def drain(lane: Any, number: int) -> int:
    """The last event's number that reached the lane before its connection broke."""
    while True:
        try:
            number = lane.recv(timeout=0).sequence_number
        except TimeoutError:
            return number


def send_when_connected(lane: Any, event: Any) -> None:
    """A lane refuses to send while its session reconnects."""
    while True:
        try:
            return lane.send(event)
        except RuntimeError as error:
            assert "restore state before sending" in str(error)


def test_what_is_sent_before_the_connection_is_there_waits_for_it(server: Server) -> None:
    async def run() -> str:
        async with server.async_openai() as client:
            manager = client.responses.connect()
            manager.send(creation("one"))
            async with manager as connection:
                return str((await finish(connection)).output_text)

    assert asyncio.run(run()) == answer_text(server, "one")


# --- helpers ---------------------------------------------------------------------------------


class Answer(pydantic.BaseModel):
    text: str
    numbers: list[int]


def test_structured_text_is_parsed_by_the_helpers() -> None:
    said = '{"text": "日本 🙂", "numbers": [1, 2]}'
    with saying(said, "hermes") as server:
        client = server.openai()
        body: dict[str, Any] = {"model": MODEL, "input": "answer"}
        with client.responses.stream(**body) as plain:
            assert plain.get_final_response().output_text == said

        async def run() -> list[Any]:
            async with server.async_openai() as client:
                async with client.responses.stream(**body) as helper:
                    return [event async for event in helper]

        events = asyncio.run(run())
    snapshots = [e.snapshot for e in events if e.type == "response.output_text.delta"]
    assert snapshots[-1] == said and Answer.model_validate_json(said).numbers == [1, 2]
    assert events[-1].type == "response.completed"


def test_the_async_client_creates_retrieves_counts_lists_cancels_and_deletes(
    server: Server,
) -> None:
    async def run() -> None:
        async with server.async_openai() as client:
            responses = client.responses
            created = await responses.create(input="one", **ASKED)
            assert await responses.retrieve(created.id) == created
            async with await responses.create(input="one", stream=True, **ASKED) as stream:
                final = [event async for event in stream][-1]
            assert final.response.output_text == created.output_text  # type: ignore[union-attr]
            count = await responses.input_tokens.count(model=MODEL, input="one")
            assert created.usage is not None
            assert count.input_tokens == created.usage.input_tokens
            items = [item async for item in responses.input_items.list(created.id, limit=1)]
            assert len(items) == 1
            assert await responses.cancel(created.id) == created
            await responses.delete(created.id)
            with pytest.raises(openai.NotFoundError):
                await responses.retrieve(created.id)

    asyncio.run(run())
