"""Tokens and text that come out of the engine, against oracles."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
import uvloop
from engine.support import (
    EOS_ID,
    NOT_ASCII_IDS,
    SPECIAL_IDS,
    TOKENIZER,
    VOCAB_SIZE,
    check_nothing_is_held,
    greedy,
    make_engine,
    make_runner,
    oracle,
    read,
    run,
    until_idle,
)
from fakes import fake_logprobs
from tiny import sentencepiece_backend

from streamkv.protocol import FinishReason, SamplingParams, unpack_ints
from streamkv.text.tokenizer import Tokenizer

PROMPT = [10, 20, 30, 40]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_many_streams_at_once_give_the_tokens_each_would_give_alone(async_scheduling, loop_factory):
    rng = random.Random(7)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    prompts = [
        shared[: rng.randrange(30)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        for _ in range(60)
    ]
    lengths = [rng.randint(1, 68) for _ in prompts]
    runner = make_runner(num_blocks=36)  # far too few for all: sequences are preempted

    async def main() -> None:
        options = {"max_num_seqs": 16, "max_num_batched_tokens": 48}
        async with make_engine(runner, async_scheduling=async_scheduling, **options) as engine:
            streams = [
                engine.generate(prompt, greedy(max_tokens=num))
                for prompt, num in zip(prompts, lengths, strict=True)
            ]
            results = await asyncio.gather(*(stream.collect() for stream in streams))
            for (completion,), prompt, num in zip(results, prompts, lengths, strict=True):
                assert list(completion.token_ids) == oracle(runner, prompt, num)
                assert completion.finish_reason is FinishReason.LENGTH
            assert engine.stats().num_preemptions_total > 0
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main, loop_factory=loop_factory)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_text_of_all_deltas_is_the_decoded_text_of_all_tokens(skip_special_tokens):
    runner = make_runner(avoid=())

    async def main() -> None:
        async with make_engine(runner) as engine:
            for first in range(20):
                sampling = greedy(
                    max_tokens=60, ignore_eos=True, skip_special_tokens=skip_special_tokens
                )
                async with engine.generate([first, 5], sampling) as stream:
                    deltas = await read(stream)
                token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
                assert token_ids == oracle(runner, [first, 5], 60)
                text = "".join(delta.text for delta in deltas)
                whole = TOKENIZER.decode(token_ids, skip_special_tokens=skip_special_tokens)
                # A character cut off by the end is dropped, where decoding marks it.
                assert whole in (text, text + "\ufffd")

    run(main)


def test_a_prompt_may_be_text():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate("the quick fox", greedy(max_tokens=5)) as stream:
                (completion,) = await stream.collect()
            assert list(stream.prompt_token_ids) == TOKENIZER.encode("the quick fox")
            assert list(completion.token_ids) == oracle(runner, stream.prompt_token_ids, 5)

    run(main)


class NotingTokenizer:
    """The tiny tokenizer, noting which threads encode."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.get_ident())
        return TOKENIZER.encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize(("repeats", "on_the_loop"), [(10, True), (2000, False)])
def test_only_a_long_text_is_tokenized_off_the_loop(repeats, on_the_loop):
    text = "the fox and the dog " * repeats
    runner = make_runner(max_model_len=60_000, num_blocks=10_000)
    tokenizer = NotingTokenizer()

    async def main() -> None:
        async with make_engine(runner, tokenizer=tokenizer, max_num_batched_tokens=8192) as engine:
            async with engine.generate(text, greedy(max_tokens=1)) as stream:
                await stream.collect()
            assert list(stream.prompt_token_ids) == TOKENIZER.encode(text)
        assert [ident == threading.get_ident() for ident in tokenizer.threads] == [on_the_loop]

    run(main)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_each_of_n_choices_is_its_own_sample_and_has_one_terminal_delta(async_scheduling):
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            sampling = SamplingParams(n=5, seed=3, max_tokens=12)
            async with engine.generate(PROMPT, sampling) as stream:
                deltas = await read(stream)
            for choice in range(5):
                mine = [delta for delta in deltas if delta.choice == choice]
                token_ids = [token_id for delta in mine for token_id in delta.token_ids]
                assert token_ids == oracle(
                    runner, PROMPT, 12, temperature=1.0, seed=3, choice=choice
                )
                assert all(delta.finish_reason is None for delta in mine[:-1])
                assert mine[-1].finish_reason is FinishReason.LENGTH
            assert stream.usage.num_generated_tokens == 60

    run(main)


def test_a_request_without_a_seed_gets_another_one_each_time():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            answers = {
                (await engine.generate(PROMPT, SamplingParams(max_tokens=8)).collect())[0].token_ids
                for _ in range(4)
            }
            assert len(answers) == 4

    run(main)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_end_token_ends_the_answer_and_is_not_shown(async_scheduling):
    runner = make_runner(avoid=[i for i in range(VOCAB_SIZE) if i % 4 != 2])  # 2 is the end

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            reasons = set()
            for first in range(60):
                expected = oracle(runner, [first], 40, end_token_ids=[EOS_ID])
                sampling = greedy(max_tokens=40, skip_special_tokens=False)
                (completion,) = await engine.generate([first], sampling).collect()
                assert list(completion.token_ids) == expected
                shown = expected[:-1] if expected[-1] == EOS_ID else expected
                whole = TOKENIZER.decode(shown, skip_special_tokens=False)
                assert whole.startswith(completion.text)
                assert set(whole[len(completion.text) :]) <= {"\ufffd"}
                assert completion.stop_reason is None
                reasons.add(completion.finish_reason)
                if expected[-1] == EOS_ID:
                    assert completion.finish_reason is FinishReason.STOP
            assert reasons == {FinishReason.STOP, FinishReason.LENGTH}

    run(main)


def test_ignore_eos_and_min_tokens_go_past_the_end_token():
    runner = make_runner(avoid=[i for i in range(VOCAB_SIZE) if i % 100 != 2])
    ends = [EOS_ID]

    async def main() -> None:
        async with make_engine(runner) as engine:
            for first in range(20):
                ignoring = greedy(max_tokens=30, ignore_eos=True)
                (completion,) = await engine.generate([first], ignoring).collect()
                assert list(completion.token_ids) == oracle(runner, [first], 30)
                waiting = greedy(max_tokens=30, min_tokens=6)
                (completion,) = await engine.generate([first], waiting).collect()
                expected = oracle(runner, [first], 30, end_token_ids=ends, min_tokens=6)
                assert list(completion.token_ids) == expected
                assert len(expected) > 6

    run(main)


@pytest.mark.parametrize("shown", [False, True])
def test_a_stop_token_id_ends_the_answer_and_is_shown_only_on_request(shown):
    runner = make_runner(avoid=NOT_ASCII_IDS)
    answer = oracle(runner, PROMPT, 20)
    stop_id = answer[9]
    expected = answer[: answer.index(stop_id) + 1]

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = greedy(
                max_tokens=20, stop_token_ids=[stop_id], include_stop_str_in_output=shown
            )
            (completion,) = await engine.generate(PROMPT, sampling).collect()
            assert list(completion.token_ids) == expected
            assert completion.finish_reason is FinishReason.STOP
            assert completion.stop_reason == stop_id
            assert completion.text == TOKENIZER.decode(expected if shown else expected[:-1])

    run(main)


def test_logprobs_come_with_their_tokens_texts_and_bytes():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            (completion,) = await engine.generate(
                PROMPT, greedy(max_tokens=6, logprobs=3)
            ).collect()
            assert len(completion.logprobs) == 6
            for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
                fake = fake_logprobs(token_id, 3, VOCAB_SIZE)
                assert (logprob.token_id, logprob.logprob, logprob.rank) == (
                    token_id,
                    fake.logprob,
                    1,
                )
                assert [top.token_id for top in logprob.top] == list(unpack_ints(fake.top_ids))
                assert logprob.top[0].logprob == fake.logprob > logprob.top[1].logprob
                assert logprob.bytes == TOKENIZER.token_bytes(token_id)
                assert logprob.token == TOKENIZER.token_text(token_id)

    run(main)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_the_bytes_beside_log_probabilities_are_those_of_the_text(skip_special_tokens, shown):
    # Special tokens, of which 2 is the end, and whole characters.
    hidden = [i for i in NOT_ASCII_IDS if i not in SPECIAL_IDS]
    runner = make_runner(avoid=[*hidden, *range(100, 300)])

    async def main() -> None:
        async with make_engine(runner) as engine:
            silent, reasons = 0, set()
            for first in range(60):
                sampling = greedy(
                    max_tokens=40,
                    logprobs=1,
                    stop_token_ids=[1] if shown else [],
                    include_stop_str_in_output=shown,
                    skip_special_tokens=skip_special_tokens,
                )
                (completion,) = await engine.generate([first], sampling).collect()
                assert [item.token_id for item in completion.logprobs] == list(completion.token_ids)
                data = b"".join(item.bytes for item in completion.logprobs)
                assert data.decode() == completion.text
                for item in completion.logprobs:
                    assert item.token == TOKENIZER.token_text(item.token_id)
                    assert item.top[0].bytes == item.bytes
                silent += sum(not item.bytes for item in completion.logprobs)
                reasons.add(completion.finish_reason)
            assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
            assert silent > 0

    run(main)


def test_a_first_token_leaves_out_the_space_that_stands_for_none_where_a_text_begins(tmp_path):
    backend = sentencepiece_backend("llama")
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    spaced = tokenizer.encode("he")
    runner = make_runner(
        vocab_size=tokenizer.vocab_size,
        avoid=[i for i in range(tokenizer.vocab_size) if i not in spaced],
    )

    async def main() -> None:
        async with make_engine(runner, tokenizer=tokenizer) as engine:
            for last, first in ((1, b"he"), (5, b" he")):  # a special token ends the text before
                sampling = greedy(max_tokens=3, logprobs=0)
                (completion,) = await engine.generate([last], sampling).collect()
                assert completion.text == first.decode() + " he he"
                assert [item.bytes for item in completion.logprobs] == [first, b" he", b" he"]

    run(main)


def test_usage_counts_the_prompt_the_cached_part_of_it_and_the_answer():
    runner = make_runner()
    prompt = list(range(10, 30))

    async def main() -> None:
        async with make_engine(runner) as engine:
            cached = []
            for _ in range(2):
                stream = engine.generate(prompt, greedy(max_tokens=7))
                await stream.collect()
                assert stream.usage.num_prompt_tokens == 20
                assert stream.usage.num_generated_tokens == 7
                cached.append(stream.usage.num_cached_tokens)
                assert stream.arrival_s <= stream.first_token_s <= stream.finish_s
            assert cached[0] == 0 < cached[1] < 20
            salted = engine.generate(prompt, greedy(max_tokens=1), cache_salt="mine")
            await salted.collect()
            assert salted.usage.num_cached_tokens == 0
            stats = engine.stats()
            assert stats.prompt_tokens_total == 60
            assert stats.generation_tokens_total == 15
            assert stats.request_success_total == {"stop": 0, "length": 3, "abort": 0, "error": 0}
            assert stats.prefix_cache_hits_total == cached[1]

    run(main)


def test_special_tokens_are_left_out_of_the_text_by_default():
    runner = make_runner(avoid=[i for i in range(VOCAB_SIZE) if i % 3 != 1])  # 1 is special

    async def main() -> None:
        async with make_engine(runner) as engine:
            texts = set()
            for first in range(30):
                (completion,) = await engine.generate([first], greedy(max_tokens=30)).collect()
                texts.add(1 in completion.token_ids)
                for special_id in SPECIAL_IDS:
                    assert TOKENIZER.token_text(special_id) not in completion.text
            assert True in texts

    run(main)
