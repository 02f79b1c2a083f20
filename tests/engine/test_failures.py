"""What goes wrong on the device, while loading and in the engine itself; who learns of it."""

from __future__ import annotations

import asyncio
import threading

import pytest
from engine.support import (
    SPECIAL_IDS,
    TOKENIZER,
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

from streamkv._cpu import Channel
from streamkv.engine.async_engine import AsyncEngine, EngineStatus
from streamkv.errors import (
    EngineDeadError,
    EngineNotReadyError,
    GenerationError,
    ModelLoadError,
)
from streamkv.protocol import FinishReason, SamplingParams
from streamkv.text.tokenizer import Tokenizer

PROMPT = [8, 9, 10]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_failed_step_ends_its_requests_and_no_others(async_scheduling):
    """One row: the second request waits while the first one's step fails."""
    runner = make_runner(gate=(gate := threading.Semaphore(4)))

    async def main() -> None:
        options = {"async_scheduling": async_scheduling, "max_num_seqs": 1}
        async with make_engine(runner, **options) as engine:
            async with (
                engine.generate(PROMPT, SamplingParams(n=1, max_tokens=50)) as first,
                engine.generate([1, 2], greedy(max_tokens=6)) as second,
            ):
                await until(lambda: first.usage.num_generated_tokens == 4)
                runner.fail_next = "the device caught fire"
                gate.release(20)
                tokens = []
                with pytest.raises(GenerationError, match="caught fire"):
                    async for delta in first:
                        assert delta.finish_reason is None
                        tokens += delta.token_ids
                assert len(tokens) == 4
                (completion,) = await second.collect()
                assert list(completion.token_ids) == oracle(runner, [1, 2], 6)
            assert engine.status is EngineStatus.READY
            assert engine.stats().request_success_total["error"] == 1
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


def test_a_failed_step_ends_all_choices_of_its_request():
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner, max_num_seqs=2) as engine:
            async with engine.generate(PROMPT, SamplingParams(n=5, max_tokens=50)) as stream:
                runner.fail_next = "broken"
                gate.release(10)
                with pytest.raises(GenerationError):
                    await read(stream)
                assert engine.stats().num_requests_waiting == 0
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


def test_an_exception_in_a_step_is_a_failed_step():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner, async_scheduling=False) as engine:
            runner.crash_next = ZeroDivisionError("by zero")
            with pytest.raises(GenerationError, match="ZeroDivisionError: by zero"):
                await engine.generate(PROMPT).collect()
            assert engine.status is EngineStatus.READY

    run(main)


def test_three_failed_steps_in_a_row_are_the_end_of_the_engine():
    runner = make_runner(max_model_len=200)

    async def main() -> None:
        async with make_engine(runner, async_scheduling=False) as engine:
            for round_ in range(2):  # a good step between: not in a row
                runner.fail_step_ids = frozenset((runner.num_steps, runner.num_steps + 1))
                for _ in range(2):
                    with pytest.raises(GenerationError):
                        await engine.generate(PROMPT, greedy(max_tokens=1)).collect()
                (completion,) = await engine.generate(PROMPT, greedy(max_tokens=1)).collect()
                assert completion.finish_reason is FinishReason.LENGTH, round_
            runner.fail_step_ids = frozenset(range(1000))
            outcomes = [
                await asyncio.gather(
                    engine.generate(PROMPT, greedy(max_tokens=1)).collect(), return_exceptions=True
                )
                for _ in range(4)
            ]
            kinds = [type(outcome) for (outcome,) in outcomes]
            assert kinds == [GenerationError] * 3 + [EngineDeadError]
            assert engine.status is EngineStatus.FAILED
            assert "3 steps failed" in engine.status_detail
            with pytest.raises(EngineDeadError, match="3 steps failed"):
                await engine.wait_ready()
            await until(lambda: runner.closed)

    run(main)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_without_finite_logits_fails_alone_however_often(async_scheduling):
    broken = 60
    runner = make_runner(max_model_len=200, avoid=[*SPECIAL_IDS, broken])
    runner.broken_token_ids = frozenset((broken,))

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=150)) as other:
                for _ in range(10):
                    with pytest.raises(GenerationError, match="logits were not finite"):
                        await engine.generate([broken, 9], SamplingParams(n=2)).collect()
                (completion,) = await other.collect()
            assert list(completion.token_ids) == oracle(runner, PROMPT, 150)
            for _ in range(10):  # and with nothing else that succeeds between
                with pytest.raises(GenerationError, match="logits were not finite"):
                    await engine.generate([broken]).collect()
            assert engine.status is EngineStatus.READY
            assert engine.stats().request_success_total["error"] == 30
            (completion,) = await engine.generate(PROMPT, greedy(max_tokens=5)).collect()
            assert list(completion.token_ids) == oracle(runner, PROMPT, 5)
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


def test_a_request_whose_logits_break_on_the_way_keeps_the_tokens_before():
    runner = make_runner()
    expected = oracle(runner, PROMPT, 6)
    runner.broken_token_ids = frozenset(expected[5:])

    async def main() -> None:
        async with make_engine(runner) as engine, engine.generate(PROMPT, greedy()) as stream:
            tokens = []
            with pytest.raises(GenerationError, match="logits were not finite"):
                async for delta in stream:
                    tokens += delta.token_ids
            assert tokens == expected

    run(main)


@pytest.mark.parametrize("broken", ["integrity", "schedule"])
def test_an_engine_whose_books_are_wrong_dies_and_nobody_hangs(broken):
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner) as engine:
            scheduler = scheduler_of(engine)
            async with (
                engine.generate(PROMPT, greedy(max_tokens=4)) as stream,
                engine.generate(PROMPT, SamplingParams(n=3, max_tokens=9)) as other,
            ):
                await until(lambda: engine.stats().num_requests_running > 0)
                if broken == "integrity":
                    other.cancel()
                    scheduler._kv.pool.take()  # found when the last request has ended
                    gate.release(10)
                    (completion,) = await stream.collect()
                    assert list(completion.token_ids) == oracle(runner, PROMPT, 4)
                else:
                    del scheduler._roster._free_rows
                    gate.release(10)
                    for reader in (stream, other):
                        with pytest.raises(EngineDeadError, match="_free_rows"):
                            await read(reader)
            await until(lambda: engine.status is EngineStatus.FAILED)
            with pytest.raises(EngineDeadError):
                await engine.generate(PROMPT).collect()
            await until(lambda: runner.closed)

    run(main)


def test_text_that_can_not_be_made_ends_one_request():
    class BrokenTokenizer(Tokenizer):
        def token_text(self, token_id: int) -> str:
            raise LookupError("no such text")

    broken = object.__new__(BrokenTokenizer)
    broken.__dict__.update(TOKENIZER.__dict__)
    runner = make_runner()

    async def main() -> None:
        async with AsyncEngine("fake", runner=runner, tokenizer=broken) as engine:
            with pytest.raises(GenerationError, match="no such text"):
                await engine.generate(PROMPT, greedy(logprobs=1)).collect()
            (completion,) = await engine.generate(PROMPT, greedy(max_tokens=5)).collect()
            assert list(completion.token_ids) == oracle(runner, PROMPT, 5)
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


@pytest.mark.parametrize(
    ("raised", "expected", "match"),
    [
        (ModelLoadError("no weights here"), ModelLoadError, "no weights here"),
        (ValueError("strange"), ModelLoadError, "while loading weights: ValueError: strange"),
    ],
)
def test_a_load_that_fails_is_told_to_all_and_the_engine_can_be_closed(raised, expected, match):
    runner = make_runner(load_error=raised)

    async def main() -> None:
        engine = make_engine(runner)
        await engine.start()
        for _ in range(2):
            with pytest.raises(expected, match=match):
                await engine.wait_ready()
        assert engine.status is EngineStatus.FAILED
        assert match in engine.status_detail
        with pytest.raises(EngineDeadError, match=match):
            await engine.generate(PROMPT).collect()
        await engine.close()
        assert engine.status is EngineStatus.CLOSED
        assert runner.closed

    run(main)


def test_entering_the_engine_raises_the_load_error_and_leaves_no_thread():
    runner = make_runner(load_error=ModelLoadError("gone"))

    async def main() -> None:
        with pytest.raises(ModelLoadError, match="gone"):
            async with make_engine(runner):
                pass
        assert runner.closed
        assert not [t for t in threading.enumerate() if t.name.startswith("streamkv")]

    run(main)


def test_a_request_that_comes_while_the_model_loads_is_told_how_far_it_is():
    runner = make_runner(load_gate=(load_gate := threading.Event()))

    async def main() -> None:
        engine = make_engine(runner)
        assert engine.status_detail == "not started"
        with pytest.raises(EngineNotReadyError, match="not started"):
            await engine.generate(PROMPT).collect()
        await engine.start()
        assert engine.status is EngineStatus.LOADING
        await until(lambda: engine.status_detail == "loading weights 50 %")
        with pytest.raises(EngineNotReadyError, match="loading weights 50 %"):
            await engine.generate(PROMPT).collect()
        with pytest.raises(EngineNotReadyError):
            _ = engine.info
        load_gate.set()
        await engine.wait_ready()
        assert engine.info == runner.info
        await engine.close()

    run(main)


def test_a_missing_checkpoint_is_a_load_error():
    async def main() -> None:
        with pytest.raises(ModelLoadError, match="does not exist"):
            async with AsyncEngine("no-such-model"):
                pass

    run(main)


@pytest.mark.parametrize("end", [MemoryError("no more"), KeyboardInterrupt("no more"), None])
def test_an_engine_whose_device_thread_ends_unasked_fails_and_nobody_hangs(end):
    reason = "no more" if end is not None else "has stopped serving"
    runner = make_runner()

    def serve(channel: Channel, idle_timeout_s: float) -> bool:
        if channel.receive(idle_timeout_s) is None:
            return channel.closed
        if end is not None:
            raise end
        return True

    runner.serve = serve

    async def main() -> None:
        async with make_engine(runner, max_num_seqs=1) as engine:
            streams = [engine.generate(PROMPT, SamplingParams(n=2)) for _ in range(3)]
            outcomes = await asyncio.gather(
                *(stream.collect() for stream in streams), return_exceptions=True
            )
            for outcome in outcomes:
                assert isinstance(outcome, EngineDeadError)
                assert reason in str(outcome)
            assert engine.status is EngineStatus.FAILED
            assert reason in engine.status_detail
            with pytest.raises(EngineDeadError, match=reason):
                await engine.generate(PROMPT).collect()
            with pytest.raises(EngineDeadError, match=reason):
                await engine.wait_ready()
            assert engine.stats().request_success_total["error"] == 6
            await until(lambda: runner.closed)
        assert engine.status is EngineStatus.CLOSED

    run(main)


def test_an_engine_whose_device_thread_ends_before_it_is_ready_fails():
    runner = make_runner()
    runner.serve = lambda channel, idle_timeout_s: True

    async def main() -> None:
        engine = make_engine(runner)
        await engine.start()
        await until(lambda: engine.status is EngineStatus.FAILED)
        with pytest.raises(EngineDeadError, match="has stopped serving"):
            await engine.wait_ready()
        with pytest.raises(EngineDeadError, match="has stopped serving"):
            await engine.generate(PROMPT).collect()
        await engine.close()

    run(main)
