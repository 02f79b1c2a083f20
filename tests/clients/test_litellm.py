"""litellm against the default model: what it gives is what plain HTTP gives."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from clients.real_server import BEGINNING, MODEL, QUESTION, TOOL, WEATHER, RealServer

pytestmark = [
    pytest.mark.timeout(60),
    # litellm's own: it logs what it has dumped, and leaves its event loops and clients to the
    # collector.
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    """Imported late, as it takes seconds."""
    import litellm

    litellm.ssl_verify = False  # loading certificates would take longer than most tests
    yield litellm
    litellm.in_memory_llm_clients_cache.flush_cache()
    gc.collect()  # here, where its warnings are expected


def to(real: RealServer, **fields: Any) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": real.base_url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 16,
        "max_retries": 0,
    } | fields


def test_a_completion_whole_and_streamed(real: RealServer, litellm: Any) -> None:
    expected = real.chat_text(16)
    whole = litellm.completion(messages=QUESTION, **to(real))
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 16
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=QUESTION, **to(real, **options)))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == expected and sum(map(bool, pieces)) > 8
    assert chunks[-1].usage.completion_tokens == 16


def test_many_at_once_in_asyncio(real: RealServer, litellm: Any) -> None:
    async def streamed() -> str:
        chunks = await litellm.acompletion(messages=QUESTION, **to(real, stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def main() -> list[str]:
        whole = litellm.acompletion(messages=QUESTION, **to(real))
        answer, *texts = await asyncio.gather(whole, *(streamed() for _ in range(3)))
        return [answer.choices[0].message.content, *texts]

    assert asyncio.run(main()) == [real.chat_text(16)] * 4


def test_a_text_completion(real: RealServer, litellm: Any) -> None:
    fields = to(real, model=f"text-completion-openai/{MODEL}")
    answer = litellm.text_completion(prompt=BEGINNING, **fields)
    assert answer.choices[0].text == real.text(16)


def test_tools_and_a_response_format_of_a_schema(real: RealServer, litellm: Any) -> None:
    fields = to(real, max_tokens=80)
    called = litellm.completion(
        messages=QUESTION,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,  # a small model would go on calling
        **fields,
    ).choices[0]
    (call, *_) = called.message.tool_calls
    assert call.function.name == "get_weather" and called.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    schema = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    told = litellm.completion(messages=QUESTION, response_format=schema, **fields).choices[0]
    assert told.finish_reason == "stop"
    jsonschema.validate(json.loads(told.message.content), WEATHER)


def test_responses_whole_and_streamed(real: RealServer, litellm: Any) -> None:
    fields = to(real, input=QUESTION[0]["content"], max_output_tokens=16)
    del fields["max_tokens"]
    expected = real.chat_text(16)
    assert litellm.responses(**fields).output[0].content[0].text == expected
    events = list(litellm.responses(stream=True, **fields))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected


def test_an_error_is_litellms_own_with_the_status(real: RealServer, litellm: Any) -> None:
    with pytest.raises(litellm.BadRequestError) as bad:
        litellm.completion(messages=QUESTION, **to(real, temperature=-1))
    assert bad.value.status_code == 400 and "temperature" in str(bad.value)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=QUESTION, **to(real, model="openai/gpt-none"))
