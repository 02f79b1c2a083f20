"""The WebSocket at /v1/responses: every event received is checked with the official models."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import pytest
from server.harness import DEADLINE_S, MAX_MODEL_LEN, MODEL, Server, fake_runner, serve
from server.responses_client import (
    ENDS,
    OWN_CLIENT_WARNING,
    SERVER_EVENT,
    TERMINAL,
    Socket,
    answer_text,
    assert_in_order,
    connected,
    converse,
)
from websockets.exceptions import ConnectionClosed, InvalidStatus

from streamkv.server.responses.lanes import MAX_LANES, MAX_TURNS_PER_LANE

# --- the official client ---------------------------------------------------------------------


def test_the_official_async_client_gets_the_models_text(server: Server) -> None:
    async def run() -> list[Any]:
        events = []
        async with server.async_openai() as client, client.responses.connect() as connection:
            await connection.response.create(
                model=MODEL, input="the fox", temperature=0, max_output_tokens=8
            )
            while not events or events[-1].type not in TERMINAL:
                data = await connection.recv_bytes()
                events.append(SERVER_EVENT.validate_json(data, strict=True))
        return events

    events = asyncio.run(run())
    assert_in_order(events)
    assert events[-1].response.output_text == answer_text(server, "the fox")


def test_the_official_client_dispatches_events_to_handlers(server: Server) -> None:
    deltas: list[str] = []

    async def run() -> None:
        async with server.async_openai() as client, client.responses.connect() as connection:
            finished = asyncio.Event()
            connection.on("response.output_text.delta", lambda event: deltas.append(event.delta))
            connection.on("response.incomplete", lambda event: finished.set())
            dispatch = asyncio.create_task(connection.dispatch_events())
            await connection.response.create(
                model=MODEL, input="lazy dog", temperature=0, max_output_tokens=6
            )
            async with asyncio.timeout(DEADLINE_S):
                await finished.wait()
            await connection.close()
            await dispatch

    asyncio.run(run())
    assert "".join(deltas) == answer_text(server, "lazy dog", 6)


@OWN_CLIENT_WARNING
def test_the_official_sync_client_gets_the_models_text(server: Server) -> None:
    with server.openai().responses.connect() as connection:
        connection.response.create(
            model=MODEL, input="the sun", temperature=0, max_output_tokens=8, stream_id="one"
        )
        events = []
        for event in connection:
            events.append(SERVER_EVENT.validate_json(event.to_json(), strict=True))
            if event.type in TERMINAL:
                break
    assert_in_order(events)
    assert {event.stream_id for event in events} == {"one"}
    assert events[-1].response.output_text == answer_text(server, "the sun")


# --- lanes -----------------------------------------------------------------------------------


def test_eight_lanes_at_once_are_each_complete_in_order_and_right(server: Server) -> None:
    lanes = [f"lane {i}" for i in range(8)]

    async def talk(socket: Socket) -> None:
        for lane in lanes:
            await socket.create(f"question of {lane}", stream_id=lane, max_output_tokens=40)
        for _ in lanes:
            while (await socket.receive()).type not in TERMINAL:
                pass

    socket = converse(server, talk)
    for lane in lanes:
        assert_in_order(socket.lane(lane))
        text = socket.lane(lane)[-1].response.output_text
        assert text == answer_text(server, f"question of {lane}", 40)
    assert len(socket.events) == sum(len(socket.lane(lane)) for lane in lanes)


def test_lanes_run_in_parallel() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:

        async def talk(socket: Socket) -> None:
            await socket.create("first", stream_id="a", max_output_tokens=200)
            await socket.receive_until("response.in_progress", lane="a")
            await socket.create("second", stream_id="b", max_output_tokens=1)
            await socket.receive_until("response.in_progress", lane="b")
            gate.release(1000)
            await socket.finish("b")
            assert not [event for event in socket.lane("a") if event.type in TERMINAL]
            await socket.finish("a")

        converse(server, talk)


def test_a_lane_answers_in_the_order_asked_errors_included(server: Server) -> None:
    texts = ["one", "two", "three"]

    async def talk(socket: Socket) -> None:
        await socket.create("one")
        await socket.create("two")
        await socket.create("no such model", model="other")
        await socket.create("no such type", max_output_tokens="many")
        await socket.create("three")
        for _ in range(5):
            await socket.receive_until(*TERMINAL)

    events = converse(server, talk).events
    errors = [index for index, event in enumerate(events) if event.type == "error"]
    assert [events[index].error.param for index in errors] == ["model", "max_output_tokens"]
    answers = [*events[: errors[0]], *events[errors[1] + 1 :]]
    ends = [index for index, event in enumerate(answers) if event.type in ENDS]
    starts = [0, *(end + 1 for end in ends)]
    for text, start, end in zip(texts, starts, ends, strict=False):
        assert_in_order(answers[start : end + 1])
        assert answers[end].response.output_text == answer_text(server, text)
    assert errors == [ends[1] + 1, ends[1] + 2]


def test_a_full_lane_refuses_in_its_turn() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:

        async def talk(socket: Socket) -> None:
            for _ in range(MAX_TURNS_PER_LANE + 3):
                await socket.create("hi", stream_id="a", max_output_tokens=1)
            await socket.create("hi", model="other", stream_id="b")
            await socket.error("b")  # all of them have been read
            gate.release(1000)
            ends: list[dict[str, Any]] = []
            while len(ends) < MAX_TURNS_PER_LANE + 3:
                event = json.loads(await socket.connection.recv())
                ends += [event] if event["type"] in TERMINAL else []
            assert all(event["type"] in ENDS for event in ends[:-3])
            for full in ends[-3:]:
                assert (full["type"], full["status"]) == ("error", 429)
                assert (full["stream_id"], full["error"]["code"]) == ("a", "overloaded")
                assert str(MAX_TURNS_PER_LANE) in full["error"]["message"]
            await socket.create("the fox", stream_id="a")
            assert (await socket.finish("a")).output_text == answer_text(server, "the fox")

        converse(server, talk)


def test_the_number_of_lanes_is_bounded() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate, num_blocks=4096)) as server:

        async def talk(socket: Socket) -> None:
            for i in range(MAX_LANES + 1):
                await socket.create("hi", stream_id=f"lane {i}", max_output_tokens=1)
            event: dict[str, Any] = {}
            while event.get("type") != "error":
                event = json.loads(await socket.connection.recv())
            assert event["stream_id"] == f"lane {MAX_LANES}"
            assert (event["status"], event["error"]["code"]) == (429, "overloaded")
            assert str(MAX_LANES) in event["error"]["message"]
            gate.release(10_000)

        converse(server, talk)
        server.wait_idle()


def test_bytes_that_wait_are_bounded() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate), max_body_bytes=2048) as server:

        async def talk(socket: Socket) -> None:
            for _ in range(3):
                await socket.create("hi", max_output_tokens=1, user="u" * 1500)
            gate.release(1000)
            for _ in range(2):
                await socket.finish()
            error = await socket.error()
            assert (error.status, "4096 bytes" in error.error.message) == (429, True)
            for _ in range(3):  # what has ended counts no more
                await socket.create("hi", max_output_tokens=1, user="u" * 1500)
                await socket.finish()

        converse(server, talk)


# --- turns that go on ------------------------------------------------------------------------


def test_a_turn_goes_on_from_an_earlier_response_of_any_lane(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        await socket.create("one", instructions="be kind", stream_id="a")
        first = await socket.finish("a")
        await socket.create("two", previous_response_id=first.id, stream_id="a")
        second = await socket.finish("a")
        await socket.create("other", previous_response_id=first.id, stream_id="b")
        fork = await socket.finish("b")
        history = [
            {"role": "user", "content": "one"},  # instructions are not carried over
            {"role": "assistant", "content": first.output_text},
        ]
        for response, text in ((second, "two"), (fork, "other")):
            prompt = server.chat_prompt(*history, {"role": "user", "content": text})
            assert response.output_text == server.text(server.answer(prompt, 8))
            assert response.previous_response_id == first.id
        prompt = server.chat_prompt(
            *history,
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": second.output_text},
            {"role": "user", "content": "three"},
        )
        await socket.create("three", previous_response_id=second.id)
        assert (await socket.finish()).output_text == server.text(server.answer(prompt, 8))

    converse(server, talk)


def test_an_unknown_or_running_previous_response_is_an_error(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        await socket.create("one", previous_response_id="resp_unknown")
        error = await socket.error()
        assert (error.status, error.error.param) == (400, "previous_response_id")
        assert error.error.code == "previous_response_not_found"
        assert "resp_unknown" in error.error.message

    converse(server, talk)


def test_what_is_not_stored_is_known_on_its_own_connection_alone(server: Server) -> None:
    async def run() -> None:
        async with connected(server) as one, connected(server) as two:
            await one.create("secret", store=False)
            response = await one.finish()
            assert (response.model_extra or {})["store"] is False
            await two.create("more", previous_response_id=response.id)
            assert (await two.error()).error.code == "previous_response_not_found"
            await one.create("more", previous_response_id=response.id)
            assert (await one.finish()).previous_response_id == response.id

    asyncio.run(run())


# --- cancelling ------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["response_id", "stream_id"])
def test_cancel_ends_the_running_response_and_frees_its_blocks(by: str) -> None:
    gate = threading.Semaphore(5)
    with serve(fake_runner(gate=gate)) as server:

        async def talk(socket: Socket) -> None:
            await socket.create("hi", stream_id="a", max_output_tokens=300, ignore_eos=True)
            await socket.create("next", stream_id="a", max_output_tokens=2)
            created = await socket.receive_until("response.created", lane="a")
            await socket.receive_until("response.output_text.delta", lane="a")
            names = {"response_id": created.response.id, "stream_id": "a"}
            await socket.send({"type": "response.cancel", by: names[by]})
            response = await socket.finish("a")
            assert (response.id, response.status) == (created.response.id, "cancelled")
            assert response.incomplete_details is None
            assert socket.events[-1].type == "response.incomplete"
            assert response.output[0].status == "incomplete"
            gate.release(1000)
            assert (await socket.finish("a")).output_text == answer_text(server, "next", 2)

        socket = converse(server, talk)
        first_end = next(i for i, e in enumerate(socket.events) if e.type in ENDS)
        assert_in_order(socket.events[: first_end + 1])
        server.wait_idle()
        assert server.engine.stats().request_success_total["abort"] == 1


def test_cancel_sent_with_the_request_is_not_lost() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:

        async def talk(socket: Socket) -> None:
            # In one segment, so that the second is there before the first has begun.
            protocol = socket.connection.protocol
            for message in (
                {"type": "response.create", "input": "hi"},
                {"type": "response.cancel"},
            ):
                protocol.send_text(json.dumps(message).encode())
            socket.connection.transport.write(b"".join(protocol.data_to_send()))
            response = await socket.finish()
            assert (response.status, response.output) == ("cancelled", [])
            gate.release(1000)
            await socket.create("more", previous_response_id=response.id)
            history = [{"role": "user", "content": text} for text in ("hi", "more")]
            prompt = server.chat_prompt(*history)
            assert (await socket.finish()).output_text == server.text(server.answer(prompt, 8))

        converse(server, talk)
        server.wait_idle()


@pytest.mark.parametrize(
    ("event", "param"),
    [({"response_id": "resp_unknown"}, "response_id"), ({"stream_id": "a"}, "stream_id")],
)
def test_cancelling_what_does_not_run_is_an_error(
    server: Server, event: dict[str, Any], param: str
) -> None:
    async def talk(socket: Socket) -> None:
        await socket.send({"type": "response.cancel"} | event)
        error = await socket.error(event.get("stream_id"))
        assert (error.status, error.error.code) == (404, "response_not_found")
        assert error.error.param == param

    converse(server, talk)


# --- errors ----------------------------------------------------------------------------------

CREATE = {"type": "response.create", "model": MODEL, "input": "hi", "stream_id": "bad"}


@pytest.mark.parametrize(
    ("message", "status", "param"),
    [
        ("{not json", 400, None),
        ("[]", 400, None),
        ('"text"', 400, None),
        ("", 400, None),
        ("[" * 5000, 400, None),
        ('{"type": "response.create", "input": ' + "[" * 5000, 400, None),
        (b'{"type": "response.create"}', 400, None),
        ({"input": "hi"}, 400, "type"),
        ({"type": 7}, 400, "type"),
        ({"type": "session.update"}, 400, "type"),
        ({"type": "response.create", "stream_id": 7}, 400, "stream_id"),
        ({"type": "response.steer", "input": "x"}, 400, "previous_response_id"),
        ({"type": "response.steer", "previous_response_id": "r", "input": 7}, 400, "input"),
        ({"type": "response.resume"}, 400, "response_id"),
        ({"type": "response.resume", "response_id": "resp_none"}, 404, "response_id"),
        ({"type": "response.grant"}, 400, "credits"),
        ({"type": "response.grant", "credits": 1}, 404, "stream_id"),
        (CREATE | {"input": None}, 400, "input"),
        (CREATE | {"input": {"role": "user"}}, 400, "input"),
        (CREATE | {"input": [{"role": "user"}]}, 400, "input[0].content"),
        (CREATE | {"model": "other"}, 404, "model"),
        (CREATE | {"model": 7}, 400, "model"),
        (CREATE | {"temperature": "hot"}, 400, "temperature"),
        (CREATE | {"temperature": -1}, 400, "temperature"),
        (CREATE | {"input": "the fox " * MAX_MODEL_LEN}, 400, "input"),
        (CREATE | {"max_output_tokens": MAX_MODEL_LEN}, 400, "max_output_tokens"),
        (CREATE | {"generate": "no"}, 400, "generate"),
        (CREATE | {"stream": False}, 400, "stream"),
        (CREATE | {"background": True}, 400, "background"),
        (CREATE | {"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
    ],
)
def test_what_is_wrong_is_an_error_event_and_the_socket_goes_on(
    server: Server, message: Any, status: int, param: str | None
) -> None:
    lane = "bad" if isinstance(message, dict) and message.get("stream_id") == "bad" else None

    async def talk(socket: Socket) -> None:
        await socket.send(message)
        error = await socket.error(lane)
        assert (error.status, error.error.param) == (status, param)
        assert error.error.message and error.error.type
        await socket.create("the fox", stream=True, background=False, generate=True)
        assert (await socket.finish()).output_text == answer_text(server, "the fox")

    converse(server, talk)


def test_a_message_beyond_the_limit_closes_the_connection() -> None:
    with serve(max_body_bytes=2048) as server:

        async def talk(socket: Socket) -> None:
            await socket.create("é" * 1024)
            with pytest.raises(ConnectionClosed) as closed:
                await socket.receive()
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, "2048" in closed.value.rcvd.reason) == (1009, True)

        converse(server, talk)


def test_a_failure_on_the_device_fails_the_response_only() -> None:
    runner = fake_runner()
    with serve(runner) as server:

        async def talk(socket: Socket) -> None:
            runner.fail_next = "broken"
            await socket.create("hi")
            response = await socket.finish()
            assert socket.events[-1].type == "response.failed"
            assert response.error is not None and response.error.code == "server_error"
            await socket.create("more", previous_response_id=response.id)
            assert (await socket.error()).error.code == "previous_response_not_found"
            await socket.create("the fox")
            assert (await socket.finish()).output_text == answer_text(server, "the fox")

        converse(server, talk)


def test_while_the_model_loads_a_request_is_an_error_event() -> None:
    load_gate = threading.Event()
    with serve(fake_runner(load_gate=load_gate), ready=False) as server:

        async def talk(socket: Socket) -> None:
            await socket.create("hi")
            error = await socket.error()
            assert (error.status, error.error.code) == (503, "engine_not_ready")
            load_gate.set()
            await asyncio.to_thread(server.wait_ready)
            await socket.create("the fox")
            assert (await socket.finish()).output_text == answer_text(server, "the fox")

        converse(server, talk)


# --- the end of a connection, and slow ones --------------------------------------------------


def test_closing_mid_stream_frees_all_blocks_within_two_steps() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:

        async def talk(socket: Socket) -> None:
            for lane in ("a", "b", "c"):
                await socket.create("hi", stream_id=lane, max_output_tokens=300, ignore_eos=True)
                await socket.create("queued", stream_id=lane)
                await socket.receive_until("response.in_progress", lane=lane)
            gate.release(6)
            for lane in ("a", "b", "c"):
                if not any(e.type.endswith("text.delta") for e in socket.lane(lane)):
                    await socket.receive_until("response.output_text.delta", lane=lane)

        converse(server, talk)
        server.wait_until(lambda: server.engine.stats().request_success_total["abort"] == 3)
        gate.release(2)
        server.wait_idle()
        assert server.engine.stats().request_success_total["length"] == 0
        gate.release(1000)


def test_a_connection_that_breaks_mid_stream_frees_its_blocks() -> None:
    gate = threading.Semaphore(4)
    with serve(fake_runner(gate=gate)) as server:
        all_there_is = answer_text(server, "hi", 4)

        async def talk(socket: Socket) -> None:
            await socket.create("hi", max_output_tokens=300, ignore_eos=True, on_disconnect="abort")
            text = ""
            while text != all_there_is:  # then nothing is sent that could show the break
                text += (await socket.receive_until("response.output_text.delta")).delta
            socket.connection.transport.abort()

        converse(server, talk)
        server.wait_until(lambda: server.engine.stats().request_success_total["abort"] == 1)
        gate.release(1000)
        server.wait_idle()


def test_a_client_that_does_not_read_delays_nobody_and_gets_merged_deltas() -> None:
    with serve() as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(("127.0.0.1", server.port))
        lanes = [f"lane {i}" for i in range(8)]

        async def run() -> Socket:
            async with connected(server, sock=narrow, max_queue=1) as slow:
                for lane in lanes:
                    await slow.create(lane, stream_id=lane, max_output_tokens=400, ignore_eos=True)
                # All are generated, and hold no block, although nobody reads.
                await asyncio.to_thread(
                    server.wait_until,
                    lambda: server.engine.stats().request_success_total["length"] == len(lanes),
                )
                await asyncio.to_thread(server.wait_idle)
                for _ in lanes:
                    while (await slow.receive()).type not in TERMINAL:
                        pass
                return slow

        slow = asyncio.run(run())
        for lane in lanes:
            assert_in_order(slow.lane(lane))
            usage = slow.lane(lane)[-1].response.usage
            assert usage.output_tokens == 400
        num_deltas = [e.type for e in slow.events].count("response.output_text.delta")
        assert num_deltas < 400 * len(lanes) / 2


def test_a_server_that_stops_ends_its_connections_and_their_responses() -> None:
    gate = threading.Semaphore(4)
    with serve(fake_runner(gate=gate), grace_s=0.2) as server:

        async def talk(socket: Socket) -> None:
            for lane in ("a", "b"):
                await socket.create("hi", max_output_tokens=300, ignore_eos=True, stream_id=lane)
            await socket.create("waits", stream_id="a")
            await socket.receive_until("response.output_text.delta", lane="a")
            closing = asyncio.create_task(asyncio.to_thread(server.close))
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    await socket.receive()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
            gate.release(1000)
            await closing

        talked = converse(server, talk)
        for lane in ("a", "b"):
            [failed] = [event for event in talked.lane(lane) if event.type in ENDS]
            assert failed.type == "response.failed"
            assert "shutting down" in failed.response.error.message
        last = talked.lane("a")[-1]
        assert (last.type, last.status) == ("error", 503), "what waited was refused"
        assert server.engine.stats().request_success_total["error"] == 2


def test_a_server_that_stops_lets_responses_finish_and_refuses_new_ones() -> None:
    gate = threading.Semaphore(4)
    with serve(fake_runner(gate=gate), grace_s=DEADLINE_S) as server:

        async def talk(socket: Socket) -> None:
            await socket.create("the fox")
            await socket.receive_until("response.output_text.delta")
            closing = asyncio.create_task(asyncio.to_thread(server.close))
            await asyncio.to_thread(server.wait_until, lambda: server.engine.status == "draining")
            await socket.create("too late", stream_id="new")
            assert (await socket.error("new")).status == 503
            gate.release(1000)
            response = await socket.finish()
            assert response.output_text == answer_text(server, "the fox")
            with pytest.raises(ConnectionClosed) as closed:
                await socket.receive()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
            await closing

        converse(server, talk)
        assert server.engine.stats().request_success_total["error"] == 0


def test_text_that_is_not_utf8_closes_the_connection_and_logs_nothing(
    caplog: pytest.LogCaptureFixture, server: Server
) -> None:
    async def talk(socket: Socket) -> None:
        await socket.create("hi", max_output_tokens=100, ignore_eos=True)
        await socket.create([])
        await socket.connection.send(b"\xff\xfe", text=True)
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                await socket.receive()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1007

    converse(server, talk)
    server.wait_idle()
    assert caplog.records == []


# --- who may connect -------------------------------------------------------------------------


def test_a_foreign_origin_is_refused_and_an_allowed_one_is_not() -> None:
    async def refused(server: Server) -> int:
        with pytest.raises(InvalidStatus) as error:
            async with connected(server, origin="https://evil.example"):
                pass
        return error.value.response.status_code

    async def one(socket: Socket) -> None:
        await socket.create("hi", max_output_tokens=1)
        await socket.finish()

    with serve(allowed_origins=("https://good.example",)) as server:
        assert asyncio.run(refused(server)) == 403
        converse(server, one, origin="https://good.example")
        converse(server, one, origin=f"http://{server.host}")


@OWN_CLIENT_WARNING
def test_the_key_may_come_as_a_subprotocol_and_one_that_was_offered_is_chosen() -> None:
    async def chosen(server: Server, *offered: str) -> str | None:
        async with connected(server, subprotocols=offered) as socket:
            await socket.create("hi", max_output_tokens=1)
            await socket.finish()
            return socket.connection.subprotocol

    async def refused(server: Server, **options: Any) -> int:
        with pytest.raises(InvalidStatus) as error:
            async with connected(server, **options):
                pass
        return error.value.response.status_code

    key = "openai-insecure-api-key.sesame"
    with serve(api_key=("sesame",)) as server:
        assert asyncio.run(chosen(server, key)) == key
        assert asyncio.run(chosen(server, key, "realtime")) == "realtime"
        assert asyncio.run(refused(server)) == 401
        assert asyncio.run(refused(server, subprotocols=["openai-insecure-api-key.no"])) == 401
        with server.openai("sesame").responses.connect() as connection:
            connection.response.create(model=MODEL, input="hi", max_output_tokens=1)
            assert connection.recv().type == "response.created"
