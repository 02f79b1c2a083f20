"""POST /v1/chat/completions through the official client; texts come from the fake's oracle."""

from __future__ import annotations

import asyncio
import operator
from typing import Any

import openai
import pytest
from fakes import fake_logprobs
from server.harness import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Server, read_events, serve

HELLO = {"role": "user", "content": "hello"}


def test_a_chat_completion_is_what_the_model_said(server: Server) -> None:
    prompt = server.chat_prompt({"role": "system", "content": "be brief"}, HELLO)
    expected = server.answer(prompt, 12)
    completion = server.openai().chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "be brief"}, HELLO],
        max_tokens=12,
        temperature=0,
    )
    [choice] = completion.choices
    assert choice.message.content == server.text(expected)
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert completion.id.startswith("chatcmpl-")
    assert (completion.object, completion.model) == ("chat.completion", MODEL)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.completion_tokens == 12
    assert completion.usage.total_tokens == len(prompt) + 12


def test_a_stream_says_the_same_and_names_the_role_once(server: Server) -> None:
    expected = server.answer(server.chat_prompt(HELLO), 30)
    stream = server.openai().chat.completions.create(
        model=MODEL, messages=[HELLO], max_tokens=30, temperature=0, stream=True
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    roles = [chunk.choices[0].delta.role for chunk in chunks]
    assert roles == ["assistant"] + [None] * (len(chunks) - 1)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == server.text(expected)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_include_usage_adds_one_chunk_without_choices(server: Server) -> None:
    with server.client() as client:
        body = {
            "model": MODEL,
            "messages": [HELLO],
            "max_tokens": 5,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False},
        }
        *chunks, last, done = read_events(client.post("/v1/chat/completions", json=body).text)
    assert done == "[DONE]"
    num_prompt = len(server.chat_prompt(HELLO))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == num_prompt + 5
    assert all(chunk["usage"] is None for chunk in chunks)


def test_continuous_usage_counts_in_each_chunk(server: Server) -> None:
    stream = server.openai().chat.completions.create(
        model=MODEL,
        messages=[HELLO],
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_the_prompt_that_was_seen_before_is_counted_as_cached(server: Server) -> None:
    message = {"role": "user", "content": "a long question about cached blocks " * 4}
    num_prompt = len(server.chat_prompt(message))
    for _ in range(2):
        completion = server.openai().chat.completions.create(
            model=MODEL, messages=[message], max_tokens=1
        )
        server.wait_idle()
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    cached = completion.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert num_prompt - 16 <= cached < num_prompt


def test_n_choices_differ_and_each_is_the_oracles(server: Server) -> None:
    prompt = server.chat_prompt(HELLO)
    completion = server.openai().chat.completions.create(
        model=MODEL, messages=[HELLO], max_tokens=9, n=3, temperature=1, seed=7
    )
    texts = [choice.message.content for choice in completion.choices]
    expected = [server.answer(prompt, 9, temperature=1, seed=7, choice=i) for i in range(3)]
    assert texts == [server.text(token_ids) for token_ids in expected]
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.completion_tokens == sum(map(len, expected))


def test_n_choices_stream_side_by_side(server: Server) -> None:
    prompt = server.chat_prompt(HELLO)
    texts, reasons = ["", "", ""], ["", "", ""]
    for chunk in server.openai().chat.completions.create(
        model=MODEL, messages=[HELLO], max_tokens=9, n=3, temperature=1, seed=8, stream=True
    ):
        [choice] = chunk.choices
        assert not reasons[choice.index], "a chunk came after the last one"
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or ""
    expected = [server.answer(prompt, 9, temperature=1, seed=8, choice=i) for i in range(3)]
    assert texts == [server.text(token_ids) for token_ids in expected]


@pytest.mark.parametrize("streaming", [False, True])
def test_logprobs_have_openais_shape(server: Server, streaming: bool) -> None:
    expected = server.answer(server.chat_prompt(HELLO), 6)
    arguments = {
        "model": MODEL,
        "messages": [HELLO],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    create = server.openai().chat.completions.create
    if streaming:
        lists = [chunk.choices[0].logprobs for chunk in create(**arguments, stream=True)]
    else:
        lists = [create(**arguments).choices[0].logprobs]
    entries = [entry for item in lists if item is not None for entry in item.content or ()]
    assert len(entries) == 6
    for token_id, entry in zip(expected, entries, strict=True):
        oracle = fake_logprobs(token_id, 2, VOCAB_SIZE)
        hidden = token_id in server.tokenizer.special_token_ids
        assert entry.bytes == ([] if hidden else list(server.tokenizer.token_bytes(token_id)))
        assert entry.token == server.tokenizer.token_text(token_id)
        assert entry.logprob == pytest.approx(oracle.logprob)
        first, second = entry.top_logprobs
        assert (first.token, first.logprob) == (entry.token, pytest.approx(oracle.logprob))
        next_id = (token_id + 1) % VOCAB_SIZE
        assert second.token == server.tokenizer.token_text(next_id)
        hidden = next_id in server.tokenizer.special_token_ids
        assert second.bytes == ([] if hidden else list(server.tokenizer.token_bytes(next_id)))


def test_logprobs_without_top_logprobs_give_only_the_sampled_token(server: Server) -> None:
    completion = server.openai().chat.completions.create(
        model=MODEL, messages=[HELLO], max_tokens=3, logprobs=True
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.top_logprobs for entry in logprobs.content] == [[], [], []]


@pytest.mark.parametrize("streaming", [False, True])
def test_return_token_ids_gives_the_prompts_and_the_answers_ids(
    server: Server, streaming: bool
) -> None:
    prompt = server.chat_prompt(HELLO)
    arguments = {
        "model": MODEL,
        "messages": [HELLO],
        "max_tokens": 8,
        "temperature": 0,
        "extra_body": {"return_token_ids": True},
    }
    create = server.openai().chat.completions.create
    answers = list(create(**arguments, stream=True)) if streaming else [create(**arguments)]
    assert answers[0].prompt_token_ids == prompt
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in answers[1:])
    ids = [getattr(chunk.choices[0], "token_ids", []) for chunk in answers]
    assert sum(ids, []) == server.answer(prompt, 8)


def test_a_stop_string_ends_the_text_before_it(server: Server) -> None:
    full = server.text(server.answer(server.chat_prompt(HELLO), 40))
    stop = full[10:13]
    completion = server.openai().chat.completions.create(
        model=MODEL, messages=[HELLO], max_tokens=40, temperature=0, stop=[stop]
    )
    [choice] = completion.choices
    assert choice.message.content == full[: full.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop


def test_a_stop_token_id_ends_the_answer(server: Server) -> None:
    expected = server.answer(server.chat_prompt(HELLO), 40)
    stop = expected[7]
    completion = server.openai().chat.completions.create(
        model=MODEL,
        messages=[HELLO],
        max_tokens=40,
        temperature=0,
        extra_body={"stop_token_ids": [stop], "return_token_ids": True},
    )
    [choice] = completion.choices
    assert choice.token_ids == expected[: expected.index(stop) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_without_max_tokens_an_answer_fills_the_context(server: Server) -> None:
    prompt = server.chat_prompt(HELLO)
    completion = server.openai().chat.completions.create(
        model=MODEL, messages=[HELLO], temperature=0, extra_body={"ignore_eos": True}
    )
    assert completion.usage is not None
    assert completion.usage.total_tokens == MAX_MODEL_LEN
    assert completion.usage.prompt_tokens == len(prompt)


def test_optional_fields_may_be_null_and_unknown_ones_are_skipped(server: Server) -> None:
    names = (
        *("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "logprobs", "top_logprobs", "stream", "stream_options", "user", "metadata"),
        *("max_tokens", "max_completion_tokens", "top_k", "min_p", "repetition_penalty"),
        *("min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
        *("skip_special_tokens", "add_generation_prompt", "return_token_ids", "priority"),
        *("request_id", "cache_salt", "tools", "tool_choice", "response_format", "audio", "model"),
    )
    with server.client() as client:
        body = dict.fromkeys(names) | {
            "messages": [HELLO | {"name": None}],
            "store": False,
            "service_tier": "auto",
            "a_field_of_tomorrow": {"deep": [1]},
            "max_tokens": 3,
        }
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    num_tokens = answer.json()["usage"]["completion_tokens"]
    # It samples with a seed of its own: an end token may come before the limit.
    finish_reason = answer.json()["choices"][0]["finish_reason"]
    assert (num_tokens == 3) if finish_reason == "length" else (1 <= num_tokens <= 3)


def test_off_values_of_fields_that_are_not_honoured_are_accepted(server: Server) -> None:
    with server.client() as client:
        body = {
            "messages": [HELLO],
            "max_tokens": 1,
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "none",
            "parallel_tool_calls": True,
        }
        assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_every_role_and_text_parts_reach_the_template(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    same = server.chat_prompt(*messages)
    text = server.tokenizer.decode(same, skip_special_tokens=False)
    assert text.startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>"
    )
    assert '"x": 1' in text and "42" in text
    completion = server.openai().chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=4,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    assert completion.prompt_token_ids == same
    assert completion.choices[0].message.content == server.text(server.answer(same, 4))


def test_the_async_client_reads_many_streams_at_once(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, i: int) -> tuple[str, str]:
        message = {"role": "user", "content": f"question {i}"}
        expected = server.answer(server.chat_prompt(message), 5 + i)
        stream = await client.chat.completions.create(
            model=MODEL, messages=[message], max_tokens=5 + i, temperature=0, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text, server.text(expected)

    async def main() -> list[tuple[str, str]]:
        async with server.async_openai() as client:
            return await asyncio.gather(*(ask(client, i) for i in range(12)))

    for got, expected in asyncio.run(main()):
        assert got == expected


def test_a_request_id_names_the_completion_and_is_taken_once(server: Server) -> None:
    completion = server.openai().chat.completions.create(
        model=MODEL, messages=[HELLO], max_tokens=1, extra_body={"request_id": "abc"}
    )
    assert completion.id == "chatcmpl-abc"


@pytest.mark.parametrize("face", ["/v1/chat/completions", "/v1/completions"])
def test_chunks_written_in_haste_are_like_the_others(face: str) -> None:
    """Token ids are asked for the second time: then each chunk is written as a whole."""
    strange = 'a "\\\0\\u0000" \0 🙂'  # a name may look like the place of a chunk's text
    body = {"messages": [HELLO], "prompt": "hello", "max_tokens": 40, "temperature": 0, "n": 2}
    body |= {"stream": True, "stream_options": {"include_usage": True}}

    def normal(chunk: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {name: value for name, value in choice.items() if "token_ids" not in name}
            for choice in chunk["choices"]
        ]
        return chunk | {"id": "", "choices": choices, "created": 0, "prompt_token_ids": None}

    def texts(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        said = (chunk for chunk in chunks if chunk["choices"] and chunk["usage"] is None)
        return [normal(chunk) for chunk in said if has_text(chunk["choices"][0])]

    def has_text(choice: dict[str, Any]) -> bool:
        return bool(choice["text"] if "text" in choice else choice["delta"].get("content"))

    with serve(engine={"served_model_name": [strange]}) as server, server.client() as client:
        quick, whole = (
            texts(read_events(client.post(face, json=body | more).text)[:-1])
            for more in ({}, {"return_token_ids": True})
        )
    assert len(quick) > 40
    key = operator.itemgetter("index")
    for index in range(2):
        one, other = (
            [chunk for chunk in chunks if key(chunk["choices"][0]) == index]
            for chunks in (quick, whole)
        )
        assert {chunk["model"] for chunk in one} == {strange}
        # What came in one delta is one chunk; how much that is, is chance.
        assert joined_chunks(one) == joined_chunks(other)


def joined_chunks(chunks: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """All text, and each kind of chunk without its text."""
    text, kinds = "", []
    for chunk in chunks:
        [choice] = chunk["choices"]
        message = choice if "text" in choice else choice["delta"]
        name = "text" if "text" in choice else "content"
        text += message.get(name, "")
        if name in message:
            message[name] = ""
        if chunk not in kinds:
            kinds.append(chunk)
    return text, kinds
