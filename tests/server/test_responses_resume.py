"""Responses on a WebSocket whose connection is lost, or closed, and read on from another one."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import httpx
import pytest
from server.harness import MODEL, Server, fake_runner, serve
from server.responses_client import (
    Socket,
    answer_text,
    assert_in_order,
    connected,
    text_of,
)
from websockets.exceptions import ConnectionClosed

from streamkv.server.responses.lanes import Lanes
from streamkv.server.responses.request import ResponseRequest
from streamkv.server.responses.writer import ResponseWriter

LONG = {"max_output_tokens": 100, "min_tokens": 100}


def resume(response_id: str, after: int | None = None, **fields: Any) -> dict[str, Any]:
    event = {"type": "response.resume", "response_id": response_id, "starting_after": after}
    return event | fields


async def create_long(socket: Socket, text: str = "hi", **fields: Any) -> str:
    """A long response that was admitted."""
    await socket.create(text, **LONG | fields)
    created = await socket.receive_until("response.created", lane=fields.get("stream_id"))
    return str(created.response.id)


async def begin(socket: Socket, text: str = "one", **fields: Any) -> str:
    """A long response, of which some was read."""
    response_id = await create_long(socket, text, **fields)
    await socket.receive_until("response.output_text.delta", lane=fields.get("stream_id"))
    return response_id


async def lose(server: Server, socket: Socket) -> None:
    """The connection breaks, and the server has seen it."""
    before = len(server.serving.server_state.tasks)
    socket.connection.transport.abort()
    await asyncio.to_thread(
        server.wait_until, lambda: len(server.serving.server_state.tasks) < before
    )


def long_text(server: Server, text: str = "one", num: int = 100) -> str:
    prompt = server.chat_prompt({"role": "user", "content": text})
    return server.text(server.answer(prompt, num, min_tokens=num))


@pytest.mark.parametrize("where", [{}, {"stream_id": "other"}])
def test_a_lost_connection_is_made_good_on_another_without_loss(where: dict[str, str]) -> None:
    gate = threading.Semaphore(12)
    with serve(fake_runner(gate=gate)) as server:

        async def run() -> None:
            async with connected(server) as first:
                response_id = await begin(first, stream_id="a", store=False)
                await lose(server, first)
            gate.release(1000)
            await asyncio.to_thread(server.wait_idle)
            async with connected(server) as second:
                seen = first.events[-1].sequence_number
                await second.send(resume(response_id, seen, **where))
                lane = where.get("stream_id", "a")
                final = await second.finish(lane)
                assert [e.sequence_number for e in second.events][0] == seen + 1
                assert_in_order([*first.events, *second.events])
                assert final.output_text == long_text(server)
                await second.create("more", previous_response_id=response_id)
                assert (await second.finish()).previous_response_id == response_id
            assert server.engine.stats().request_success_total["abort"] == 0

        asyncio.run(run())


def test_a_response_that_still_runs_goes_on_where_it_is_read_now() -> None:
    gate = threading.Semaphore(12)
    with serve(fake_runner(gate=gate)) as server:

        async def run() -> None:
            async with connected(server) as first, connected(server) as second:
                response_id = await begin(first)
                await first.create("next", max_output_tokens=2)
                await second.send(resume(response_id))
                await second.receive_until("response.output_text.delta")
                assert (await first.error()).error.code == "taken_over"
                gate.release(1000)
                assert (await first.finish()).output_text == answer_text(server, "next", 2)
                assert (await second.finish()).output_text == long_text(server)
                assert_in_order(second.events)
                created = [e for e in first.events if e.type == "response.created"]
                assert created[1].response.id != response_id, "its lane went on at once"

        asyncio.run(run())


def test_a_response_that_is_read_on_can_be_cancelled_and_steered() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:

        async def run() -> None:
            async with connected(server) as first:
                ids = [await create_long(first, stream_id=lane) for lane in ("a", "b")]
                gate.release(12)
                for lane in ("a", "b"):
                    if not any(e.type.endswith("text.delta") for e in first.lane(lane)):
                        await first.receive_until("response.output_text.delta", lane=lane)
                await lose(server, first)
            one, two = ids
            async with connected(server) as second:
                await second.send(resume(one))
                await second.send(resume(two))
                await second.receive_until("response.created", lane="b")
                await second.send({"type": "response.cancel", "response_id": one})
                assert (await second.finish("a")).status == "cancelled"
                steer = {"type": "response.steer", "previous_response_id": two, "input": "three"}
                await second.send(steer)
                assert (await second.finish("b")).id == two
                gate.release(1000)
                created = await second.receive_until("response.created", lane="b")
                assert created.response.previous_response_id == two
                await second.finish("b")

        asyncio.run(run())


@pytest.mark.parametrize("on_disconnect", ["continue", "pause"])
def test_who_closes_may_ask_to_come_back(on_disconnect: str) -> None:
    gate = threading.Semaphore(12)
    with serve(fake_runner(gate=gate)) as server:

        async def run() -> None:
            async with connected(server) as first:
                response_id = await begin(first, on_disconnect=on_disconnect)
            gate.release(2000)
            async with connected(server) as second:
                await second.send(resume(response_id))
                assert (await second.finish()).output_text == long_text(server)

        asyncio.run(run())


@pytest.mark.parametrize("code", [1000, None])
def test_who_closes_on_purpose_wants_no_more(code: int | None) -> None:
    gate = threading.Semaphore(12)
    with serve(fake_runner(gate=gate)) as server:

        async def run() -> None:
            async with connected(server) as socket:
                response_id = await begin(socket)
                if code is None:  # as browsers do
                    socket.connection.protocol.send_close()
                    socket.connection.transport.write(
                        b"".join(socket.connection.protocol.data_to_send())
                    )
            stats = server.engine.stats
            await asyncio.to_thread(
                server.wait_until, lambda: stats().request_success_total["abort"] == 1
            )
            async with connected(server) as other:
                await other.send(resume(response_id))
                assert (await other.finish()).status == "cancelled"

        asyncio.run(run())
        gate.release(2)
        server.wait_idle()
        gate.release(1000)


@pytest.mark.parametrize(
    ("fields", "window_s"), [({}, 0.05), ({"on_disconnect": "abort"}, 60.0), ({}, 0.0)]
)
def test_a_response_that_nobody_comes_back_for_is_aborted(
    fields: dict[str, Any], window_s: float
) -> None:
    gate = threading.Semaphore(12)
    with serve(fake_runner(gate=gate), resume_window=window_s) as server:

        async def run() -> None:
            async with connected(server) as socket:
                await begin(socket, **fields)
                await lose(server, socket)

        asyncio.run(run())
        server.wait_until(lambda: server.engine.stats().request_success_total["abort"] == 1)
        gate.release(1000)
        server.wait_idle()


def test_what_cannot_be_read_on_is_an_error_event() -> None:
    with serve(api_key=("one", "two"), resume_memory_bytes=1 << 16) as server:

        def headers(key: str) -> dict[str, Any]:
            return {"additional_headers": {"Authorization": f"Bearer {key}"}}

        async def run() -> None:
            async with connected(server, **headers("one")) as mine:
                await mine.create("one", **LONG)
                final = await mine.finish()
                last = mine.events[-1].sequence_number
                for after, status, code in (
                    (0, 410, "events_dropped"),  # the log is that small
                    (last + 5, 400, None),
                ):
                    await mine.send(resume(final.id, after))
                    error = await mine.error()
                    assert (error.status, error.error.code) == (status, code)
                assert error.error.param == "starting_after"
                await mine.send(resume(final.id, last - 1))
                assert await mine.finish() == final
            async with connected(server, **headers("two")) as other:
                await other.send(resume(final.id))
                error = await other.error()
                assert (error.status, error.error.param) == (404, "response_id")

        asyncio.run(run())


# --- credits ---------------------------------------------------------------------------------


def test_events_take_credits_and_deltas_merge_without(server: Server) -> None:
    async def run() -> None:
        async with connected(server) as socket:
            await socket.create("one", credits=5, stream_id="a", **LONG)
            created = (await socket.receive_until("response.created", lane="a")).response
            await socket.receive_until("response.output_text.delta", lane="a")
            assert len(socket.lane("a")) == 5
            await socket.create("two", stream_id="b")
            await socket.finish("b")
            await asyncio.to_thread(server.wait_idle)
            assert len(socket.lane("a")) == 5, "no event without a credit"
            await socket.send({"type": "response.grant", "stream_id": "a", "credits": 1})
            await socket.receive_until("response.output_text.delta", lane="a")
            rest = {"type": "response.grant", "response_id": created.id, "credits": 10}
            await socket.send(rest)
            final = await socket.finish("a")
            assert final.output_text == long_text(server)
            assert_in_order(socket.lane("a"))
            deltas = [e for e in socket.lane("a") if e.type.endswith("text.delta")]
            assert len(deltas) == 2
            await socket.create("three", stream_id="c")
            await socket.send({"type": "response.grant", "stream_id": "c", "credits": 1})
            error = await socket.receive_until("error", lane="c")
            assert error.error.param in ("credits", "stream_id")

    asyncio.run(run())


def test_a_response_that_is_read_on_has_credits_of_its_own(server: Server) -> None:
    async def run() -> None:
        async with connected(server) as first, connected(server) as second:
            await first.create("one", credits=3, max_output_tokens=4)
            created = await first.receive_until("response.created")
            await second.send(resume(created.response.id, 0, credits=2))
            await second.receive_until("response.output_item.added")
            await second.send({"type": "response.grant", "credits": 50})
            assert (await second.finish()).output_text == answer_text(server, "one", 4)
            assert [e.sequence_number for e in second.events][0] == 1

    asyncio.run(run())


# --- over HTTP as well -----------------------------------------------------------------------


def test_what_began_on_a_socket_is_read_and_cancelled_over_http() -> None:
    gate = threading.Semaphore(12)
    with serve(fake_runner(gate=gate)) as server:

        async def run() -> None:
            async with connected(server) as socket:
                response_id = await begin(socket)
                client = httpx.AsyncClient(base_url=server.url, verify=False)
                path = f"/v1/responses/{response_id}"
                async with client:
                    found = (await client.get(path)).json()
                    assert (found["status"], found["output"][0]["status"]) == (
                        "in_progress",
                        "in_progress",
                    )
                    cancelled = (await client.post(f"{path}/cancel")).json()
                    assert cancelled["status"] == "cancelled"
                    partial = (await client.delete(f"/v1/requests/{response_id}")).json()
                    assert partial["status"] == "cancelled"
                final = await socket.finish()
                assert final.output_text == cancelled["output"][0]["content"][0]["text"]
                assert text_of(socket.events) == final.output_text

        asyncio.run(run())
        gate.release(1000)
        server.wait_idle()


def test_what_began_over_http_is_read_on_from_a_socket() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:
        created = server.openai().responses.create(
            model=MODEL, input="one", background=True, temperature=0, max_output_tokens=8
        )

        async def run() -> None:
            async with connected(server) as socket:
                await socket.send(resume(created.id, stream_id="a"))
                await socket.receive_until("response.queued", lane="a")
                steer = {"previous_response_id": created.id, "input": "x"}
                await socket.send({"type": "response.steer"} | steer)
                failed = await socket.receive_until("response.steer.failed")
                assert failed.error.code == "steering_not_supported"
                gate.release(1000)
                final = await socket.finish("a")
                assert final.output_text == answer_text(server, "one")

        asyncio.run(run())


def test_of_a_connection_that_was_lost_nothing_is_kept_but_the_answers_themselves() -> None:
    with serve() as server:

        async def run() -> None:
            async with connected(server) as socket:
                await socket.create("one", store=False)
                first = await socket.finish()
                await socket.create("two", store=False, previous_response_id=first.id)
                second = await socket.finish()
                await lose(server, socket)
            answers = server.serving.app.state.answers
            kept = {key.answer_id: ended.answer for key, ended in answers._ended.items()}
            assert kept.keys() == {first.id, second.id}
            for answer in kept.values():
                store, record = answer.record.store, answer.record
                assert store.get(record.owner, record.id) is None
                assert answer.num_held_bytes == record.final_bytes

            gc.collect()
            writers = [one for one in gc.get_objects() if type(one) is ResponseWriter]
            assert not [one for one in writers if one.response.id in kept]
            bodies = [one for one in gc.get_objects() if type(one) is ResponseRequest]
            assert not [one for one in bodies if one.previous_response_id == first.id]

        asyncio.run(run())


def test_a_closed_connection_is_freed_without_the_garbage_collector() -> None:
    with serve() as server:

        async def run() -> None:
            async with connected(server) as socket:
                await socket.create("one", store=False)
                await socket.finish()
                await socket.send(
                    {"type": "response.steer", "input": "x", "previous_response_id": "x"}
                )
                await socket.receive()
                (lanes,) = (weakref.ref(one) for one in gc.get_objects() if type(one) is Lanes)
                await lose(server, socket)
            await asyncio.to_thread(server.wait_until, lambda: lanes() is None)

        gc.collect()
        gc.disable()
        try:
            asyncio.run(run())
        finally:
            gc.enable()


def test_a_connection_that_ends_leaves_nothing_waiting() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:

        async def run() -> None:
            async with connected(server) as socket:
                for lane in ("a", "b"):
                    await socket.create("one", stream_id=lane, on_disconnect="abort")
                    await socket.create("waits", stream_id=lane)
                    await socket.receive_until("response.created", lane=lane)
                await lose(server, socket)
                with pytest.raises(ConnectionClosed):
                    await socket.send({})

        asyncio.run(run())
        server.wait_until(lambda: server.engine.stats().request_success_total["abort"] == 2)
        gate.release(1000)
        server.wait_idle()
        assert sum(server.engine.stats().request_success_total.values()) == 2
