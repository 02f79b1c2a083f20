"""The official client's Responses against the default model: HTTP, SSE, and its WebSockets.

Greedy: the text is what a chat of the same messages says, by whatever way it was asked for.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from clients.official import async_client
from clients.real_server import DEADLINE_S, LONG, MODEL, QUESTION, WEATHER, RealServer
from openai.lib.responses_websocket import (
    AsyncResponsesWebSocketSession,
    ResponsesWebSocketAccumulator,
    ResponsesWebSocketLimits,
    ResponsesWebSocketSession,
)

pytestmark = pytest.mark.timeout(60)

SEA = QUESTION[0]["content"]
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
GREEDY = {"model": MODEL, "temperature": 0}
SOON = "a"  # what the model says to this ends by itself
LIMITS = ResponsesWebSocketLimits(
    max_lanes=4,
    max_events_per_lane=1000,
    max_events=3000,
    max_bytes_per_lane=1 << 20,
    max_bytes=1 << 22,
)


# --- HTTP -------------------------------------------------------------------------------------


def test_a_response_whole_and_streamed_is_what_a_chat_says(
    real: RealServer, client: openai.OpenAI
) -> None:
    expected = real.chat_text(20)
    whole = client.responses.create(input=SEA, max_output_tokens=20, **GREEDY)
    assert whole.output_text == expected
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None and whole.usage.output_tokens == 20
    with client.responses.create(input=QUESTION, max_output_tokens=20, stream=True, **GREEDY) as (
        stream
    ):
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected and len(deltas) > 10
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == expected


def test_the_stream_helper_and_the_async_client_give_the_same(
    real: RealServer, client: openai.OpenAI
) -> None:
    expected = real.chat_text(12)
    with client.responses.stream(input=SOON, max_output_tokens=40, **GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text == "".join(deltas)
    said = real.chat_text(40, messages=[{"role": "user", "content": SOON}])
    assert final.output_text == said

    async def main() -> list[str]:
        async with async_client(real) as one:
            return [
                response.output_text
                for response in await asyncio.gather(
                    *(
                        one.responses.create(input=SEA, max_output_tokens=12, **GREEDY)
                        for _ in range(4)
                    )
                )
            ]

    assert asyncio.run(main()) == [expected] * 4


def test_a_response_is_kept_read_gone_on_from_and_deleted(
    real: RealServer, client: openai.OpenAI
) -> None:
    first = client.responses.create(input=SEA, max_output_tokens=8, **GREEDY)
    kept = client.responses.retrieve(first.id)
    assert kept.output_text == first.output_text and kept.status == first.status
    items = client.responses.input_items.list(first.id).data
    assert [(item.role, item.content[0].text) for item in items] == [("user", SEA)]
    second = client.responses.create(
        input="And the moon?", previous_response_id=first.id, max_output_tokens=8, **GREEDY
    )
    turns = [
        *QUESTION,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And the moon?"},
    ]
    assert second.output_text == real.chat_text(8, messages=turns)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(input="x", previous_response_id=first.id, **GREEDY)
    assert gone.value.param == "previous_response_id"
    secret = client.responses.create(input=SEA, max_output_tokens=2, store=False, **GREEDY)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(secret.id)


def test_a_response_in_the_background_is_polled_streamed_and_cancelled(
    real: RealServer, client: openai.OpenAI
) -> None:
    one = client.responses.create(input=SEA, max_output_tokens=12, background=True, **GREEDY)
    assert one.status in ("queued", "in_progress")
    with client.responses.retrieve(one.id, stream=True, starting_after=1) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(2, 2 + len(events)))
    assert client.responses.retrieve(one.id).output_text == real.chat_text(12)
    endless = client.responses.create(
        input=SEA,
        max_output_tokens=LONG,
        background=True,
        extra_body={"ignore_eos": True},
        **GREEDY,
    )
    cancelled = client.responses.cancel(endless.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(endless.id).status == "cancelled"
    real.wait_idle()


def test_the_tokens_of_an_input_are_counted(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input=SEA)
    whole = client.responses.create(input=SEA, max_output_tokens=1, **GREEDY)
    assert whole.usage is not None and counted.input_tokens == whole.usage.input_tokens > 5


class Trip(pydantic.BaseModel):
    """What `parse` makes of an answer."""

    city: Literal["Paris", "Tokyo"]
    days: int


def test_an_answer_is_parsed_into_a_model_of_pydantic(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(input=SEA, text_format=Trip, max_output_tokens=60, **GREEDY)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Trip)
    assert Trip.model_validate_json(parsed.output_text) == parsed.output_parsed


def test_a_function_is_called_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {"input": SEA, "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 80}
    whole = client.responses.create(**asked, **GREEDY)
    calls = [item for item in whole.output if item.type == "function_call"]
    assert calls and all(call.name == "get_weather" and call.call_id for call in calls)
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), WEATHER)
    arguments: dict[int, str] = {}
    done: dict[int, str] = {}
    with client.responses.create(**asked, stream=True, **GREEDY) as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                arguments[event.output_index] = arguments.get(event.output_index, "") + event.delta
            elif event.type == "response.function_call_arguments.done":
                done[event.output_index] = event.arguments
    assert arguments == done
    assert [done[index] for index in sorted(done)] == [call.arguments for call in calls]


def test_errors_have_the_class_the_status_and_the_field(client: openai.OpenAI) -> None:
    create = client.responses.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(input=SEA, model=MODEL, temperature=-1)
    assert (bad.value.status_code, bad.value.param) == (400, "temperature")
    with pytest.raises(openai.NotFoundError) as unknown:
        create(input=SEA, model="gpt-none")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")


# --- WebSockets -------------------------------------------------------------------------------


def test_lanes_of_one_socket_say_what_chats_say(real: RealServer) -> None:
    questions = {"a": SEA, "b": "Tell me about the moon.", "c": "Say hi."}

    async def main() -> dict[str, str]:
        texts = dict.fromkeys(questions, "")
        async with async_client(real) as one, one.responses.connect() as connection:
            for lane, question in questions.items():
                await connection.response.create(
                    input=question, stream_id=lane, max_output_tokens=12, **GREEDY
                )
            open_lanes = set(questions)
            while open_lanes:
                event = await connection.recv()
                if event.type == "response.output_text.delta":
                    texts[event.stream_id] += event.delta
                elif event.type in ENDS:
                    open_lanes.remove(event.stream_id)
        return texts

    texts = asyncio.run(main())
    for lane, question in questions.items():
        asked = [{"role": "user", "content": question}]
        assert texts[lane] == real.chat_text(12, messages=asked)


def read_response(connection: Any, accumulator: ResponsesWebSocketAccumulator) -> Any:
    """The next response of a sync connection, as the package's accumulator sees it."""
    while True:
        event = connection.recv()
        accumulator.add_event(event)
        if event.type in ENDS:
            return accumulator.get_final_response()


def test_the_sync_client_goes_on_from_a_response_on_the_same_socket(
    real: RealServer, client: openai.OpenAI
) -> None:
    accumulator = ResponsesWebSocketAccumulator()
    with client.responses.connect() as connection:
        connection.response.create(input=SEA, max_output_tokens=8, **GREEDY)
        first = read_response(connection, accumulator)
        assert first.output_text == real.chat_text(8) == accumulator.snapshot().output_text
        accumulator.reset()
        connection.response.create(
            input="And the moon?", previous_response_id=first.id, max_output_tokens=8, **GREEDY
        )
        second = read_response(connection, accumulator)
    turns = [
        *QUESTION,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And the moon?"},
    ]
    assert second.output_text == real.chat_text(8, messages=turns)
    assert second.previous_response_id == first.id


def test_sessions_of_the_package_route_lanes_and_collect_responses(
    real: RealServer, client: openai.OpenAI
) -> None:
    create = {"type": "response.create", "input": SEA, "max_output_tokens": 10, **GREEDY}

    async def main() -> list[str]:
        async with async_client(real) as one, one.responses.connect() as connection:
            async with AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session:
                lanes = [session.lane(name) for name in ("a", "b")] + [session.default]
                for lane in lanes:
                    await lane.send(create)
                return [(await lane.get_final_response()).output_text for lane in lanes]

    assert asyncio.run(main()) == [real.chat_text(10)] * 3
    with client.responses.connect() as connection:
        with ResponsesWebSocketSession(connection, limits=LIMITS) as session:
            lane = session.lane("one")
            lane.send(create)
            assert lane.get_final_response(timeout=DEADLINE_S).output_text == real.chat_text(10)


def test_a_response_is_steered_and_its_successor_answers_the_new_input(
    real: RealServer, client: openai.OpenAI
) -> None:
    with client.responses.connect() as connection:
        connection.response.create(
            input="Count from one to a thousand.", max_output_tokens=600, **GREEDY
        )
        created = connection.recv()
        while connection.recv().type != "response.output_text.delta":
            pass
        connection.response.steer(input="Stop. Say hi.", previous_response_id=created.response.id)
        kinds, ends = [], []
        while len(ends) < 2:
            event = connection.recv()
            kinds.append(event.type)
            if event.type in ENDS:
                ends.append(event.response)
    assert "response.steer.accepted" in kinds
    assert ends[0].status == "incomplete"
    assert ends[0].incomplete_details.reason == "steered"
    assert ends[1].previous_response_id == ends[0].id == created.response.id
    turns = [
        {"role": "user", "content": "Count from one to a thousand."},
        {"role": "assistant", "content": ends[0].output_text},
        {"role": "user", "content": "Stop. Say hi."},
    ]
    assert ends[1].output_text == real.chat_text(600, messages=turns)


def test_warming_up_computes_a_prompt_and_says_nothing(
    real: RealServer, client: openai.OpenAI
) -> None:
    unusual = "Zebras, quartz and nymphs: " * 12
    with client.responses.connect() as connection:
        connection.response.create(input=unusual, generate=False, **GREEDY)
        warm = read_response(connection, ResponsesWebSocketAccumulator())
        assert warm.output_text == ""
        connection.response.create(input=unusual, max_output_tokens=4, **GREEDY)
        told = read_response(connection, ResponsesWebSocketAccumulator())
    assert told.usage.input_tokens_details.cached_tokens > 60


def test_errors_on_a_socket_are_events_and_it_stays_open(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        connection.response.create(input=SEA, model=MODEL, temperature=-1, stream_id="lane")
        error = connection.recv()
        assert (error.type, error.status, error.stream_id) == ("error", 400, "lane")
        assert error.error.param == "temperature"
        connection.response.create(input=SEA, max_output_tokens=2, **GREEDY)
        assert read_response(connection, ResponsesWebSocketAccumulator()).output_text


def test_a_socket_that_is_closed_leaves_nothing_behind(
    real: RealServer, client: openai.OpenAI
) -> None:
    with client.responses.connect() as connection:
        for lane in ("a", "b", None):
            connection.response.create(
                input=SEA, max_output_tokens=LONG, **({"stream_id": lane} if lane else {}), **GREEDY
            )
        while connection.recv().type != "response.output_text.delta":
            pass
    real.wait_idle()
