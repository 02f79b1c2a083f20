"""Readers that are called instead of waiting: when, how often, and what they may take then."""

from __future__ import annotations

import asyncio
import threading

import pytest
from engine.support import (
    NOT_ASCII_IDS,
    TOKENIZER,
    check_nothing_is_held,
    greedy,
    make_engine,
    make_runner,
    oracle,
    read,
    run,
    until,
    until_idle,
)
from fakes import expected_scores

from streamkv.engine.async_engine import AsyncEngine, EngineStatus
from streamkv.engine.stream import TokenDelta, TokenStream
from streamkv.errors import EngineDeadError, GenerationError
from streamkv.protocol import FinishReason, SamplingParams

PROMPT = [4, 5, 6]


class Reader:
    """Takes all there is whenever it is called."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.deltas: list[TokenDelta] = []
        self.num_calls = 0
        stream.subscribe(self)

    def __call__(self) -> None:
        self.num_calls += 1
        while (delta := self.stream.take()) is not None:
            self.deltas.append(delta)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    async def done(self) -> None:
        await until(lambda: self.stream.done)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_subscriber_is_called_once_a_turn_and_gets_what_an_iterator_gets(async_scheduling):
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            sampling = SamplingParams(n=3, seed=1, max_tokens=20)
            async with engine.generate(PROMPT, sampling) as stream:
                reader = Reader(stream)
                assert reader.num_calls == 0
                await reader.done()
                assert stream.error is None
                assert reader.num_calls <= runner.num_steps + 1
            for choice in range(3):
                mine = [delta for delta in reader.deltas if delta.choice == choice]
                expected = oracle(runner, PROMPT, 20, temperature=1.0, seed=1, choice=choice)
                assert [i for delta in mine for i in delta.token_ids] == expected
                assert "".join(delta.text for delta in mine) == TOKENIZER.decode(expected)
                assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
                assert mine[-1].finish_reason is FinishReason.LENGTH
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


def test_who_subscribes_late_is_called_soon_but_not_at_once():
    async def main() -> None:
        async with make_engine(make_runner()) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=5)) as stream:
                await until(lambda: stream.finish_s is not None)
                reader = Reader(stream)
                assert reader.deltas == []
                await until(lambda: reader.num_calls)
                assert len(reader.token_ids) == 5 and stream.done
                again = Reader(stream)  # it is done: that is news too
                await until(lambda: again.num_calls)
                assert again.deltas == []

    run(main)


def test_a_subscriber_that_takes_nothing_is_called_on_and_finds_one_delta():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=30)) as stream:
                calls = []
                stream.subscribe(lambda: calls.append(stream.usage.num_generated_tokens))
                await until(lambda: stream.finish_s is not None and calls[-1] == 30)
                assert len(calls) > 5 and not stream.done
                delta = stream.take()
                assert list(delta.token_ids) == oracle(runner, PROMPT, 30)
                assert stream.take() is None and stream.done

    run(main)


def test_what_a_subscriber_raises_ends_its_own_request():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with (
                engine.generate(PROMPT, greedy(max_tokens=50)) as broken,
                engine.generate([9], greedy(max_tokens=50)) as other,
            ):
                calls = []

                def fail() -> None:
                    calls.append(1)
                    raise ValueError("no place to write to")

                broken.subscribe(fail)
                reader = Reader(other)
                await reader.done()
                assert reader.token_ids == oracle(runner, [9], 50)
                assert calls == [1]
                assert engine.stats().request_success_total["error"] == 1
                while broken.take() is not None:
                    pass
                assert broken.done and isinstance(broken.error, GenerationError)
                assert "no place to write to" in broken.error.message
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


def test_a_subscriber_may_end_any_request_from_within():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with (
                engine.generate([1], greedy(max_tokens=90)) as first,
                engine.generate([2], greedy(max_tokens=90)) as second,
            ):
                seconds = Reader(second)

                def end_both() -> None:
                    if first.usage.num_generated_tokens >= 3:
                        first.cancel()
                        second.cancel()

                first.subscribe(end_both)
                await seconds.done()
                assert seconds.deltas[-1].finish_reason is FinishReason.ABORT
                assert (await read(first))[-1].finish_reason is FinishReason.ABORT
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


@pytest.mark.parametrize("end", ["close", "end_requests", "crash", "fail"])
def test_a_subscriber_hears_of_the_end_however_it_comes(end):
    gate = threading.Semaphore(0)
    runner = make_runner(gate=gate)

    async def end_it(engine: AsyncEngine) -> None:
        if end == "close":
            gate.release(100)
            await engine.close()
        elif end == "end_requests":
            engine.end_requests()
        elif end == "crash":
            engine._on_device_dead(EngineDeadError("it has ended"))
        else:
            runner.fail_next = "a test"

    async def main() -> None:
        engine = make_engine(runner)
        async with engine:
            async with engine.generate(PROMPT, greedy(max_tokens=90)) as stream:
                reader = Reader(stream)
                gate.release(3)
                await until(lambda: len(reader.token_ids) == 3)
                num_calls = reader.num_calls
                await end_it(engine)
                gate.release(100)
                await reader.done()
                await until(lambda: reader.num_calls > num_calls)
                if end == "close":
                    assert reader.deltas[-1].finish_reason is FinishReason.ABORT
                    assert stream.error is None
                else:
                    expected = GenerationError if end == "fail" else EngineDeadError
                    assert isinstance(stream.error, expected)

    run(main)


def test_nobody_is_called_after_the_context_was_left():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=90)) as stream:
                reader = Reader(stream)
                await until(lambda: reader.deltas)
            num_calls = reader.num_calls
            await until_idle(engine)
            assert reader.num_calls == num_calls
            for use in (stream.take, lambda: stream.done, lambda: stream.subscribe(reader)):
                with pytest.raises(RuntimeError, match="context was left"):
                    use()

    run(main)


def test_a_subscriber_far_behind_gets_log_probabilities_in_parts_and_lets_others_run():
    runner = make_runner(max_model_len=400, avoid=NOT_ASCII_IDS)

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = greedy(max_tokens=200, logprobs=3)
            async with engine.generate(PROMPT, sampling) as stream:
                await until(lambda: stream.finish_s is not None)
                reader = Reader(stream)
                await reader.done()
                assert [len(delta.logprobs) for delta in reader.deltas] == [64, 64, 64, 8]
                assert reader.num_calls >= 4
            assert reader.token_ids == oracle(runner, PROMPT, 200)

    run(main)


# --- what else can be asked of a stream ----------------------------------------------------------


def test_all_that_came_so_far_is_told_whether_it_was_taken_or_not():
    gate = threading.Semaphore(0)
    runner = make_runner(gate=gate, avoid=NOT_ASCII_IDS)

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = SamplingParams(n=2, seed=1, max_tokens=9, stop="never")
            stream = engine.generate(PROMPT, sampling)
            assert stream.so_far() == []
            async with stream:
                gate.release(5)
                await until(lambda: stream.usage.num_generated_tokens >= 6)
                stream.take()
                assert engine.find(stream.request_id) is stream
                for choice, one in enumerate(stream.so_far()):
                    expected = oracle(runner, PROMPT, 9, temperature=1.0, seed=1, choice=choice)
                    assert list(one.token_ids) == expected[: len(one.token_ids)]
                    assert TOKENIZER.decode(one.token_ids).startswith(one.text)
                    assert one.text != "" and one.finish_reason is None
                gate.release(100)
                completions = await stream.collect()
            for completion, one in zip(completions, stream.so_far(), strict=True):
                assert one.choice == completion.choice
                assert one.finish_reason is FinishReason.LENGTH
                assert one.text.endswith(completion.text)

    run(main)


def test_candidates_are_told_of_once_the_best_are_known():
    async def main() -> None:
        async with make_engine(make_runner()) as engine:
            sampling = SamplingParams(n=1, best_of=3, seed=1, max_tokens=5)
            async with engine.generate(PROMPT, sampling) as stream:
                assert stream.so_far() == []
                (completion,) = await stream.collect()
                (one,) = stream.so_far()
                assert (one.text, one.token_ids) == (completion.text, completion.token_ids)

    run(main)


def test_a_stream_is_found_by_its_id_until_it_is_left():
    async def main() -> None:
        engine = make_engine(make_runner())
        assert engine.find("a") is None
        async with engine:
            stream = engine.generate(PROMPT, greedy(max_tokens=3), request_id="a")
            assert engine.find("a") is None
            async with stream:
                assert engine.find("a") is stream
                await read(stream)
                assert engine.find("a") is stream
                # Its id is free once it has ended; leaving it doesn't hide who has it now.
                async with engine.generate(PROMPT, greedy(max_tokens=3), request_id="a") as other:
                    await stream.__aexit__(None, None, None)
                    assert engine.find("a") is other
                    stream.cancel()
                    assert (await read(other))[-1].finish_reason is FinishReason.LENGTH
            assert engine.find("a") is None

    run(main)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_paused_request_holds_nothing_and_goes_on_as_if_nothing_had_been(async_scheduling):
    gate = threading.Semaphore(0)
    runner = make_runner(gate=gate)

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            sampling = SamplingParams(n=2, seed=1, max_tokens=40)
            stream = engine.generate(PROMPT, sampling)
            stream.pause()  # before there is anything
            async with stream:
                stream.pause()  # before the scheduler has seen it
                gate.release(100)
                (other,) = await engine.generate([9], greedy(max_tokens=5)).collect()
                assert list(other.token_ids) == oracle(runner, [9], 5)
                assert stream.usage.num_generated_tokens == 0
                stream.resume()
                await until(lambda: stream.usage.num_generated_tokens > 9)
                stream.pause()
                stream.pause()
                await until_idle(engine)
                num_tokens = stream.usage.num_generated_tokens
                stats = engine.stats()
                assert (stats.num_requests_running, stats.num_free_blocks) == (0, stats.num_blocks)
                for _ in range(20):
                    await asyncio.sleep(0)
                assert stream.usage.num_generated_tokens == num_tokens < 80
                stream.resume()
                stream.resume()
                gate.release(100)
                for completion in await stream.collect():
                    assert list(completion.token_ids) == oracle(
                        runner, PROMPT, 40, temperature=1.0, seed=1, choice=completion.choice
                    )
            stream.pause()
            stream.resume()
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


@pytest.mark.parametrize("num_steps", [0, 5])
def test_a_paused_request_may_be_left(num_steps):
    gate = threading.Semaphore(0)
    runner = make_runner(gate=gate)

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=40)) as stream:
                gate.release(num_steps or 1)
                await until(lambda: stream.usage.num_generated_tokens == num_steps)
                stream.pause()
                gate.release(100)
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


def test_a_stream_pauses_itself_and_no_other_that_has_its_id_now():
    gate = threading.Semaphore(0)
    runner = make_runner(gate=gate)

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=2), request_id="a") as stream:
                gate.release(2)
                await until(lambda: stream.finish_s is not None)  # and nobody has read it
                async with engine.generate([9], greedy(max_tokens=9), request_id="a") as other:
                    stream.pause()
                    gate.release(100)
                    (completion,) = await other.collect()
                    assert list(completion.token_ids) == oracle(runner, [9], 9)

    run(main)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_paused_request_may_be_resumed_after_the_engines_end(is_closed):
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=40)) as stream:
                gate.release(1)
                await until(lambda: stream.usage.num_generated_tokens == 1)
                stream.pause()
                gate.release(100)
                await until_idle(engine)
                assert stream.finish_s is None
                runner.fail_step_ids = frozenset(range(100))
                while not is_closed and engine.status is EngineStatus.READY:
                    with pytest.raises(GenerationError):
                        await engine.generate([9], greedy(max_tokens=4)).collect()
                if is_closed:
                    await engine.close()
                assert stream.finish_s is not None
                stream.resume()
                stream.pause()

    run(main)


def test_progress_of_a_prompt_is_told_a_chunk_at_a_time():
    runner = make_runner()
    prompt = [i % 60 for i in range(50)]

    async def main() -> None:
        async with make_engine(runner, max_num_batched_tokens=16) as engine:
            stream = engine.generate(prompt, greedy(max_tokens=4), wants_progress=True)
            assert stream.progress == (0, 0)
            async with stream:
                assert stream.progress == (0, 50)
                reader = Reader(stream)
                await reader.done()
                assert stream.progress == (50, 50)
            told = [delta.progress for delta in reader.deltas if delta.progress]
            assert told == [(16, 50), (32, 50), (48, 50), (50, 50)]
            assert reader.token_ids == oracle(runner, prompt, 4)
            # Who doesn't want it isn't told, and knows all the same that it is done.
            async with engine.generate(prompt, greedy(max_tokens=4)) as stream:
                assert all(delta.progress is None for delta in await read(stream))
                assert stream.progress == (50, 50)

    run(main)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_prompts_log_probabilities_come_before_its_tokens_and_all_at_the_end(async_scheduling):
    runner = make_runner(max_model_len=300, num_blocks=128)
    prompt = [i % 60 for i in range(150)]
    scores = expected_scores(prompt, 2, runner.info.vocab_size)

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            sampling = greedy(max_tokens=4, prompt_logprobs=2, n=2, seed=1)
            async with engine.generate(prompt, sampling) as stream:
                assert stream.prompt_logprobs == ()
                reader = Reader(stream)
                await reader.done()
                described = stream.prompt_logprobs
            parts = [delta.prompt_logprobs for delta in reader.deltas if delta.prompt_logprobs]
            assert all(len(part) <= 64 for part in parts)
            assert tuple(one for part in parts for one in part) == described
            assert described[0] is None and len(described) == 150
            for token_id, one, row in zip(prompt[1:], described[1:], scores, strict=True):
                assert (one.token_id, one.logprob, one.rank) == (token_id, row.logprob, row.rank)
                assert one.bytes == TOKENIZER.token_bytes(token_id)
                assert len(one.top) == 2
            first = next(i for i, delta in enumerate(reader.deltas) if delta.token_ids)
            assert all(not delta.prompt_logprobs for delta in reader.deltas[first:])
            assert stream.describe_prompt(10, 12) == described[10:12]

            stream = engine.generate(prompt, sampling)
            assert len(await stream.collect()) == 2
            assert stream.prompt_logprobs == described
            alone = engine.generate([5], greedy(max_tokens=2, prompt_logprobs=0))
            await alone.collect()
            assert alone.prompt_logprobs == (None,)

    run(main)
