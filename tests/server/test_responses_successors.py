"""What becomes of a response that was steered: its inputs go into one response, or come back."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from server.harness import DEADLINE_S, MAX_MODEL_LEN, Server, fake_runner, serve
from server.responses_client import ENDS, Socket, answer_text, connected, converse
from server.test_responses_official import CALL, TOOL, saying
from server.test_responses_resume import resume
from server.test_responses_steering import LONG, steer

from streamkv.server.responses import turns
from streamkv.server.responses.writer import ResponseWriter


def test_a_successor_that_nobody_foresaw_to_fail_gives_the_input_back(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*arguments: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(turns, "open_successor", fail)

    async def talk(socket: Socket) -> None:
        await socket.create("one", credits=2, **LONG)
        created = await socket.receive_until("response.created")
        await socket.send(steer(created.response.id, "two"))
        await socket.send({"type": "response.grant", "credits": 100})
        failed = await socket.receive_until("response.steer.failed")
        assert (failed.error.code, failed.steer.input) == ("successor_creation_failed", "two")
        assert "broken" not in failed.error.message
        await socket.create("three")
        assert (await socket.finish()).output_text == answer_text(server, "three")

    converse(server, talk)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_input_that_waits_is_told_of_once_and_goes_into_one_response() -> None:
    with saying(CALL) as server:

        async def run() -> None:
            async with connected(server) as first, connected(server) as second:
                await first.create("x", tools=[TOOL], credits=2, max_output_tokens=200)
                created = await first.receive_until("response.created")
                stats = server.engine.stats
                await asyncio.to_thread(
                    server.wait_until, lambda: stats().request_success_total["stop"] == 1
                )
                response_id = created.response.id
                await first.send(steer(response_id, "one"))
                await first.send({"type": "response.grant", "credits": 999})
                pending = await first.receive_until("response.steer.pending")
                completed = next(e for e in first.events if e.type in ENDS)
                assert pending.sequence_number == completed.sequence_number + 1
                # The event is one of the response's: read again it is the same, and no other comes.
                for socket in (first, second):
                    await socket.send(resume(response_id, completed.sequence_number))
                    assert await socket.receive() == pending
                    await socket.send(resume(response_id, pending.sequence_number))
                [call] = [
                    item for item in completed.response.output if item.type == "function_call"
                ]
                output = {"type": "function_call_output", "call_id": call.call_id, "output": "20"}
                numbers = []
                for socket in (second, first):
                    goes_on = {"previous_response_id": response_id, "credits": 2}
                    await socket.create([output], **goes_on)
                    answer = await socket.receive()
                    assert answer.type == "response.created"
                    with server.client() as client:
                        items = client.get(f"/v1/responses/{answer.response.id}/input_items")
                    numbers.append(len(items.json()["data"]))
                assert numbers == [4, 3], "its input is in one of them"

        asyncio.run(run())


def test_an_event_after_the_end_comes_after_it_and_can_be_gone_on_from(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        await socket.create("one", max_output_tokens=3)
        num = (await socket.finish()) and len(socket.events)
        socket.events.clear()
        await socket.create("one", max_output_tokens=3, credits=num - 2)
        while len(socket.events) < num - 2:  # the answer has ended, two of its events wait
            await socket.receive()
        response_id = socket.events[0].response.id
        await socket.send(steer(response_id, "two"))
        await socket.create("after", stream_id="a")
        await socket.finish("a")
        await socket.send({"type": "response.grant", "credits": 9})
        failed = await socket.receive_until("response.steer.failed")
        assert failed.error.code == "response_not_active"
        events = socket.lane(None)
        assert [event.sequence_number for event in events] == list(range(num + 1))
        assert events[-2].type in ENDS and events[-1] is failed
        await socket.send(resume(response_id, failed.sequence_number - 1))
        assert await socket.receive() == failed

    converse(server, talk)


def test_credits_granted_while_a_successor_is_made_are_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, allowed = threading.Event(), threading.Event()
    open_successor = turns.open_successor

    async def wait(*arguments: Any) -> Any:
        begun.set()
        await asyncio.to_thread(allowed.wait)
        return await open_successor(*arguments)

    monkeypatch.setattr(turns, "open_successor", wait)
    with serve() as server:

        async def talk(socket: Socket) -> None:
            await socket.create("one", credits=2, **LONG)
            created = await socket.receive_until("response.created")
            await socket.send(steer(created.response.id, "two"))
            await socket.create("other", stream_id="b", max_output_tokens=1)
            await socket.finish("b")
            num = 1 + 5 * (server.engine.stats().generation_tokens_total > 1)
            await socket.send({"type": "response.grant", "credits": num})
            event = created
            while event.type not in ENDS:
                await socket.send({"type": "response.grant", "credits": 1})
                event = await socket.receive()
            await asyncio.to_thread(begun.wait, DEADLINE_S)
            await socket.send({"type": "response.grant", "credits": 1000})
            await socket.create("other", stream_id="b", max_output_tokens=1)
            await socket.finish("b")
            allowed.set()
            while (await socket.finish()).previous_response_id != created.response.id:
                pass

        try:
            converse(server, talk)
        finally:
            allowed.set()


def test_a_successor_of_a_conversation_that_may_be_cut_is_cut(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        text = "the fox " * 90
        fields = {"max_output_tokens": 40, "min_tokens": 40, "truncation": "auto"}
        await socket.create(text, credits=2, **fields)
        created = await socket.receive_until("response.created")
        await asyncio.to_thread(
            server.wait_until, lambda: server.engine.stats().num_requests_running == 0
        )
        await socket.send(steer(created.response.id, text))
        await socket.send({"type": "response.grant", "credits": 999})
        first = await socket.finish()
        assert first.usage.input_tokens < MAX_MODEL_LEN < 2 * first.usage.input_tokens
        second = await socket.finish()
        assert second.previous_response_id == first.id
        assert second.output_text == answer_text(server, text, 40)

    converse(server, talk)


def test_input_of_several_lines_is_one_line_of_a_stream() -> None:
    with serve() as server:

        async def talk(socket: Socket) -> None:
            await socket.create("one", credits=2, **LONG)
            created = await socket.receive_until("response.created")
            event = json.dumps(
                steer(created.response.id, [{"type": "message", "role": "user", "content": "x"}]),
                indent=2,
            )
            await socket.send({"type": "response.grant", "credits": 1000})
            await socket.finish()
            await socket.send(event.replace("\n", "\r\n"))
            await socket.receive_until("response.steer.failed")
            ids.append(created.response.id)

        ids: list[str] = []
        socket = converse(server, talk)
        with server.client() as client:
            answer = client.get(f"/v1/responses/{ids[0]}", params={"stream": True})
        blocks = answer.text.removesuffix("\n\n").split("\n\n")
        told = [json.loads(block.partition("data: ")[2]) for block in blocks]
        assert [event["type"] for event in told] == [event.type for event in socket.events]
        assert "\r" not in answer.text


def test_steering_does_not_write_down_what_there_is_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(writer: ResponseWriter) -> None:
        raise AssertionError("the output of a long response takes long to build")

    gate = threading.Semaphore(12)
    with serve(fake_runner(gate=gate)) as server:
        monkeypatch.setattr(ResponseWriter, "response_so_far", fail)

        async def talk(socket: Socket) -> None:
            await socket.create("one", **LONG)
            created = await socket.receive_until("response.created")
            await socket.receive_until("response.output_text.delta")
            await socket.send(steer(created.response.id, "two"))
            assert (await socket.finish()).incomplete_details.reason == "steered"
            created = await socket.receive_until("response.created")
            await socket.send({"type": "response.cancel"})
            await socket.send(steer(created.response.id, "three"))
            failed = await socket.receive_until("response.steer.failed")
            assert failed.error.code == "response_not_active"

        converse(server, talk)
        gate.release(1000)
