"""What a lane owes: everything asked of it answered in its turn, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from typing import Any

import pytest
from server.harness import MAX_MODEL_LEN, MODEL, Server, fake_runner, read_events, serve
from server.responses_client import (
    ENDS,
    TERMINAL,
    Socket,
    answer_text,
    connected,
    converse,
)
from server.test_responses_resume import LONG, begin, create_long, lose, resume

from streamkv.errors import OverloadedError
from streamkv.server.responses import turns
from streamkv.server.responses.answer import SocketAnswer
from streamkv.server.responses.lane import Lane, Refusal
from streamkv.server.responses.lanes import Lanes
from streamkv.server.ws_outlet import LaneOutlet


def creation(text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": text, "temperature": 0, "max_output_tokens": 8}
    return {"type": "response.create"} | body | fields


def grant(num: int, **fields: Any) -> dict[str, Any]:
    return {"type": "response.grant", "credits": num} | fields


# --- refusals --------------------------------------------------------------------------------


def num_kept() -> int:
    gc.collect()
    return sum(type(one) in (LaneOutlet, SocketAnswer) for one in gc.get_objects())


def test_a_response_that_is_not_admitted_leaves_nothing_on_its_connection(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        num_before = num_kept()
        for _ in range(8):
            await socket.create("hi", max_output_tokens=MAX_MODEL_LEN)
            assert (await socket.error()).error.param == "max_output_tokens"
        assert num_kept() <= num_before

    converse(server, talk)


def test_a_response_that_cannot_be_found_is_refused_in_its_turn() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:

        async def talk(socket: Socket) -> None:
            await socket.create("one", stream_id="a")
            await socket.receive_until("response.in_progress", lane="a")
            await socket.send(resume("resp_unknown", stream_id="a"))
            await socket.create("two", stream_id="a", credits=-1)
            await socket.create("three", stream_id="a")
            await socket.create("other", stream_id="b", max_output_tokens=MAX_MODEL_LEN)
            await socket.error("b")  # so that all before it has been read
            gate.release(1000)
            assert (await socket.finish("a")).output_text == answer_text(server, "one")
            error = await socket.error("a")
            assert (error.error.code, error.error.param) == ("response_not_found", "response_id")
            assert (await socket.error("a")).error.param == "credits"
            assert (await socket.finish("a")).output_text == answer_text(server, "three")

        converse(server, talk)


def test_only_responses_are_read_on(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "model": MODEL, "max_tokens": 2}
    options = {"stream": True, "stream_options": {"resumable": True}}
    with server.client() as client:
        for name in ("seen", "resp_seen"):
            asked = body | options | {"request_id": name}
            answer = client.post("/v1/chat/completions", json=asked)
            assert read_events(answer.text)[-1] == "[DONE]"

    async def talk(socket: Socket) -> None:
        for response_id in ("seen", "chatcmpl-seen", "resp_seen"):
            await socket.send(resume(response_id, stream_id="a"))
            error = await socket.error("a")
            assert (error.status, error.error.code) == (404, "response_not_found")
            assert error.error.param == "response_id"
        await socket.create("hi", request_id="seen")
        response = await socket.finish()
        await socket.send(resume("seen"))
        assert (await socket.error()).error.code == "response_not_found"
        num_resumed = server.serving.app.state.answers.num_resumed
        await socket.send(resume("resp_seen"))
        assert await socket.finish() == response
        assert server.serving.app.state.answers.num_resumed == num_resumed + 1

    converse(server, talk)


def test_a_resumption_that_is_refused_moves_nothing() -> None:
    gate = threading.Semaphore(12)
    with serve(fake_runner(gate=gate)) as server:

        async def talk(socket: Socket) -> None:
            response_id = await begin(socket, stream_id="a")
            await socket.send(resume(response_id, 999, stream_id="b"))
            assert (await socket.error("b")).error.param == "starting_after"
            await socket.send(resume(response_id, 999))
            gate.release(1000)
            await socket.finish("a")
            assert (await socket.error("a")).error.param == "starting_after"

        converse(server, talk)


# --- what is said to a response that has not begun ---------------------------------------------


def test_credits_granted_with_the_request_are_not_lost(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        socket.send_together(creation("one", credits=0), grant(2), grant(98))
        assert (await socket.finish()).output_text == answer_text(server, "one")
        socket.send_together(creation("two", stream_id="a"), grant(2, stream_id="a"))
        error = await socket.receive_until("error", lane="a")
        assert error.error.param == "credits"
        assert (await socket.finish("a")).output_text == answer_text(server, "two")

    converse(server, talk)


def test_a_response_can_be_cancelled_and_granted_credits_with_its_resumption() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:

        async def run() -> None:
            async with connected(server) as first:
                ids = [await create_long(first, stream_id=lane) for lane in ("a", "b")]
                await lose(server, first)
            async with connected(server) as second:
                cancel = {"type": "response.cancel"}
                second.send_together(
                    resume(ids[0], credits=0),
                    grant(1000, response_id=ids[0]),
                    cancel | {"response_id": ids[0]},
                    resume(ids[1]),
                    cancel | {"stream_id": "b"},
                )
                for lane in ("a", "b"):
                    while not any(event.type in TERMINAL for event in second.lane(lane)):
                        await second.receive()
                    assert second.lane(lane)[-1].response.status == "cancelled"

        asyncio.run(run())
        gate.release(1000)
        server.wait_idle()


def test_a_command_that_names_a_response_and_another_lane_is_refused() -> None:
    gate = threading.Semaphore(12)
    with serve(fake_runner(gate=gate)) as server:

        async def talk(socket: Socket) -> None:
            response_id = await begin(socket, stream_id="a")
            cancel = {"type": "response.cancel", "response_id": response_id}
            await socket.send(cancel | {"stream_id": "b"})
            assert (await socket.error("b")).error.param == "response_id"
            await socket.send(cancel | {"stream_id": "a"})
            assert (await socket.finish("a")).status == "cancelled"

        converse(server, talk)
        gate.release(1000)


def test_a_response_whose_last_event_took_the_last_credit_leaves_its_lane(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        await socket.create("one")
        num = (await socket.finish()) and len(socket.events)
        await socket.create("one", credits=num, stream_id="a")
        await socket.create("two", stream_id="a")
        assert (await socket.finish("a")).output_text == answer_text(server, "one")
        assert (await socket.finish("a")).output_text == answer_text(server, "two")

    converse(server, talk)


# --- the end of a connection -------------------------------------------------------------------


def test_a_close_on_purpose_behind_a_last_message_is_one() -> None:
    gate = threading.Semaphore(12)
    with serve(fake_runner(gate=gate)) as server:

        async def talk(socket: Socket) -> None:
            await begin(socket)
            protocol = socket.connection.protocol
            for _ in range(3):
                protocol.send_text(
                    json.dumps({"type": "response.cancel", "stream_id": "x"}).encode()
                )
            protocol.send_close(1000)
            socket.connection.transport.write(b"".join(protocol.data_to_send()))

        converse(server, talk)
        server.wait_until(lambda: server.engine.stats().request_success_total["abort"] == 1)
        gate.release(1000)


# --- a successor -------------------------------------------------------------------------------


def test_who_takes_a_steered_response_over_gets_its_successor_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_successor = turns.open_successor

    async def open_later(*arguments: Any) -> Any:  # as with a long conversation
        for _ in range(8):
            await asyncio.sleep(0)
        return await open_successor(*arguments)

    monkeypatch.setattr(turns, "open_successor", open_later)
    with serve() as server:

        async def run() -> None:
            async with connected(server) as first, connected(server) as second:
                await first.create("one", credits=2, **LONG)
                created = await first.receive_until("response.created")
                response_id = created.response.id
                await first.create("next")
                steer = {"type": "response.steer", "previous_response_id": response_id}
                await first.send(steer | {"input": "two"})
                await first.create("other", stream_id="b")  # answered after the steering was read
                await first.finish("b")
                await second.send(resume(response_id))
                assert (await second.finish()).id == response_id
                successor = await second.finish()
                assert successor.previous_response_id == response_id
                assert (await first.error()).error.code == "taken_over"
                response = await first.finish()
                assert response.output_text == answer_text(server, "next")
            ends = [event for event in first.lane(None) if event.type in ENDS]
            assert len(ends) == 1

        asyncio.run(run())
        assert sum(server.engine.stats().request_success_total.values()) == 4


def test_what_waits_in_a_lane_is_cancelled_granted_and_steered_by_its_name(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        lane = {"stream_id": "a", "ignore_eos": True}
        await socket.create("held", **lane, credits=2, request_id="held")
        created = await socket.receive_until("response.created", lane="a")
        for name in ("gone", "granted", "steered", "free"):
            limits = {"credits": 0} if name == "granted" else {}
            await socket.create("one", **lane, **limits, request_id=name, max_output_tokens=100)
        steer = {"type": "response.steer", "previous_response_id": "resp_steered", "input": "two"}
        await socket.send(steer)
        await socket.send({"type": "response.cancel", "response_id": "resp_gone"})
        elsewhere = {"response_id": "resp_granted", "stream_id": "b"}
        await socket.send({"type": "response.grant", **elsewhere, "credits": 1})
        assert (await socket.error("b")).error.code == "response_not_found"
        await socket.send({"type": "response.grant", "response_id": "resp_granted", "credits": 999})
        await socket.send({"type": "response.grant", "response_id": "resp_free", "credits": 1})
        await socket.send({"type": "response.grant", "stream_id": "a", "credits": 999})
        assert (await socket.finish("a")).id == created.response.id == "resp_held"
        gone = await socket.finish("a")
        assert (gone.id, gone.status) == ("resp_gone", "cancelled")
        granted = await socket.finish("a")
        assert (granted.id, granted.usage.output_tokens) == ("resp_granted", 100)
        steered = await socket.finish("a")
        assert steered.incomplete_details.reason == "steered"
        assert (await socket.finish("a")).previous_response_id == steered.id == "resp_steered"
        assert (await socket.error("a")).error.param == "credits"
        assert (await socket.finish("a")).id == "resp_free"

    converse(server, talk)


def test_cancelling_what_waits_to_be_read_on_ends_it_at_once(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        with server.client() as client:
            body = {"input": "hi", "background": True, "request_id": "far", "ignore_eos": True}
            assert client.post("/v1/responses", json=body).status_code == 200
            await socket.create("held", stream_id="a", credits=2, request_id="held")
            await socket.receive_until("response.created", lane="a")
            resume = {"type": "response.resume", "response_id": "resp_far", "stream_id": "a"}
            await socket.send(resume)
            await socket.send({"type": "response.cancel", "response_id": "resp_far"})
            while client.get("/v1/responses/resp_far").json()["status"] != "cancelled":
                await asyncio.sleep(0)
        await socket.send({"type": "response.grant", "stream_id": "a", "credits": 999})
        assert (await socket.finish("a")).id == "resp_held"
        assert (await socket.finish("a")).status == "cancelled"

    converse(server, talk)


def test_a_lane_between_two_turns_can_refuse() -> None:
    lane = Lane(None, lambda turn: None)
    for _ in range(3):
        lane.refuse(OverloadedError("full", retry_after_s=1))
    (refusal,) = lane.queue
    assert isinstance(refusal, Refusal) and refusal.num == 3


def test_lanes_are_freed_with_their_connection_whatever_waits_in_them(server: Server) -> None:
    gc.collect()
    gc.disable()
    try:
        before = _num_alive(Lanes)

        async def talk(socket: Socket) -> None:
            for name in ("runs", "waits"):
                await socket.create("one", credits=2, request_id=name, stream_id="a")
            await socket.receive_until("response.created", lane="a")

        converse(server, talk)
        server.wait_idle()
        server.wait_until(lambda: _num_alive(Lanes) <= before)
    finally:
        gc.enable()


def _num_alive(kind: type) -> int:
    return sum(type(one) is kind for one in gc.get_objects())
