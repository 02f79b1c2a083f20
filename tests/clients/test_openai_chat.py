"""The official client against the default model: chat, completions, models, errors, leaving.

Greedy: what the client gives is what the plain request gives, whole or in pieces.
"""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest
from clients.official import async_client
from clients.real_server import (
    BEGINNING,
    LONG,
    MODEL,
    QUESTION,
    TOOL,
    WEATHER,
    RealServer,
)

pytestmark = pytest.mark.timeout(60)


def test_a_chat_whole_and_streamed_is_what_plain_http_gives(
    real: RealServer, client: openai.OpenAI
) -> None:
    expected = real.chat_text(24)
    create = client.chat.completions.create
    whole = create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    with create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_completion_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = stream
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == expected and sum(map(bool, pieces)) > 10
    assert last.choices == [] and last.usage is not None
    assert last.usage.model_dump(
        include={"prompt_tokens", "completion_tokens", "total_tokens"}
    ) == (whole.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}))


def test_a_completion_whole_and_streamed_is_what_plain_http_gives(
    real: RealServer, client: openai.OpenAI
) -> None:
    create = client.completions.create
    whole = create(model=MODEL, prompt=BEGINNING, temperature=0, max_tokens=24)
    assert whole.choices[0].text == real.text(24)
    with create(model=MODEL, prompt=BEGINNING, temperature=0, max_tokens=24, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    both = create(model=MODEL, prompt=[BEGINNING, "A poem"], temperature=0, max_tokens=5, n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == real.text(5)
    assert both.choices[2].text == real.text(5, prompt="A poem")


def test_the_async_client_gives_the_same_to_many_at_once(real: RealServer) -> None:
    expected = real.chat_text(16), real.text(16)

    async def chat(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=16, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def completion(client: openai.AsyncOpenAI) -> str:
        answer = await client.completions.create(
            model=MODEL, prompt=BEGINNING, temperature=0, max_tokens=16
        )
        return answer.choices[0].text

    async def main() -> list[str]:
        async with async_client(real) as client:
            tasks = [act(client) for act in (chat, completion) for _ in range(4)]
            return await asyncio.gather(*tasks)

    texts = asyncio.run(main())
    assert texts == [expected[0]] * 4 + [expected[1]] * 4


def test_the_offline_engine_says_the_same_as_the_server(real: RealServer) -> None:
    from streamkv import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=24)
    llm = LLM(model=MODEL, kv_cache_memory_bytes=1 << 28)
    (chat,) = llm.chat(QUESTION, params, use_tqdm=False)
    (text,) = llm.generate([BEGINNING], params, use_tqdm=False)
    assert chat.outputs[0].text == real.chat_text(24)
    assert text.outputs[0].text == real.text(24)


def test_the_raw_response_has_headers_and_parses_to_the_same(
    real: RealServer, client: openai.OpenAI
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=6
    )
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == real.chat_text(6)
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=6, stream=True
    ) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in streamed.iter_lines() if line.startswith("data: {")]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content", "") for delta in deltas) == real.chat_text(6)


def test_log_probabilities_have_the_text_in_their_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    data = b"".join(bytes(one.bytes or ()) for one in choice.logprobs.content)
    assert data.decode() == choice.message.content
    for one in choice.logprobs.content:
        assert len(one.top_logprobs) == 3 and one.logprob == one.top_logprobs[0].logprob <= 0
    text = client.completions.create(
        model=MODEL, prompt=BEGINNING, temperature=0, max_tokens=8, logprobs=3
    ).choices[0]
    assert text.logprobs is not None
    assert "".join(text.logprobs.tokens or ()) == text.text
    assert text.logprobs.text_offset == [
        sum(map(len, (text.logprobs.tokens or ())[:i])) for i in range(8)
    ]


def test_a_tool_that_must_be_called_gets_arguments_of_its_schema(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        fields = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 80}
        fields["parallel_tool_calls"] = False  # a small model would go on calling
        whole = create(**fields, tools=[TOOL], tool_choice=choice).choices[0]
        assert whole.message.tool_calls, whole
        for call in whole.message.tool_calls:
            assert call.function.name == "get_weather" and call.id
            jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        assert whole.finish_reason == "tool_calls"
        calls: dict[int, str] = {}
        with create(**fields, tools=[TOOL], tool_choice=choice, stream=True) as stream:
            for chunk in stream:
                for part in chunk.choices[0].delta.tool_calls or ():
                    assert part.function is not None
                    calls[part.index] = calls.get(part.index, "") + (part.function.arguments or "")
        joined = [calls[index] for index in sorted(calls)]
        assert joined == [call.function.arguments for call in whole.message.tool_calls]


class Trip(pydantic.BaseModel):
    """What `parse` makes of an answer."""

    city: Literal["Paris", "Tokyo"]
    days: int
    sunny: bool


def test_an_answer_is_parsed_into_a_model_of_pydantic(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    parsed = client.chat.completions.parse(**fields, response_format=Trip).choices[0]
    assert isinstance(parsed.message.parsed, Trip) and parsed.finish_reason == "stop"
    with client.chat.completions.stream(**fields, response_format=Trip) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert final.message.parsed == parsed.message.parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_any_object_in_json_can_be_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Answer with a short JSON object."}],
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_object"},
    ).choices[0]
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content or ""), dict)
    else:
        assert (answer.message.content or "").lstrip().startswith("{")


def test_extra_fields_go_through_the_client(real: RealServer, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=BEGINNING,
        temperature=0,
        max_tokens=30,
        extra_body={"structured_outputs": {"choice": ["blue", "deep"]}, "return_token_ids": True},
    ).choices[0]
    assert answer.text in ("blue", "deep") and answer.finish_reason == "stop"
    assert answer.model_extra is not None and answer.model_extra["token_ids"]


def test_errors_have_the_class_the_status_and_the_field(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model=MODEL, messages=QUESTION, temperature=-1)
    assert (bad.value.status_code, bad.value.param) == (400, "temperature")
    with pytest.raises(openai.BadRequestError) as streamed:
        create(model=MODEL, messages=QUESTION, top_p=-1, stream=True)
    assert (streamed.value.status_code, streamed.value.param) == (400, "top_p")
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="gpt-none", messages=QUESTION)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as broken:
        create(
            model=MODEL,
            messages=QUESTION,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "nothing"}},
            },
        )
    assert broken.value.status_code == 400 and "response_format" in str(broken.value.param)


def test_the_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-none")


def test_a_client_that_runs_out_of_time_leaves_nothing_behind(
    real: RealServer, client: openai.OpenAI
) -> None:
    long = {"messages": QUESTION, "max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(model=MODEL, **long)
    real.wait_idle()


def test_a_stream_that_is_closed_or_cancelled_leaves_nothing_behind(
    real: RealServer, client: openai.OpenAI
) -> None:
    long = {"messages": QUESTION, "max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(model=MODEL, stream=True, **long) as stream:
        next(iter(stream))
    real.wait_idle()

    async def cancelled() -> None:
        async with async_client(real) as one:
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in await one.chat.completions.create(model=MODEL, stream=True, **long):
                    begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    real.wait_idle()
