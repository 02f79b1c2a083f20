"""Reasoning, calls of functions and structured text in responses.

The model says a script; its chat template says in which format it calls tools.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import openai
import pydantic
import pytest
from server.harness import MODEL, ScriptedRunner, Server, serve
from server.responses_client import create, stream
from server.test_tools import END, model

ARGUMENTS = {"city": "Oslo 🙂", "deep": {"quote": '"}]\\'}}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "description": "What it is."}

MESSAGE = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
REASONING = [part.replace("output_text", "reasoning_text") for part in MESSAGE]
CALLING = ["function_call_arguments.delta", "function_call_arguments.done"]


class Weather(pydantic.BaseModel):
    """The weather somewhere."""

    city: str


@contextmanager
def saying(text: str, kind: str = "both", **engine: Any) -> Iterator[Server]:
    """A server whose model of that kind says the text, and ends."""
    tokenizer = model(kind)
    script = [*tokenizer.encode(text), END]
    with serve(ScriptedRunner(script), engine={"tokenizer": tokenizer} | engine) as server:
        server.tokenizer = tokenizer
        yield server


def names(events: list[Any]) -> list[str]:
    """The events' types without what all have, those that repeat once."""
    types = (event.type.removeprefix("response.") for event in events)
    return [name for name, _ in groupby(types)]


def of_item(*parts: str) -> list[str]:
    return ["output_item.added", *parts, "output_item.done"]


def shown(response: Any) -> list[dict[str, Any]]:
    """The output without ids."""
    items = [item.model_dump(exclude_unset=True) for item in response.output]
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def test_reasoning_text_and_calls_are_items_of_their_own_in_openais_order() -> None:
    text = f"<think>\nhm, 日本\n</think>\n\nLet me see.\n{CALL}\n{OTHER}"
    with saying(text) as server:
        events = stream(server, tools=[TOOL], include=["reasoning.encrypted_content"])
        whole = create(server, tools=[TOOL])
    assert names(events) == [
        *("created", "in_progress"),
        *of_item(*REASONING),
        *of_item(*MESSAGE),
        *of_item(*CALLING),
        *of_item(*CALLING),
        "completed",
    ]
    final = events[-1].response
    assert [item.type for item in final.output] == [
        *("reasoning", "message", "function_call", "function_call"),
    ]
    reasoning, message, call, other = final.output
    assert reasoning.content[0].text == "hm, 日本" and reasoning.summary == []
    assert message.content[0].text.strip() == "Let me see."
    assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)
    assert json.loads(other.arguments) == {"city": "Rome"} and call.call_id != other.call_id
    assert {item.status for item in final.output} == {"completed"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert shown(whole) == shown(final)
    num_reasoning = len(server.tokenizer.encode("<think>\nhm, 日本\n</think>"))
    for response in (whole, final):
        assert response.usage.output_tokens_details.reasoning_tokens == num_reasoning
    assert final.tools[0].model_dump(exclude_none=True, by_alias=True) == TOOL


def test_deltas_of_each_item_joined_are_what_its_end_tells() -> None:
    with saying(f"<think>one</think>two{CALL}{OTHER}") as server:
        events = stream(server, tools=[TOOL])
    for item in events[-1].response.output:
        own = [event for event in events if getattr(event, "item_id", None) == item.id]
        deltas = [event.delta for event in own if event.type.endswith(".delta")]
        if item.type == "function_call":
            assert "".join(deltas) == item.arguments and len(deltas) > 1
            assert own[-1].arguments == item.arguments
        else:
            assert "".join(deltas) == item.content[0].text
        added, done = (
            event
            for event in events
            if event.type.startswith("response.output_item") and event.item.id == item.id
        )
        assert added.item.status == "in_progress" and done.item == item
        assert added.output_index == done.output_index == events[-1].response.output.index(item)


@pytest.mark.parametrize("cut", ["reasoning", "message", "function_call"])
def test_an_item_that_is_cut_is_incomplete_as_is_its_response(cut: str) -> None:
    said = {"reasoning": "<think>one two three", "message": "<think>one</think>two three"}
    said["function_call"] = CALL[:-30]
    with saying("".join(said[cut])) as server:
        num = len(server.tokenizer.encode(said[cut]))
        events = stream(server, tools=[TOOL], max_output_tokens=num)
    final = events[-1].response
    assert (final.status, final.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert final.output[-1].type == cut and final.output[-1].status == "incomplete"
    assert all(item.status == "completed" for item in final.output[:-1])


def test_without_tools_and_reasoning_marks_all_of_an_answer_is_text() -> None:
    with saying(f"one\n{CALL}", "hermes") as server:
        whole = create(server)
        refused = create(server, tools=[TOOL], tool_choice="none")
    assert whole.output_text == refused.output_text == f"one\n{CALL}"
    assert refused.tool_choice == "none"


def test_white_space_around_calls_is_no_message() -> None:
    with saying(f"<think>a</think>\n\n{CALL}\n\n{OTHER}\n") as server:
        calls = create(server, tools=[TOOL])
    with saying("<think>a</think>\n\n \n") as server:
        blank = create(server, tools=[TOOL])
    assert [item.type for item in calls.output] == [*("reasoning", *["function_call"] * 2)]
    assert [item.type for item in blank.output] == ["reasoning", "message"], "an answer, if empty"


def test_calls_after_the_first_are_left_out_where_there_may_be_one() -> None:
    with saying(f"{CALL}{OTHER}") as server:
        response = create(server, tools=[TOOL], parallel_tool_calls=False)
    assert [json.loads(item.arguments) for item in response.output] == [ARGUMENTS]
    assert response.parallel_tool_calls is False


@pytest.mark.parametrize("kind", ["both", "hermes"])
def test_log_probabilities_are_those_of_the_messages_text(kind: str) -> None:
    before = "<think>a</think>" if kind == "both" else ""
    with saying(f"{before}one <two> 日本{CALL}", kind) as server:
        asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "tools": [TOOL]}
        whole = create(server, **asked)
        events = stream(server, **asked)
    message = next(item for item in events[-1].response.output if item.type == "message")
    content = message.content[0]
    assert content.text == "one <two> 日本"
    assert b"".join(bytes(entry.bytes) for entry in content.logprobs) == content.text.encode()
    assert shown(whole) == shown(events[-1].response)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    told = [entry.token for event in deltas for entry in event.logprobs]
    assert told == [entry.token for entry in content.logprobs]


# --- what the model reads --------------------------------------------------------------------


def prompt_of(server: Server, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
    text = server.tokenizer.apply_chat_template(messages, **variables)
    return server.tokenizer.encode(text, add_special_tokens=False)


def test_a_call_is_answered_in_the_next_turn() -> None:
    with saying(f"<think>why</think>Wait.{CALL}") as server:
        first = create(server, input="weather?", tools=[TOOL])
        call = first.output[-1]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = create(
            server, input=[output], previous_response_id=first.id, tools=[TOOL], tool_choice="none"
        )
        replayed = [item.model_dump(exclude_none=True) for item in first.output]
        items = [{"role": "user", "content": "weather?"}, *replayed, output]
        third = create(server, input=items, tool_choice="none")
        messages = [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": "Wait.",
                "reasoning_content": "why",
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": "weather", "arguments": ARGUMENTS},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
        ]
        prompt = prompt_of(server, messages)
    assert second.usage.input_tokens == third.usage.input_tokens == len(prompt)
    assert second.usage.input_tokens_details.cached_tokens == 0


def test_tools_and_reasoning_effort_are_told_to_the_template() -> None:
    with saying("one") as server:
        plain = create(server).usage.input_tokens
        told = create(server, tools=[TOOL], chat_template_kwargs={"begin": "well,"})
        function = {k: v for k, v in TOOL.items() if k != "type"}
        tools = [{"type": "function", "function": function}]
        messages = [{"role": "user", "content": "the quick brown fox"}]
        prompt = prompt_of(server, messages, tools=tools, begin="well,")
        effort = create(server, reasoning={"effort": "low"})
    assert told.usage.input_tokens == len(prompt) > plain
    assert effort.reasoning.effort == "low"


# --- the official client ---------------------------------------------------------------------


def test_the_official_client_parses_calls_into_models() -> None:
    tool = openai.pydantic_function_tool(Weather)
    call = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    with saying(call) as server:
        client = server.openai()
        parsed = client.responses.parse(model=MODEL, input="weather?", tools=[tool])
        with client.responses.stream(model=MODEL, input="weather?", tools=[tool]) as helper:
            snapshots = [
                event.snapshot
                for event in helper
                if event.type == "response.function_call_arguments.delta"
            ]
            streamed = helper.get_final_response()

        async def run() -> Any:
            async with server.async_openai() as client:
                return await client.responses.parse(model=MODEL, input="weather?", tools=[tool])

        responses = [parsed, streamed, asyncio.run(run())]
    for response in responses:
        [item] = response.output
        assert item.type == "function_call" and item.parsed_arguments == Weather(city="Oslo")
    assert json.loads(snapshots[-1]) == {"city": "Oslo"}
