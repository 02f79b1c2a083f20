"""Leaving early, at every stage of a request's life."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from engine.support import (
    VOCAB_SIZE,
    check_nothing_is_held,
    greedy,
    make_engine,
    make_runner,
    oracle,
    read,
    run,
    scheduler_of,
    until,
    until_idle,
)

from streamkv.errors import EngineDeadError
from streamkv.protocol import FinishReason, SamplingParams

PROMPT = list(range(20))


async def check_freed_within_two_steps(engine, runner, gate) -> None:
    """Open the gate for the steps in flight, at most two, and no more."""
    in_flight = scheduler_of(engine).num_in_flight_steps
    assert in_flight <= 2
    num_steps = runner.num_steps
    gate.release(in_flight)
    await until_idle(engine)
    assert runner.num_steps <= num_steps + 2
    check_nothing_is_held(engine, runner)


def test_a_stream_cancelled_before_it_is_entered_ends_at_once():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            stream = engine.generate(PROMPT, SamplingParams(n=2))
            stream.cancel()
            async with stream:
                deltas = await read(stream)
            assert [delta.choice for delta in deltas] == [0, 1]
            assert {delta.finish_reason for delta in deltas} == {FinishReason.ABORT}
            await until_idle(engine)
            assert runner.num_steps == 0
            check_nothing_is_held(engine, runner)

    run(main)


LONG_TEXT = "the quick brown fox " * 10_000  # tokenized in a thread


def test_a_stream_cancelled_while_its_prompt_is_tokenized_ends_once_that_is_done():
    runner = make_runner(max_model_len=200_000, num_blocks=50_000)

    async def main() -> None:
        async with make_engine(runner) as engine:
            stream = engine.generate(LONG_TEXT, greedy(max_tokens=5))
            collecting = asyncio.create_task(stream.collect())
            await until(lambda: stream.arrival_s is not None)
            stream.cancel()
            (completion,) = await collecting
            assert completion.finish_reason is FinishReason.ABORT
            await until_idle(engine)
            assert runner.num_steps == 0

    run(main)


def test_a_prompt_that_is_tokenized_while_the_engine_closes_is_refused():
    async def main() -> None:
        async with make_engine(make_runner(max_model_len=200_000)) as engine:
            stream = engine.generate(LONG_TEXT)
            collecting = asyncio.create_task(stream.collect())
            await until(lambda: stream.arrival_s is not None)
            await engine.close()
            with pytest.raises(EngineDeadError, match="closed"):
                await collecting

    run(main)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("stage", "num_steps"), [("mid-prefill", 2), ("first token", 5), ("decoding", 9)]
)
def test_cancelling_gives_the_blocks_back_within_two_steps(async_scheduling, stage, num_steps):
    """The prompt of 20 tokens is computed in 5 steps of 4; then each step samples a token."""
    runner = make_runner(gate=(gate := threading.Semaphore(num_steps)))

    async def main() -> None:
        options = {"max_num_batched_tokens": 4, "async_scheduling": async_scheduling}
        async with make_engine(runner, **options) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=50)) as stream:
                num_tokens = max(num_steps - 4, 0)
                await until(
                    lambda: (
                        runner.num_steps == num_steps
                        and stream.usage.num_generated_tokens == num_tokens
                    )
                )
                stream.cancel()
                stream.cancel()
                deltas = await read(stream)
                token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
                assert token_ids == oracle(runner, PROMPT, num_tokens)
                assert deltas[-1].finish_reason is FinishReason.ABORT
                await check_freed_within_two_steps(engine, runner, gate)
            assert engine.stats().request_success_total["abort"] == 1

    run(main)


def test_cancelling_a_waiting_request_takes_it_out_of_the_queue():
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner, max_num_seqs=1) as engine:
            async with (
                engine.generate(PROMPT, greedy(max_tokens=2)) as first,
                engine.generate(PROMPT, greedy(max_tokens=2)) as second,
            ):
                await until(lambda: engine.stats().num_requests_running == 1)
                assert engine.stats().num_requests_waiting == 1
                second.cancel()
                assert engine.stats().num_requests_waiting == 0
                gate.release(2)
                (completion,) = await first.collect()
                assert list(completion.token_ids) == oracle(runner, PROMPT, 2)
                assert [d.finish_reason for d in await read(second)] == [FinishReason.ABORT]

    run(main)


def test_cancelling_after_the_end_changes_nothing():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=3)) as stream:
                await until(lambda: stream.finish_s is not None)
                stream.cancel()
                await engine.abort(stream.request_id)
                (delta,) = await read(stream)
                assert delta.finish_reason is FinishReason.LENGTH
                assert len(delta.token_ids) == 3

    run(main)


def test_an_old_stream_can_not_cancel_a_new_one_of_the_same_id():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            old = engine.generate(PROMPT, greedy(max_tokens=30), request_id="same")
            async with old:
                await anext(old)
            new = engine.generate(PROMPT, greedy(max_tokens=30), request_id="same")
            async with new:
                old.cancel()
                (completion,) = await new.collect()
            assert list(completion.token_ids) == oracle(runner, PROMPT, 30)

    run(main)


def test_leaving_the_context_early_aborts_the_request():
    runner = make_runner(gate=(gate := threading.Semaphore(8)))

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, SamplingParams(n=3, max_tokens=90)) as stream:
                async for _ in stream:
                    break
            assert engine.stats().num_requests_running == 0
            gate.release(2)
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


def test_cancelling_the_reading_task_aborts_the_request():
    runner = make_runner(gate=(gate := threading.Semaphore(3)))

    async def main() -> None:
        async with make_engine(runner) as engine:
            task = asyncio.create_task(engine.generate(PROMPT, greedy(max_tokens=9)).collect())
            await until(lambda: engine.stats().generation_tokens_total == 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.stats().num_requests_running == 0
            await check_freed_within_two_steps(engine, runner, gate)

    run(main)


def test_the_engine_aborts_by_request_id_and_knows_nothing_of_others():
    runner = make_runner(gate=(gate := threading.Semaphore(2)))

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=9), request_id="one") as stream:
                await engine.abort("another")
                await anext(stream)
                await engine.abort("one")
                deltas = await read(stream)
                assert deltas[-1].finish_reason is FinishReason.ABORT
            gate.release(2)

    run(main)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_clients_that_leave_at_random_moments_leave_nothing_behind(async_scheduling, seed):
    rng = random.Random(seed)
    runner = make_runner(num_blocks=80)

    async def client(engine, prompt: list[int], num: int, patience: int | None) -> None:
        async with engine.generate(prompt, greedy(max_tokens=num)) as stream:
            token_ids: list[int] = []
            async for delta in stream:
                token_ids += delta.token_ids
                if patience is not None and len(token_ids) >= patience:
                    return
        assert token_ids == oracle(runner, prompt, num)

    async def main() -> None:
        options = {"max_num_seqs": 12, "max_num_batched_tokens": 40}
        async with make_engine(runner, async_scheduling=async_scheduling, **options) as engine:
            tasks = []
            for _ in range(80):
                prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
                num = rng.randint(1, 40)
                leaves = rng.random() < 0.2
                patience = rng.randint(0, num) if leaves and rng.random() < 0.5 else None
                task = asyncio.create_task(client(engine, prompt, num, patience))
                tasks.append(task)
                if leaves and patience is None:
                    for _ in range(rng.randint(0, 30)):
                        await asyncio.sleep(0)
                    rng.choice(tasks).cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in results} == {type(None), asyncio.CancelledError}
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)
