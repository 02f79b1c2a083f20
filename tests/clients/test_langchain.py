"""langchain-openai against the default model: what it gives is what plain HTTP gives."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import pydantic
import pytest
from clients.real_server import BEGINNING, DEADLINE_S, MODEL, QUESTION, TOOL, WEATHER, RealServer

pytestmark = [
    pytest.mark.timeout(60),
    # langchain leaves its clients' connections to the collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SEA = QUESTION[0]["content"]


@pytest.fixture(scope="module")
def langchain() -> Iterator[Any]:
    """Imported late, as it takes seconds."""
    import langchain_openai

    yield langchain_openai
    gc.collect()  # here, where its warnings are expected


def to(real: RealServer, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "base_url": real.base_url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 16,
        "max_retries": 0,
        # Loading certificates would take longer than most tests.
        "http_client": httpx.Client(verify=False, timeout=DEADLINE_S),
        "http_async_client": httpx.AsyncClient(verify=False, timeout=DEADLINE_S),
    } | fields


def test_a_chat_invoked_and_streamed(real: RealServer, langchain: Any) -> None:
    chat = langchain.ChatOpenAI(**to(real))
    expected = real.chat_text(16)
    whole = chat.invoke(SEA)
    assert whole.content == expected
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata["output_tokens"] == 16
    chunks = list(chat.stream(SEA))
    assert "".join(chunk.content for chunk in chunks) == expected and len(chunks) > 8

    async def main() -> tuple[str, str, list[str]]:
        streamed = "".join([chunk.content async for chunk in chat.astream(SEA)])
        invoked = (await chat.ainvoke(SEA)).content
        return streamed, invoked, [one.content for one in await chat.abatch([SEA] * 3)]

    assert asyncio.run(main()) == (expected, expected, [expected] * 3)


def test_a_completion_invoked_and_streamed(real: RealServer, langchain: Any) -> None:
    text = langchain.OpenAI(**to(real))
    expected = real.text(16)
    assert text.invoke(BEGINNING) == expected == "".join(text.stream(BEGINNING))
    generated = text.generate([BEGINNING, "A poem"]).generations
    assert [one[0].text for one in generated] == [expected, real.text(16, prompt="A poem")]


def test_tools_that_are_bound_are_called_with_arguments_of_their_schema(
    real: RealServer, langchain: Any
) -> None:
    chat = langchain.ChatOpenAI(**to(real, max_tokens=80))
    bound = chat.bind_tools([TOOL], tool_choice="required")
    called = bound.invoke(SEA)
    assert called.tool_calls and not called.invalid_tool_calls
    for call in called.tool_calls:
        assert call["name"] == "get_weather" and call["id"]
        jsonschema.validate(call["args"], WEATHER)
    joined = None
    for chunk in bound.stream(SEA):
        joined = chunk if joined is None else joined + chunk
    assert joined is not None
    assert [call["args"] for call in joined.tool_calls] == [c["args"] for c in called.tool_calls]


class Trip(pydantic.BaseModel):
    """Where to go."""

    city: Literal["Paris", "Tokyo"]
    days: int


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_a_model_of_pydantic(
    real: RealServer, langchain: Any, method: str
) -> None:
    chat = langchain.ChatOpenAI(**to(real, max_tokens=80))
    trip = chat.with_structured_output(Trip, method=method).invoke(SEA)
    assert isinstance(trip, Trip)
    raw = chat.with_structured_output(WEATHER | {"title": "w"}, method=method, strict=True)
    jsonschema.validate(json.loads(json.dumps(raw.invoke(SEA))), WEATHER)


def test_responses_invoked_and_streamed(real: RealServer, langchain: Any) -> None:
    chat = langchain.ChatOpenAI(use_responses_api=True, **to(real))
    expected = real.chat_text(16)
    assert chat.invoke(SEA).text == expected
    assert "".join(chunk.text for chunk in chat.stream(SEA)) == expected


def test_an_error_is_openais_with_the_status(real: RealServer, langchain: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as bad:
        langchain.ChatOpenAI(**to(real, temperature=-1)).invoke(SEA)
    assert bad.value.param == "temperature"
