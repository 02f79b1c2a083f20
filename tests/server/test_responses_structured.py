"""Text and calls that must match a schema, in responses. The model babbles: its grammar alone makes
it write JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from server.harness import MODEL, Server
from server.responses_client import converse, create, stream, text_of
from server.test_structured import SCHEMA, babbling

FORMAT = {"type": "json_schema", "name": "pet", "schema": SCHEMA, "strict": True}
TOOL = {"type": "function", "name": "feed", "parameters": SCHEMA}
LONG = {"max_output_tokens": 400}


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = pydantic.Field(ge=0, le=9)


@pytest.fixture(scope="module")
def masked() -> Iterator[Server]:
    with babbling() as running:
        yield running
        running.wait_idle()
        assert running.runner.violations == []


@pytest.fixture(scope="module")
def calling() -> Iterator[Server]:
    with babbling("hermes") as running:
        yield running
        running.wait_idle()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"text": {"format": FORMAT}}, "json_schema"),
        ({"text": {"format": FORMAT | {"strict": False}}}, "json_schema"),
        ({"text": {"format": FORMAT}, "structured_outputs": {"json": SCHEMA}}, "json_schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "text"),
        ({"guided_json": SCHEMA}, "text"),
    ],
)
def test_text_matches_the_schema(masked: Server, asked: dict[str, Any], field: str) -> None:
    whole = create(masked, **LONG, **asked)
    events = stream(masked, **LONG, **asked)
    for response in (whole, events[-1].response):
        assert response.status == "completed", response
        jsonschema.validate(json.loads(response.output_text), SCHEMA)
        assert response.text.format.type == field
    assert text_of(events) == whole.output_text
    if field == "json_schema":
        told = whole.text.format.model_dump(by_alias=True, exclude_unset=True)
        assert told == asked["text"]["format"]


def test_text_may_be_any_object(masked: Server) -> None:
    response = create(masked, text={"format": {"type": "json_object"}}, max_output_tokens=900)
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text), dict)
    assert response.output_text.lstrip().startswith("{")
    assert response.text.format.type == "json_object"


def test_the_official_client_parses_text_into_models(masked: Server) -> None:
    client = masked.openai()
    body: dict[str, Any] = {"model": MODEL, "input": "a pet", "text_format": Pet, "temperature": 0}
    parsed = client.responses.parse(**body)
    with client.responses.stream(**body) as helper:
        done = [event for event in helper if event.type == "response.output_text.done"]
        streamed = helper.get_final_response()

    async def run() -> Any:
        async with masked.async_openai() as client:
            return await client.responses.parse(**body)

    for response in (parsed, streamed, asyncio.run(run())):
        assert isinstance(response.output_parsed, Pet)
    assert done[0].parsed == streamed.output_parsed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "feed"}])
def test_calls_that_are_asked_for_match_their_schema(calling: Server, choice: Any) -> None:
    other = {"type": "function", "name": "pet", "parameters": SCHEMA}
    events = stream(calling, tools=[TOOL, other], tool_choice=choice, **LONG)
    response = events[-1].response
    assert response.status == "completed"
    assert {item.type for item in response.output} == {"function_call"}
    for item in response.output:
        jsonschema.validate(json.loads(item.arguments), SCHEMA)
        assert item.name in ("feed", "pet") if choice == "required" else item.name == "feed"
    told = response.tool_choice
    assert told == choice or told.model_dump() == choice


@pytest.mark.parametrize("num_tokens", [3, 8])
def test_a_call_that_is_asked_for_and_cut_off_is_no_text(calling: Server, num_tokens: int) -> None:
    asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    events = stream(calling, **asked, max_output_tokens=num_tokens)
    whole = create(calling, **asked, max_output_tokens=num_tokens)
    for response in (whole, events[-1].response):
        assert response.status == "incomplete"
        assert response.output_text == ""
    assert text_of(events) == ""


def test_of_allowed_tools_one_is_called(calling: Server) -> None:
    other = {"type": "function", "name": "pet", "parameters": SCHEMA}
    allowed = {"type": "function", "name": "pet"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [allowed]}
    response = create(calling, tools=[TOOL, other], tool_choice=choice, **LONG)
    assert {item.name for item in response.output} == {"pet"}  # type: ignore[union-attr]
    assert response.tool_choice.model_dump() == choice  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("text.format", {"text": {"format": FORMAT | {"schema": {"type": "no such type"}}}}),
        ("text.format", {"text": {"format": FORMAT | {"schema": 7}}}),
        ("guided_regex", {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"}),
        ("structured_outputs", {"structured_outputs": {"regex": "("}}),
        (
            "tools[0].parameters",
            {"tools": [TOOL | {"parameters": {"type": "x"}}], "tool_choice": "required"},
        ),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(
    masked: Server, param: str, body: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        masked.openai().responses.create(model=MODEL, input="hi", extra_body=body)
    assert refused.value.param == param and str(refused.value)

    async def talk(socket: Any) -> None:
        await socket.create("hi", stream_id="a", **body)
        error = await socket.error("a")
        assert (error.status, error.error.param) == (400, param)

    converse(masked, talk)


def test_a_steered_response_is_kept_to_its_schema_by_its_successor(masked: Server) -> None:
    async def talk(socket: Any) -> None:
        await socket.create("a pet", credits=4, text={"format": FORMAT}, **LONG)
        created = await socket.receive_until("response.created")
        steer = {"type": "response.steer", "previous_response_id": created.response.id}
        await socket.send(steer | {"input": "another"})
        await socket.send({"type": "response.grant", "credits": 9999})
        await socket.finish()
        successor = await socket.finish()
        assert successor.previous_response_id == created.response.id
        jsonschema.validate(json.loads(successor.output_text), SCHEMA)

    converse(masked, talk)
