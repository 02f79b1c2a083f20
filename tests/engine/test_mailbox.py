"""Slow readers, misuse of streams, and what one reader can't do to another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator
from typing import Any

import pytest
from engine.support import (
    NOT_ASCII_IDS,
    TOKENIZER,
    greedy,
    make_engine,
    make_runner,
    oracle,
    read,
    run,
    until,
    until_idle,
)

from streamkv.engine.prompt_output import PromptOutput
from streamkv.engine.stream import TokenDelta, TokenStream
from streamkv.errors import GenerationError
from streamkv.protocol import FinishReason, RowLogprobs, SamplingParams

PROMPT = [4, 5, 6]


def test_deltas_of_a_slow_reader_are_merged_into_one_per_choice():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = SamplingParams(n=3, seed=1, max_tokens=40)
            async with engine.generate(PROMPT, sampling) as stream:
                await until(lambda: stream.finish_s is not None)
                deltas = await read(stream)
            assert [delta.choice for delta in deltas] == [0, 1, 2]
            for delta in deltas:
                assert list(delta.token_ids) == oracle(
                    runner, PROMPT, 40, temperature=1.0, seed=1, choice=delta.choice
                )
                assert delta.finish_reason is FinishReason.LENGTH

    run(main)


def test_a_reader_that_reads_only_now_and_then_misses_nothing_and_repeats_nothing():
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=20)) as stream:
                token_ids: list[int] = []
                num_deltas = 0
                for num_steps in (1, 5, 2, 12):
                    gate.release(num_steps)
                    done = len(token_ids) + num_steps
                    await until(lambda done=done: stream.usage.num_generated_tokens == done)
                    token_ids += (await anext(stream)).token_ids
                    num_deltas += 1
                    assert len(token_ids) == done
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            assert token_ids == oracle(runner, PROMPT, 20)

    run(main)


def test_a_reader_that_never_reads_does_not_slow_the_others():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=100)) as slow:
                (completion,) = await engine.generate([9], greedy(max_tokens=100)).collect()
                assert list(completion.token_ids) == oracle(runner, [9], 100)
                await until_idle(engine)
                assert len((await anext(slow)).token_ids) == 100

    run(main)


def test_a_reader_far_behind_gets_log_probabilities_in_parts_and_lets_others_run():
    runner = make_runner(max_model_len=400, avoid=NOT_ASCII_IDS)

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = SamplingParams(n=2, seed=1, max_tokens=200, logprobs=3)
            num_turns = 0

            async def count_turns() -> None:
                nonlocal num_turns
                while True:
                    await asyncio.sleep(0)
                    num_turns += 1

            async with engine.generate(PROMPT, sampling) as stream:
                await until(lambda: stream.finish_s is not None)
                counter = asyncio.create_task(count_turns())
                deltas = await read(stream)
                counter.cancel()
            assert num_turns >= 5  # between 400 log-probabilities
            assert [len(delta.token_ids) for delta in deltas] == [64] * 6 + [8, 8]
            for choice in range(2):
                mine = [delta for delta in deltas if delta.choice == choice]
                token_ids = [token_id for delta in mine for token_id in delta.token_ids]
                expected = oracle(runner, PROMPT, 200, temperature=1.0, seed=1, choice=choice)
                assert token_ids == expected
                described = [item.token_id for delta in mine for item in delta.logprobs]
                assert described == expected
                assert [delta.finish_reason for delta in mine[:-1]] == [None] * 3
                assert mine[-1].finish_reason is FinishReason.LENGTH
                for delta in mine:  # a delta's text belongs to its tokens
                    assert TOKENIZER.decode(delta.token_ids) == delta.text

    run(main)


def test_log_probabilities_may_be_taken_as_they_come_instead_of_collected():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            taken = []
            sampling = greedy(max_tokens=30, logprobs=2)
            (with_them,) = await engine.generate(PROMPT, sampling).collect()
            (without,) = await engine.generate(PROMPT, sampling).collect(
                lambda delta: taken.extend(delta.logprobs)
            )
            assert (without.token_ids, without.text) == (with_them.token_ids, with_them.text)
            assert without.logprobs == ()
            assert tuple(taken) == with_them.logprobs

    run(main)


class Resumed:
    """Runs a coroutine, and counts how often it had to wait."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.num = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        waits = self._coroutine.__await__()
        while True:
            try:
                waited_for = next(waits)
            except StopIteration as done:
                return done.value
            self.num += 1
            yield waited_for


def test_who_wants_the_whole_answer_is_woken_once():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = SamplingParams(n=2, seed=1, max_tokens=40)
            taken: list[TokenDelta] = []
            for take_logprobs in (None, taken.append):  # of which there are none
                waiting = Resumed(engine.generate(PROMPT, sampling).collect(take_logprobs))
                completions = await waiting
                assert waiting.num == 1 and taken == []
                for completion in completions:
                    assert list(completion.token_ids) == oracle(
                        runner, PROMPT, 40, temperature=1.0, seed=1, choice=completion.choice
                    )
            as_they_come = Resumed(read_all(engine.generate(PROMPT, sampling)))
            assert len(await as_they_come) >= as_they_come.num > 10

    async def read_all(stream: TokenStream) -> list[TokenDelta]:
        async with stream:
            return await read(stream)

    run(main)


def test_who_waits_for_the_whole_answer_hears_of_its_end_however_it_comes():
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner) as engine:
            streams = [engine.generate([i], greedy(n=2, max_tokens=50)) for i in range(2)]
            cancelled, failed = (asyncio.create_task(stream.collect()) for stream in streams)
            gate.release(3)
            await until(lambda: all(stream.usage.num_generated_tokens >= 2 for stream in streams))
            streams[0].cancel()
            for completion in await cancelled:
                assert completion.finish_reason is FinishReason.ABORT
                assert completion.token_ids != ()
            runner.fail_next = "a test"
            gate.release(10)
            with pytest.raises(GenerationError, match="a test"):
                await failed

    run(main)


def test_a_ready_delta_is_taken_without_awaiting():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=3)) as stream:
                await until(lambda: stream.finish_s is not None)
                with pytest.raises(StopIteration) as done:
                    stream.__anext__().send(None)
                assert len(done.value.value.token_ids) == 3

    run(main)


def test_a_timeout_while_waiting_for_a_delta_loses_nothing():
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=2)) as stream:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.01)
                gate.release(2)
                deltas = await read(stream)
            token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
            assert token_ids == oracle(runner, PROMPT, 2)

    run(main)


def test_misuse_of_a_stream_is_a_clear_error():
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner) as engine:
            stream = engine.generate(PROMPT, greedy(max_tokens=3))
            with pytest.raises(RuntimeError, match="async with"):
                await anext(stream)
            async with stream:
                with pytest.raises(RuntimeError, match="once"):
                    await stream.__aenter__()
                reader = asyncio.create_task(anext(stream))
                await asyncio.sleep(0)
                with pytest.raises(RuntimeError, match="one reader"):
                    await anext(stream)
                gate.release(3)
                assert (await reader).token_ids
            with pytest.raises(RuntimeError, match="context was left"):
                await anext(stream)
            with pytest.raises(RuntimeError, match="once"):
                async with stream:
                    pass

    run(main)


class CancelledBetweenLines(asyncio.Future):
    """As if Ctrl+C came while it is looked at: asyncio's handler then cancels what is awaited."""

    def done(self) -> bool:
        was_done = super().done()
        self.cancel()
        return was_done


def test_a_reader_cancelled_while_it_is_woken_costs_nobody_anything(monkeypatch):
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=5)) as stream:
                reader = asyncio.create_task(anext(stream))
                with monkeypatch.context() as patch:
                    patch.setattr(loop, "create_future", lambda: CancelledBetweenLines(loop=loop))
                    await asyncio.sleep(0)
                gate.release(5)
                with pytest.raises(asyncio.CancelledError):
                    await reader
                token_ids = [token for delta in await read(stream) for token in delta.token_ids]
            assert token_ids == oracle(runner, PROMPT, 5)

    run(main)


def test_facts_of_a_stream_are_empty_before_it_is_entered():
    engine = make_engine(make_runner())
    stream = engine.generate(PROMPT, request_id="mine")
    assert (stream.request_id, stream.model, stream.prompt_token_ids) == ("mine", "fake", ())
    assert (stream.arrival_s, stream.first_token_s, stream.finish_s) == (None, None, None)
    assert stream.usage.num_prompt_tokens == 0
    assert engine.generate(PROMPT).request_id != engine.generate(PROMPT).request_id


def test_parts_of_a_long_prompt_are_described_without_copying_the_whole():
    class Prompt(tuple[int, ...]):
        def __getitem__(self, key: Any) -> Any:
            assert isinstance(key, int)
            return super().__getitem__(key)

    prompt = PromptOutput(
        Prompt(range(5, 55)), SamplingParams(prompt_logprobs=0), TOKENIZER, wants_progress=False
    )
    assert prompt.describe(0, 50) == ()
    scores = [RowLogprobs(-float(i), i, b"", b"") for i in range(1, 50)]
    prompt.push(20, scores[:20])
    assert [one and (one.token_id, one.rank) for one in prompt.describe(18, 40)] == [
        (5 + i, i) for i in range(18, 21)
    ]
    prompt.push(50, scores[20:])
    assert [one and (one.token_id, one.rank) for one in prompt.describe(0, 50)] == [
        None,
        *((5 + i, i) for i in range(1, 50)),
    ]
