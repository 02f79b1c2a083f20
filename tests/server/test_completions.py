"""POST /v1/completions through the official client; texts come from the fake's oracle."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from fakes import fake_logprobs
from server.harness import MODEL, VOCAB_SIZE, Server, fake_runner, serve

PROMPT = "the quick brown fox"


def test_a_completion_continues_a_text_by_16_tokens(server: Server) -> None:
    prompt = server.tokenizer.encode(PROMPT)
    completion = server.openai().completions.create(model=MODEL, prompt=PROMPT, temperature=0)
    [choice] = completion.choices
    assert choice.text == server.text(server.answer(prompt, 16))
    assert choice.finish_reason == "length"
    assert (completion.object, completion.model) == ("text_completion", MODEL)
    assert completion.id.startswith("cmpl-")
    assert completion.usage is not None
    assert completion.usage.total_tokens == len(prompt) + 16


def test_token_ids_continue_like_the_text_they_stand_for(server: Server) -> None:
    prompt = server.tokenizer.encode(PROMPT)
    create = server.openai().completions.create
    by_ids = create(model=MODEL, prompt=prompt, temperature=0, max_tokens=5)
    by_text = create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=5)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.choices[0].text == server.text(server.answer(prompt, 5))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_times_n_choices_keep_their_indexes(
    server: Server, streaming: bool, as_ids: bool
) -> None:
    texts = ["one", "another prompt", "three"]
    ids = [server.tokenizer.encode(text) for text in texts]
    arguments = {
        "model": MODEL,
        "prompt": ids if as_ids else texts,
        "n": 2,
        "max_tokens": 7,
        "seed": 3,
        "temperature": 1,
    }
    create = server.openai().completions.create
    got = [""] * 6
    for answer in create(**arguments, stream=True) if streaming else [create(**arguments)]:
        for choice in answer.choices:
            got[choice.index] += choice.text
    assert got == [
        server.text(server.answer(prompt, 7, temperature=1, seed=3, choice=i))
        for prompt in ids
        for i in range(2)
    ]


def test_the_async_client_reads_whole_and_streamed_answers(server: Server) -> None:
    async def ask(i: int) -> tuple[str, str]:
        async with server.async_openai() as client:
            create = client.completions.create
            asked: Any = {"model": MODEL, "prompt": f"{PROMPT} {i}", "temperature": 0}
            text = ""
            async for chunk in await create(**asked, stream=True):
                text += chunk.choices[0].text
            return text, (await create(**asked)).choices[0].text

    async def main() -> list[tuple[str, str]]:
        return await asyncio.gather(*(ask(i) for i in range(3)))

    for i, (streamed, whole) in enumerate(asyncio.run(main())):
        expected = server.text(server.answer(server.tokenizer.encode(f"{PROMPT} {i}"), 16))
        assert streamed == whole == expected


def test_usage_of_several_prompts_is_their_sum(server: Server) -> None:
    ids = [[5, 6, 7], [8, 9]]
    stream = server.openai().completions.create(
        model=MODEL,
        prompt=ids,
        max_tokens=4,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage is not None
    num_generated = sum(len(server.answer(prompt, 4)) for prompt in ids)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, num_generated)
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("streaming", [False, True])
def test_echo_begins_with_the_prompt(server: Server, streaming: bool) -> None:
    prompts = ["naïve 🙂 ", "日本"]
    answers = server.openai().completions.create(
        model=MODEL, prompt=prompts, echo=True, max_tokens=3, temperature=0, stream=streaming
    )
    got = ["", ""]
    for answer in answers if streaming else [answers]:
        for choice in answer.choices:
            got[choice.index] += choice.text
    expected = [server.answer(server.tokenizer.encode(prompt), 3) for prompt in prompts]
    assert got == [prompt + server.text(ids) for prompt, ids in zip(prompts, expected, strict=True)]


def test_echo_of_token_ids_is_their_text(server: Server) -> None:
    completion = server.openai().completions.create(
        model=MODEL, prompt=server.tokenizer.encode("日本"), echo=True, max_tokens=1
    )
    assert completion.choices[0].text.startswith("日本")


@pytest.mark.parametrize("streaming", [False, True])
def test_logprobs_are_four_lists_of_equal_length(server: Server, streaming: bool) -> None:
    expected = server.answer(server.tokenizer.encode(PROMPT), 6)
    answers = server.openai().completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=1, stream=streaming
    )
    tokens, values, tops, offsets = [], [], [], []
    for answer in answers if streaming else [answers]:
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        tokens += logprobs.tokens or []
        values += logprobs.token_logprobs or []
        tops += logprobs.top_logprobs or []
        offsets += logprobs.text_offset or []
    oracle = [fake_logprobs(token_id, 1, VOCAB_SIZE).logprob for token_id in expected]
    assert values == [pytest.approx(value) for value in oracle]
    assert len(tokens) == len(tops) == len(offsets) == 6
    assert offsets[0] == 0 and offsets == sorted(offsets)
    for token_id, token, top, value in zip(expected, tokens, tops, values, strict=True):
        assert top[token] == value
        data = server.tokenizer.token_bytes(token_id)
        if token.startswith("bytes:"):
            assert data == bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
        else:
            assert data == token.encode()


@pytest.mark.parametrize("streaming", [False, True])
def test_return_token_ids_belong_to_their_choice(server: Server, streaming: bool) -> None:
    prompts = [[10, 11, 12], [13, 14]]
    answers = server.openai().completions.create(
        model=MODEL,
        prompt=prompts,
        max_tokens=5,
        temperature=0,
        stream=streaming,
        extra_body={"return_token_ids": True},
    )
    prompt_ids: list[list[int]] = [[], []]
    ids: list[list[int]] = [[], []]
    for answer in answers if streaming else [answers]:
        for choice in answer.choices:
            prompt_ids[choice.index] += getattr(choice, "prompt_token_ids", [])
            ids[choice.index] += choice.token_ids
    assert prompt_ids == prompts
    assert ids == [server.answer(prompt, 5) for prompt in prompts]


def test_add_special_tokens_false_reaches_the_tokenizer(server: Server) -> None:
    completion = server.openai().completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=1,
        extra_body={"add_special_tokens": False, "return_token_ids": True},
    )
    ids = server.tokenizer.encode(PROMPT, add_special_tokens=False)
    assert completion.choices[0].prompt_token_ids == ids


def test_an_idle_server_takes_more_prompts_than_its_queue_is_long() -> None:
    with serve(engine={"max_num_queued_reqs": 4, "max_num_seqs": 1}) as small:
        texts = [f"prompt {i}" for i in range(6)]
        completion = small.openai().completions.create(
            model=MODEL, prompt=texts, n=3, max_tokens=2, temperature=0
        )
        expected = [small.answer(small.tokenizer.encode(text), 2) for text in texts]
        got = [choice.text for choice in completion.choices]
        assert got == [small.text(ids) for ids in expected for _ in range(3)]
        small.wait_idle()


def test_prompts_that_a_busy_queue_has_no_room_for_are_refused_together() -> None:
    gate = threading.Semaphore(1)
    limits = {"max_num_queued_reqs": 4, "max_num_seqs": 1}
    body = {"prompt": "hi", "max_tokens": 5, "n": 2, "stream": True, "ignore_eos": True}
    body |= {"return_token_ids": True}  # so that the first token is sent, whatever its text
    with serve(fake_runner(gate=gate), engine=limits) as small, small.client() as client:
        with client.stream("POST", "/v1/completions", json=body) as running:
            lines = running.iter_lines()
            next(lines)
            refused = client.post("/v1/completions", json={"prompt": ["a"] * 4, "max_tokens": 1})
            assert refused.status_code == 429
            assert small.engine.stats().num_requests_waiting == 1
            gate.release(1000)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        small.wait_idle()
