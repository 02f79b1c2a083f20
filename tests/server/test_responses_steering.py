"""Steering a response on the WebSocket: `response.steer` and what follows it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from openai.types.responses import Response
from server.harness import MODEL, ScriptedRunner, Server, fake_runner, serve
from server.responses_client import ENDS, Socket, answer_text, converse, text_of
from server.test_tools import model
from tiny import tiny_tokenizer

from streamkv.server.responses.steering import MAX_PENDING_STEERS

LONG = {"max_output_tokens": 200, "min_tokens": 200}


def steer(response_id: str, text: Any) -> dict[str, Any]:
    return {"type": "response.steer", "previous_response_id": response_id, "input": text}


def turn_change(server: Server, *texts: str) -> list[int]:
    """What the chat template writes between an answer and the next."""
    asked = "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in texts)
    change = f"<|im_end|>\n{asked}<|im_start|>assistant\n"
    return server.tokenizer.encode(change, add_special_tokens=False)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_steered_response_ends_and_its_successor_goes_on_from_its_very_tokens(
    async_scheduling: bool,
) -> None:
    gate = threading.Semaphore(50)
    engine = {"async_scheduling": async_scheduling}
    with serve(fake_runner(gate=gate), engine=engine) as server:

        async def talk(socket: Socket) -> None:
            await socket.create("tell me", stream_id="a", **LONG)
            await socket.create("after", stream_id="a", max_output_tokens=2)
            created = await socket.receive_until("response.created", lane="a")
            while len(text_of(socket.events)) < 60:
                await socket.receive_until("response.output_text.delta", lane="a")
            await socket.send(steer(created.response.id, "shorter"))
            accepted = await socket.receive_until("response.steer.accepted", lane="a")
            assert accepted.steer.previous_response_id == created.response.id
            first = await socket.finish("a")
            assert (first.status, first.id) == ("incomplete", created.response.id)
            assert first.incomplete_details is not None
            assert first.incomplete_details.reason == "steered"
            gate.release(1000)
            successor = await socket.receive_until("response.created", lane="a")
            assert successor.response.previous_response_id == first.id
            assert successor.response.max_output_tokens == LONG["max_output_tokens"]
            second = await socket.finish("a")
            assert second.id == successor.response.id

            prompt = server.chat_prompt(user("tell me"))
            num_output = first.usage.output_tokens
            output = server.answer(prompt, num_output, min_tokens=200)
            assert text_of(socket.events) == first.output_text + second.output_text
            assert first.output_text == server.text(output)
            continued = [*prompt, *output, *turn_change(server, "shorter")]
            assert second.output_text == server.text(server.answer(continued, 200, min_tokens=200))
            assert second.usage.input_tokens == len(continued)
            cached = second.usage.input_tokens_details.cached_tokens
            num_computed = len(prompt) + num_output - 1
            assert cached >= num_computed // 16 * 16 > len(prompt), "all full blocks of both"
            assert (await socket.finish("a")).output_text == answer_text(server, "after", 2)

        socket = converse(server, talk)
        events = socket.lane("a")
        assert len(events) == len(socket.events)
        ends = [i for i, event in enumerate(events) if event.type in ENDS]
        for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
            numbers = [event.sequence_number for event in events[start : end + 1]]
            assert numbers == list(range(len(numbers))), "the acknowledgement is one of them"
        server.wait_idle()


def test_several_inputs_go_into_one_successor_in_the_order_in_which_they_came() -> None:
    gate = threading.Semaphore(12)
    with serve(fake_runner(gate=gate)) as server:

        async def talk(socket: Socket) -> None:
            await socket.create("tell me", **LONG)
            created = await socket.receive_until("response.created")
            await socket.receive_until("response.output_text.delta")
            message = {"type": "message", "role": "user", "content": "two"}
            part = {"role": "user", "content": [{"type": "input_text", "text": "three"}]}
            socket.send_together(
                steer(created.response.id, "one"), steer(created.response.id, [message, part])
            )
            first = await socket.finish()
            gate.release(1000)
            second = await socket.finish()
            accepted = [e for e in socket.events if e.type == "response.steer.accepted"]
            assert len({event.steer.id for event in accepted}) == 2
            assert [event.type for event in socket.events].count("response.created") == 2
            prompt = server.chat_prompt(user("tell me"))
            output = server.answer(prompt, first.usage.output_tokens, min_tokens=200)
            continued = [*prompt, *output, *turn_change(server, "one", "two", "three")]
            text = server.text(server.answer(continued, 200, min_tokens=200))
            assert second.output_text == text

        converse(server, talk)


def test_a_response_that_is_steered_before_its_first_token_has_no_empty_answer() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:

        async def talk(socket: Socket) -> None:
            await socket.create("one", stream_id="a", instructions="be kind")
            created = await socket.receive_until("response.created", lane="a")
            await socket.send(steer(created.response.id, "two"))
            first = await socket.finish("a")
            assert (first.output, first.status) == ([], "incomplete")
            gate.release(1000)
            second = await socket.finish("a")
            system = {"role": "system", "content": "be kind"}
            prompt = server.chat_prompt(system, user("one"), user("two"))
            assert second.output_text == server.text(server.answer(prompt, 8))
            assert second.instructions == "be kind", "settings are inherited"

        converse(server, talk)


def test_a_successor_can_be_steered_and_gone_on_from() -> None:
    gate = threading.Semaphore(8)
    with serve(fake_runner(gate=gate)) as server:

        async def talk(socket: Socket) -> None:
            await socket.create("one", store=False, **LONG)
            ids = []
            for text in ("two", "three"):
                created = await socket.receive_until("response.created")
                await socket.receive_until("response.output_text.delta")
                ids.append(created.response.id)
                await socket.send(steer(created.response.id, text))
                assert (await socket.finish()).id == created.response.id
                gate.release(8)
            created = await socket.receive_until("response.created")
            assert created.response.previous_response_id == ids[1]
            gate.release(1000)
            last = await socket.finish()
            assert last.status == "incomplete" and last.incomplete_details is not None
            assert last.incomplete_details.reason == "max_output_tokens"
            await socket.create("more", previous_response_id=last.id)
            assert (await socket.finish()).previous_response_id == last.id

        converse(server, talk)


def test_a_response_that_completes_by_itself_meanwhile_has_its_successor_too() -> None:
    with serve() as server:

        async def talk(socket: Socket) -> None:
            # With two credits nothing is read of its output until it is all there.
            await socket.create("one", credits=2, stop_token_ids=[*range(339)])
            created = await socket.receive_until("response.created")
            await socket.receive_until("response.in_progress")
            server.wait_until(lambda: server.engine.stats().request_success_total["stop"] == 1)
            await socket.send(steer(created.response.id, "two"))
            await socket.send({"type": "response.grant", "credits": 1000})
            first = await socket.finish()
            assert (first.status, first.usage.output_tokens) == ("completed", 1)
            successor = await socket.receive_until("response.created")
            assert successor.response.previous_response_id == first.id
            prompt = server.chat_prompt(user("one"))
            output = server.answer(prompt, 1)
            continued = [*prompt, *output, *turn_change(server, "two")]
            second = await socket.finish()
            assert second.output_text == server.text(server.answer(continued, 1))

        converse(server, talk)


async def steer_while_unread(
    socket: Socket, server: Server, **fields: Any
) -> tuple[Response, Response]:
    """A response that was steered when some of it was there, and its successor."""
    await socket.create("one", credits=2, **fields)
    created = await socket.receive_until("response.created")
    await asyncio.to_thread(
        server.wait_until, lambda: server.engine.stats().generation_tokens_total > 12
    )
    await socket.send(steer(created.response.id, "two"))
    await socket.send({"type": "response.grant", "credits": 9999})
    return await socket.finish(), await socket.finish()


def test_reasoning_that_was_cut_is_closed_before_the_next_turn() -> None:
    tokenizer = model("reasoning")
    script = tokenizer.encode("<think>what the dog is, and then the fox, and then the sun")
    engine = {"tokenizer": tokenizer}
    with serve(ScriptedRunner(script), engine=engine) as server:

        async def talk(socket: Socket) -> None:
            first, second = await steer_while_unread(socket, server, max_output_tokens=100)
            assert [item.type for item in first.output] == ["reasoning"]
            assert first.output[0].status == "incomplete"
            turn = "</think><|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
            assert first.usage is not None and second.usage is not None
            num_before = first.usage.input_tokens + first.usage.output_tokens
            num_turn = len(tokenizer.encode(turn, add_special_tokens=False))
            assert second.usage.input_tokens == num_before + num_turn

        converse(server, talk)


def test_where_the_template_shows_no_answer_the_conversation_is_written_anew() -> None:
    template = "{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
    tokenizer = tiny_tokenizer(**{"tokenizer.chat_template": template})
    with serve(engine={"tokenizer": tokenizer}) as server:

        async def talk(socket: Socket) -> None:
            first, second = await steer_while_unread(socket, server, **LONG)
            assert first.status == "incomplete" and second.usage is not None
            prompt = tokenizer.encode("[one][two]")
            assert second.usage.input_tokens == len(prompt)
            text = server.text(server.answer(prompt, 200, min_tokens=200))
            assert second.output_text == text

        converse(server, talk)


# --- what can't be done ----------------------------------------------------------------------


async def failure(socket: Socket, lane: str | None = None) -> Any:
    return await socket.receive_until("response.steer.failed", lane=lane)


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("", "input"),
        (5, "input"),
        ([], "input"),
        ([{}], "input[0]"),
        (["a"], "input[0]"),
        ([{"role": "system", "content": "x"}], "input[0]"),
        ([{"type": "function_call_output", "call_id": "c", "output": "x"}], "input[0]"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"role": "user"}], "input[0].content"),
    ],
)
def test_what_is_no_input_is_an_error_and_the_response_goes_on(
    server: Server, text: Any, param: str
) -> None:
    async def talk(socket: Socket) -> None:
        await socket.create("one", stream_id="a", credits=2, max_output_tokens=4)
        created = await socket.receive_until("response.created", lane="a")
        await socket.send(steer(created.response.id, text))
        error = await socket.error()
        assert (error.status, error.error.param) == (400, param)
        await socket.send({"type": "response.grant", "stream_id": "a", "credits": 100})
        assert (await socket.finish("a")).output_text == answer_text(server, "one", 4)

    converse(server, talk)


def test_messages_come_back_as_the_official_types_have_them(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        await socket.send(steer("resp_unknown", [user("one"), user("two")]))
        given = [(one.type, one.content) for one in (await failure(socket)).steer.input]
        assert given == [("message", "one"), ("message", "two")]

    converse(server, talk)


def test_a_refusal_behind_a_response_is_numbered_and_kept_with_it(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        options = {"max_output_tokens": 3, "stream_options": {"resumable": True}}
        await socket.create("one", stream_id="a", **options)
        response = await socket.finish("a")
        last = socket.events[-1].sequence_number
        await socket.send(steer(response.id, "hi"))
        assert (await failure(socket, "a")).sequence_number == last + 1
        resume = {"type": "response.resume", "response_id": response.id, "starting_after": last}
        await socket.send(resume)
        assert (await failure(socket, "a")).sequence_number == last + 1

    converse(server, talk)


def test_a_response_can_be_steered_and_cancelled_by_its_name_right_behind_its_request(
    server: Server,
) -> None:
    async def talk(socket: Socket) -> None:
        body = {"type": "response.create", "input": "one", "request_id": "mine", "temperature": 0}
        body |= {"stream_id": "a", "max_output_tokens": 100}
        socket.send_together(body, steer("resp_mine", "two"))
        await socket.receive_until("response.steer.accepted", lane="a")
        assert (await socket.finish("a")).id == "resp_mine"
        assert (await socket.finish("a")).previous_response_id == "resp_mine"
        named = body | {"request_id": "other"}
        socket.send_together(named, {"type": "response.cancel", "response_id": "resp_other"})
        assert (await socket.finish("a")).status == "cancelled"
        socket.send_together(named | {"top_p": 7}, steer("resp_other", "two"))
        assert (await socket.error("a")).error.param == "top_p"
        assert (await failure(socket, "a")).error.code == "response_not_active"

    converse(server, talk)


def test_a_response_that_does_not_run_here_cannot_be_steered(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        await socket.send(steer("resp_unknown", "hi"))
        failed = await failure(socket)
        assert (failed.error.code, failed.steer.input) == ("response_not_found", "hi")
        await socket.create("one", stream_id="a", max_output_tokens=3)
        incomplete = await socket.finish("a")
        await socket.send(steer(incomplete.id, "hi"))
        assert (await failure(socket, "a")).error.code == "response_not_active"
        await socket.create("one", stream_id="a", stop_token_ids=[*range(339)])
        await socket.send(steer((await socket.finish("a")).id, "hi"))
        assert (await failure(socket, "a")).error.code == "response_already_completed"
        await socket.create("one", stream_id="a", best_of=2, credits=2)
        created = await socket.receive_until("response.created", lane="a")
        await socket.send(steer(created.response.id, "hi"))
        await socket.send({"type": "response.grant", "stream_id": "a", "credits": 100})
        assert (await failure(socket, "a")).error.code == "steering_not_supported"
        await socket.finish("a")

    converse(server, talk)


def test_input_that_waits_is_bounded(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        await socket.create("one", credits=2)
        created = await socket.receive_until("response.created")
        for number in range(MAX_PENDING_STEERS + 1):
            await socket.send(steer(created.response.id, str(number)))
        await socket.send({"type": "response.grant", "credits": 10_000})
        failed = await failure(socket)
        assert failed.error.code == "too_many_pending_steers"
        assert failed.steer.input == str(MAX_PENDING_STEERS)
        await socket.finish()
        assert (await socket.finish()).previous_response_id == created.response.id
        accepted = [e for e in socket.events if e.type == "response.steer.accepted"]
        assert len(accepted) == MAX_PENDING_STEERS

    converse(server, talk)


def test_what_cannot_go_into_a_successor_comes_back(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        long = "the fox " * 600
        await socket.create("one", credits=2, stream_id="a", max_output_tokens=3)
        created = await socket.receive_until("response.created", lane="a")
        await socket.send(steer(created.response.id, long))
        await socket.send({"type": "response.grant", "stream_id": "a", "credits": 100})
        accepted = await socket.receive_until("response.steer.accepted", lane="a")
        assert (await socket.finish("a")).status == "incomplete"
        failed = await failure(socket, "a")
        assert failed.error.code == "successor_creation_failed"
        assert (failed.steer.id, failed.steer.input) == (accepted.steer.id, long)
        await socket.create("one", stream_id="a", model=MODEL)
        assert (await socket.finish("a")).output_text == answer_text(server, "one")

    converse(server, talk)


def test_a_response_that_was_cancelled_is_steered_no_more(server: Server) -> None:
    async def talk(socket: Socket) -> None:
        await socket.create("one", credits=2, stream_id="a", **LONG)
        created = await socket.receive_until("response.created", lane="a")
        await socket.send({"type": "response.cancel", "stream_id": "a"})
        await socket.send(steer(created.response.id, "two"))
        await socket.send({"type": "response.grant", "stream_id": "a", "credits": 100})
        assert (await failure(socket, "a")).error.code == "response_not_active"
        assert (await socket.finish("a")).status == "cancelled"

    converse(server, talk)
