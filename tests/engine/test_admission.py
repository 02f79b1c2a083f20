"""Requests that can't be served: which error, which field, which numbers."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec
import pytest
from engine.support import (
    TOKENIZER,
    VOCAB_SIZE,
    check_nothing_is_held,
    greedy,
    make_engine,
    make_runner,
    oracle,
    run,
    until,
    until_idle,
)

from streamkv.config import EngineConfig
from streamkv.engine.admission import bad_word_tokens
from streamkv.engine.async_engine import AsyncEngine
from streamkv.errors import (
    CapacityError,
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
    UnknownModelError,
)
from streamkv.protocol import SamplingParams


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param", "match"),
    [
        ("", {}, InvalidRequestError, "prompt", "at least one token"),
        ([], {}, InvalidRequestError, "prompt", "at least one token"),
        (None, {}, InvalidRequestError, "prompt", "got NoneType"),
        (7, {}, InvalidRequestError, "prompt", "got int"),
        (b"text", {}, InvalidRequestError, "prompt", "got bytes"),
        ([1, "2"], {}, InvalidRequestError, "prompt", "'2' in it"),
        ([1, True], {}, InvalidRequestError, "prompt", "True in it"),
        ("\ud800", {}, InvalidRequestError, "prompt", "lone surrogate"),
        ([1, VOCAB_SIZE], {}, InvalidRequestError, "prompt", f"got {VOCAB_SIZE}"),
        ([1, -1], {}, InvalidRequestError, "prompt", f"0 to {VOCAB_SIZE - 1}, got -1"),
        ([1], {"logit_bias": {9999: 1.0}}, InvalidRequestError, "logit_bias", "got 9999"),
        ([1], {"stop_token_ids": [9999]}, InvalidRequestError, "stop_token_ids", "got 9999"),
        ([1] * 128, {}, ContextLengthError, "prompt", "at most 127 tokens.* 128, which|got 128"),
        ([1] * 100, {"max_tokens": 29}, ContextLengthError, "max_tokens", "leave 28 .* got 29"),
        ([1] * 100, {"min_tokens": 29}, ContextLengthError, "min_tokens", "leave 28 .* got 29"),
        (["x"] * 128, {}, ContextLengthError, "prompt", "at most 127 tokens.* got 128"),
        ([1, 2**40], {}, InvalidRequestError, "prompt", f"got {2**40}"),
        ("a" * 9000, {}, ContextLengthError, "prompt", "9000 characters, .* at least 692 tokens"),
        ([1] * 60, {"max_tokens": 60}, CapacityError, "max_tokens", "needs 30 KV blocks"),
    ],
)
def test_a_request_that_can_not_be_served_is_refused_on_entering(
    prompt, params, error, param, match
):
    runner = make_runner(num_blocks=25)

    async def main() -> None:
        async with make_engine(runner) as engine:
            stream = engine.generate(prompt, SamplingParams(**{"max_tokens": None} | params))
            with pytest.raises(error, match=match) as caught:
                async with stream:
                    pass
            assert type(caught.value) is error
            assert caught.value.param == param
            (completion,) = await engine.generate([1], greedy(max_tokens=2)).collect()
            assert len(completion.token_ids) == 2
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"request_id": "a\ud800"}, "lone surrogate at character 1"),
        ({"cache_salt": "\udfff"}, "lone surrogate at character 0"),
        ({"request_id": 7}, "got int"),
        ({"cache_salt": b"salt"}, "got bytes"),
        ({"priority": "high"}, "got 'high'"),
        ({"priority": 1.5}, "got 1.5"),
        ({"priority": None}, "got None"),
    ],
)
def test_what_names_or_orders_a_request_is_checked_before_it_is_taken(options, match):
    runner = make_runner()
    (name,) = options

    async def main() -> None:
        async with make_engine(runner) as engine:
            with pytest.raises(InvalidRequestError, match=f"{name}: .*{match}") as caught:
                await engine.generate([1], **options).collect()
            assert caught.value.param == name
            (completion,) = await engine.generate([1], greedy(max_tokens=2)).collect()
            assert len(completion.token_ids) == 2

    run(main)


class Unseen(Sequence):
    """Items that nobody may look at."""

    def __init__(self, num: int) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index):
        raise AssertionError("looked at")


def test_too_many_token_ids_and_messages_are_refused_by_their_number():
    class UntouchedTokenizer:
        def __getattr__(self, name):
            return getattr(TOKENIZER, name)

        def encode(self, *args, **kwargs):
            raise AssertionError("tokenized")

        def apply_chat_template(self, *args, **kwargs):
            raise AssertionError("rendered")

    async def main() -> None:
        async with make_engine(make_runner(), tokenizer=UntouchedTokenizer()) as engine:
            with pytest.raises(ContextLengthError, match="at most 127 tokens, .* got 5000000"):
                await engine.generate(Unseen(5_000_000)).collect()
            with pytest.raises(ContextLengthError, match="at least 15384 tokens"):
                await engine.generate("the quick brown fox " * 10_000).collect()
            with pytest.raises(ContextLengthError, match="at most 128 messages, .* got 129"):
                await engine.encode_chat(Unseen(129))

    run(main)


def test_a_conversation_too_long_at_first_sight_is_refused_before_it_is_tokenized():
    class RenderingTokenizer:
        def __getattr__(self, name):
            return getattr(TOKENIZER, name)

        def encode(self, *args, **kwargs):
            raise AssertionError("tokenized")

    async def main() -> None:
        async with make_engine(make_runner(), tokenizer=RenderingTokenizer()) as engine:
            message = {"role": "user", "content": "the fox " * 5000}
            with pytest.raises(ContextLengthError, match="messages: .* at least") as caught:
                await engine.encode_chat([message])
            assert caught.value.param == "messages"

    run(main)


def test_who_exceeds_a_context_that_kv_memory_has_cut_is_told_what_gives_more():
    runner = make_runner(num_blocks=32)
    bound = "the context is cut from 1,000 to 128: more by --num-gpu-blocks-override"
    runner.info = msgspec.structs.replace(runner.info, full_model_len=1000, kv_bound=bound)
    more = (
        ", or start with more KV memory: {} tokens need {} KV blocks of 4, there are "
        f"32 ({bound})"
    )

    async def main() -> None:
        async with make_engine(runner) as engine:

            async def refused(prompt, **params) -> str:
                with pytest.raises(ContextLengthError) as caught:
                    await engine.generate(prompt, greedy(**params)).collect()
                return caught.value.message

            message = await refused([1], max_tokens=200)
            assert message == (
                "max_tokens: the prompt's tokens (1) leave 127 of the context of 128, got 200; "
                "shorten the prompt or lower max_tokens" + more.format(201, 51)
            )
            assert (await refused([1] * 128)).endswith(more.format(129, 33))
            assert (await refused([1] * 999)).endswith(more.format(1000, 250))
            assert (await refused([1] * 1000)).endswith("; shorten the prompt")
            assert (await refused("a" * 9000)).endswith(more.format("at least 693", "at least 174"))
            with pytest.raises(ContextLengthError) as caught:
                await engine.encode_chat([HI] * 129)
            assert caught.value.message.endswith(
                "; send fewer" + more.format("at least 129", "at least 33")
            )

    run(main)


def test_a_huge_text_may_be_encoded_where_contexts_are_long():
    text = "the fox " * 140_000  # more than HUGE_TEXT_CHARS

    async def main() -> None:
        async with make_engine(make_runner(max_model_len=100_000)) as engine:
            both = await asyncio.gather(engine.encode(text), engine.encode(text))
            assert both == [TOKENIZER.encode(text)] * 2

    run(main)


HI = {"role": "user", "content": "hi"}
PARTS = [{"type": "text", "text": "the fox " * 300}] * 4
CALL = {"function": {"name": "f", "arguments": json.dumps({"a": "the fox " * 1200})}}


@pytest.mark.parametrize(
    ("messages", "on_the_loop"),
    [
        ([HI] * 2, True),
        ([HI] * 300, False),
        ([HI | {"content": PARTS}], False),
        ([HI | {"content": PARTS[:1]}], True),
        ([{"role": "assistant", "tool_calls": [CALL]}], False),
    ],
)
def test_only_a_long_conversation_is_rendered_off_the_loop(messages, on_the_loop):
    threads = []

    class NotingTokenizer:
        def __getattr__(self, name):
            return getattr(TOKENIZER, name)

        def apply_chat_template(self, *args, **kwargs):
            threads.append(threading.get_ident())
            return TOKENIZER.apply_chat_template(*args, **kwargs)

    async def main() -> None:
        runner = make_runner(max_model_len=10_000)
        async with make_engine(runner, tokenizer=NotingTokenizer()) as engine:
            token_ids = await engine.encode_chat(messages)
            text = TOKENIZER.apply_chat_template(messages)
            assert token_ids == TOKENIZER.encode(text, add_special_tokens=False)
        assert [ident == threading.get_ident() for ident in threads] == [on_the_loop]

    run(main)


def test_an_engine_with_a_seed_gives_the_same_seeds_in_the_same_order():
    source = random.Random(7)
    seeds = [source.getrandbits(63) for _ in range(3)]

    async def main() -> None:
        for runner in (make_runner(), make_runner()):
            async with make_engine(runner, seed=7) as engine:
                for seed in (seeds[0], 5, seeds[1], seeds[2]):
                    own = seed if seed == 5 else None
                    sampling = SamplingParams(max_tokens=9, seed=own)
                    (completion,) = await engine.generate([1], sampling).collect()
                    expected = oracle(runner, [1], 9, temperature=1.0, seed=seed)
                    assert list(completion.token_ids) == expected

    run(main)


def test_what_is_asked_for_may_be_changed_once_it_was_asked():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = greedy(max_tokens=9)
            stream = engine.generate([1], sampling)
            sampling.n, sampling.max_tokens = 3, 1
            (completion,) = await stream.collect()
            assert list(completion.token_ids) == oracle(runner, [1], 9)

    run(main)


def test_the_largest_request_that_fits_is_served():
    async def main() -> None:
        async with make_engine(make_runner()) as engine:
            (completion,) = await engine.generate([1] * 127, greedy()).collect()
            assert len(completion.token_ids) == 1
            (completion,) = await engine.generate([1] * 100, greedy(max_tokens=28)).collect()
            assert len(completion.token_ids) == 28
            (completion,) = await engine.generate([1] * 100, greedy()).collect()
            assert len(completion.token_ids) == 28

    run(main)


def test_an_unknown_model_is_refused_with_the_known_ones():
    async def main() -> None:
        async with make_engine(make_runner(), served_model_name="chatty") as engine:
            assert engine.model_ids == ("chatty",)
            with pytest.raises(UnknownModelError, match="one of chatty, got 'other'") as caught:
                await engine.generate([1], model="other").collect()
            assert caught.value.param == "model"
            for model in ("", "chatty"):
                stream = engine.generate([1], greedy(max_tokens=1), model=model)
                await stream.collect()
                assert stream.model == "chatty"

    run(main)


def test_a_request_id_in_use_is_refused_until_its_request_has_ended():
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate([1], greedy(max_tokens=3), request_id="x") as first:
                with pytest.raises(InvalidRequestError, match="'x'") as caught:
                    await engine.generate([1], request_id="x").collect()
                assert caught.value.param == "request_id"
                gate.release(100)
                await first.collect()
                await engine.generate([2], greedy(max_tokens=3), request_id="x").collect()

    run(main)


def test_a_full_queue_refuses_requests_by_the_number_of_their_choices():
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner, max_num_seqs=2, max_num_queued_reqs=4) as engine:
            running = engine.generate([1], greedy(n=2, max_tokens=2))
            waiting = engine.generate([1], greedy(n=2, max_tokens=2))
            async with running, waiting:
                # The first two run as soon as the queue is looked at, so two of four wait.
                with pytest.raises(OverloadedError, match="2 are waiting, at most 4") as caught:
                    await engine.generate([1], greedy(n=3)).collect()
                assert caught.value.retry_after_s >= 1
                async with engine.generate([1], greedy(n=2, max_tokens=2)) as last:
                    with pytest.raises(OverloadedError):
                        await engine.generate([1]).collect()
                    gate.release(100)
                    assert len(await last.collect()) == 2
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


def test_an_idle_engine_takes_more_choices_than_its_queue_is_long():
    async def main() -> None:
        async with make_engine(make_runner(), max_num_queued_reqs=1) as engine:
            assert len(await engine.generate([1], greedy(n=8, max_tokens=2)).collect()) == 8

    run(main)


def test_requests_that_belong_together_ask_the_queue_once():
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner, max_num_seqs=1, max_num_queued_reqs=4) as engine:
            first = engine.generate([1], greedy(max_tokens=2), queue_places=9)
            others = [
                engine.generate([i], greedy(max_tokens=2), queue_places=0) for i in range(2, 10)
            ]
            async with AsyncExitStack() as stack:
                for stream in (first, *others):
                    await stack.enter_async_context(stream)
                with pytest.raises(OverloadedError):
                    await engine.generate([1]).collect()
                gate.release(100)
                for stream in (first, *others):
                    assert len(await stream.collect()) == 1

    run(main)


def test_requests_run_by_priority_then_arrival():
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner, max_num_seqs=1) as engine:
            async with (
                engine.generate([1], greedy(max_tokens=2)) as running,
                engine.generate([2], greedy(max_tokens=2), priority=5) as late,
                engine.generate([3], greedy(max_tokens=2), priority=1) as early,
            ):
                gate.release(100)
                await until(lambda: late.finish_s is not None)
                assert running.finish_s <= early.finish_s < late.finish_s

    run(main)


def test_a_configuration_is_checked_and_overridden():
    engine = AsyncEngine("a/model", max_num_seqs=3)
    assert (engine.config.model, engine.config.max_num_seqs) == ("a/model", 3)
    engine = AsyncEngine(EngineConfig(model="b", block_size=8), dtype="float32")
    assert (engine.config.model, engine.config.block_size) == ("b", 8)
    assert engine.config.dtype == "float32"
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncEngine("a", max_num_seqs=0)
    with pytest.raises(ConfigError, match="got max_num_seq$"):
        AsyncEngine("a", max_num_seq=1)


def test_of_a_long_prompt_its_last_tokens_are_kept_where_that_is_wanted():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:

            async def kept(prompt, **params) -> list[int]:
                stream = engine.generate(prompt, greedy(max_tokens=9, **params))
                (completion,) = await stream.collect()
                token_ids = list(stream.prompt_token_ids)
                assert list(completion.token_ids) == oracle(runner, token_ids, 9)
                assert stream.usage.num_prompt_tokens == len(token_ids)
                return token_ids

            ids = [i % 60 for i in range(400)]
            text = "the fox and the dog " * 300
            assert await kept(ids, truncate_prompt_tokens=3) == ids[-3:]
            assert await kept(ids[:5], truncate_prompt_tokens=7) == ids[:5]
            assert await kept(ids, truncate_prompt_tokens=-1) == ids[-119:]  # 128 less the answer
            assert await kept(ids, truncate_prompt_tokens=-1, min_tokens=9) == ids[-119:]
            assert await kept(text, truncate_prompt_tokens=20) == TOKENIZER.encode(text)[-20:]
            assert await kept("the fox", truncate_prompt_tokens=99) == TOKENIZER.encode("the fox")
            with pytest.raises(ContextLengthError, match="prompt: expected at most 127 tokens"):
                await kept(ids, truncate_prompt_tokens=300)
            with pytest.raises(InvalidRequestError, match="lone surrogate"):
                await kept("\ud800", truncate_prompt_tokens=3)

    run(main)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_words_that_must_not_be_are_not_written_and_no_tokens_but_those_that_may_be(
    async_scheduling,
):
    runner = make_runner(vocab_size=VOCAB_SIZE, max_model_len=500, num_blocks=200)
    word, allowed = TOKENIZER.encode("the")[0], TOKENIZER.encode("the quick brown fox")

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            bad_words = [TOKENIZER.decode([token_id]) for token_id in range(70, 120)]
            params = greedy(max_tokens=90, bad_words=bad_words)
            (answer,) = await engine.generate([1], params).collect()
            banned = [list(ids) for ids in bad_word_tokens(bad_words, TOKENIZER)]
            assert list(answer.token_ids) == oracle(runner, [1], 90, bad_words=banned)
            assert word not in answer.token_ids
            params = greedy(max_tokens=90, allowed_token_ids=allowed)
            (answer,) = await engine.generate([1], params).collect()
            assert list(answer.token_ids) == oracle(runner, [1], 90, allowed=set(allowed))
            for field in ("allowed_token_ids", "bad_words"):
                values = {"allowed_token_ids": [9999], "bad_words": [TOKENIZER.decode([338])]}
                if field == "bad_words":
                    engine._reception._info = msgspec.structs.replace(runner.info, vocab_size=300)
                with pytest.raises(InvalidRequestError, match=f"^{field}: ") as raised:
                    await engine.generate([1], greedy(**{field: values[field]})).collect()
                assert raised.value.param == field

    run(main)


def test_a_bad_word_is_written_with_a_space_before_it_or_without():
    def texts(*words: str) -> list[str]:
        return [TOKENIZER.decode(ids) for ids in bad_word_tokens(words, TOKENIZER)]

    assert texts("fox") == ["fox", " fox"]
    assert texts(" fox", "fox") == ["fox", " fox"]
    assert texts(" ") == [" ", "  "]
    assert texts("the dog", "é") == ["the dog", " the dog", "é", " é"]
    long = [f"word {i}" for i in range(100)]  # tokenized in a thread
    assert texts(*long) == [text for word in long for text in (word, f" {word}")]
