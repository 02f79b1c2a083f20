"""Opening and closing: every state, many times, several at once, and what idling costs."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import uvloop
from engine.support import (
    TOKENIZER,
    CountingLoop,
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

from streamkv.engine.async_engine import AsyncEngine, EngineStatus
from streamkv.engine.stream import TokenStream
from streamkv.errors import EngineDeadError
from streamkv.protocol import FinishReason, SamplingParams

PROMPT = [3, 4, 5]
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def engine_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("streamkv")]


def test_closing_ends_all_streams_with_abort_and_is_idempotent():
    runner = make_runner(gate=(gate := threading.Semaphore(2)))

    async def main() -> None:
        engine = make_engine(runner, max_num_seqs=4)
        async with engine:
            streams = [engine.generate([i], SamplingParams(n=2, max_tokens=50)) for i in range(4)]
            readers = [asyncio.create_task(stream.collect()) for stream in streams]
            await until(lambda: engine.stats().num_requests_running == 4)
            assert engine.stats().num_requests_waiting == 4
            closing = [asyncio.create_task(engine.close()) for _ in range(2)]
            await asyncio.sleep(0)
            assert engine.status is EngineStatus.CLOSED
            for completions in await asyncio.gather(*readers):
                assert [c.finish_reason for c in completions] == [FinishReason.ABORT] * 2
            gate.release(10)
            await asyncio.gather(*closing)
        await engine.close()
        assert runner.closed
        assert engine_threads() == []
        with pytest.raises(EngineDeadError, match="closed"):
            await engine.generate(PROMPT).collect()
        with pytest.raises(EngineDeadError):
            await engine.wait_ready()
        with pytest.raises(RuntimeError, match="started once"):
            await engine.start()
        stats = engine.stats()
        assert stats.request_success_total["abort"] == 8
        assert stats.num_requests_running == stats.num_requests_waiting == 0

    run(main)


def test_an_engine_can_be_closed_before_it_is_started():
    async def main() -> None:
        engine = make_engine(make_runner())
        await engine.close()
        assert engine.status is EngineStatus.CLOSED
        with pytest.raises(EngineDeadError):
            await engine.wait_ready()
        with pytest.raises(RuntimeError, match="started once"):
            await engine.start()

    run(main)


def test_closing_while_loading_tells_those_who_wait_for_it():
    runner = make_runner(load_gate=(load_gate := threading.Event()))

    async def main() -> None:
        engine = make_engine(runner)
        await engine.start()
        waiting = asyncio.create_task(engine.wait_ready())
        await until(lambda: engine.status_detail == "loading weights 50 %")
        closing = asyncio.create_task(engine.close())
        with pytest.raises(EngineDeadError):
            await waiting
        load_gate.set()
        await closing
        assert runner.closed
        assert engine_threads() == []

    run(main)


def test_closing_right_after_the_start_works():
    async def main() -> None:
        runner = make_runner()
        engine = make_engine(runner)
        await engine.start()
        await engine.close()
        assert engine.status is EngineStatus.CLOSED
        assert engine_threads() == []

    run(main)


def test_starting_returns_before_anything_is_loaded():
    runner = make_runner(load_gate=(load_gate := threading.Event()))

    async def main() -> None:
        engine = make_engine(runner)
        await engine.start()
        assert engine.status is EngineStatus.LOADING
        with pytest.raises(RuntimeError, match="started once"):
            await engine.start()
        load_gate.set()
        await engine.wait_ready()
        assert engine.status is EngineStatus.READY
        await engine.close()

    run(main)


def count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("loop_factory", LOOPS)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts file descriptors in /proc")
def test_twenty_cycles_leak_no_thread_no_file_and_no_object(loop_factory):
    async def cycle() -> weakref.ref[AsyncEngine]:
        async with make_engine(make_runner()) as engine:
            await engine.generate(PROMPT, SamplingParams(n=2, max_tokens=9)).collect()
            async with engine.generate(PROMPT, greedy(max_tokens=50)):
                return weakref.ref(engine)

    async def main() -> None:
        await cycle()
        gc.collect()
        before = (threading.active_count(), count_fds(), len(gc.get_objects()))
        references = [await cycle() for _ in range(20)]
        gc.collect()
        after = (threading.active_count(), count_fds(), len(gc.get_objects()))
        assert after[:2] == before[:2]
        assert [ref for ref in references if ref() is not None] == []
        assert after[2] - before[2] < 20 * 5  # the list of references, and little else

    run(main, loop_factory=loop_factory)


def test_two_engines_serve_in_one_process():
    first, second = make_runner(), make_runner(block_size=2, max_model_len=64)

    async def main() -> None:
        async with make_engine(first) as one, make_engine(second, async_scheduling=False) as two:
            streams = [
                e.generate([i], greedy(max_tokens=30)) for i in range(20) for e in (one, two)
            ]
            results = await asyncio.gather(*(stream.collect() for stream in streams))
            for index, (completion,) in enumerate(results):
                assert list(completion.token_ids) == oracle(first, [index // 2], 30)
            await two.close()
            (completion,) = await one.generate([7], greedy(max_tokens=30)).collect()
            assert list(completion.token_ids) == oracle(first, [7], 30)

    run(main)


def test_an_idle_engine_does_not_wake_the_loop():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with make_engine(make_runner()) as engine:
            await engine.generate(PROMPT, greedy(max_tokens=9)).collect()
            await until_idle(engine)
            before = loop.num_iterations
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 0.3)
            assert loop.num_iterations - before < 8  # the timeout's own

    run(main, loop_factory=CountingLoop)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_loop_is_woken_once_a_step_however_many_streams_there_are(async_scheduling):
    runner = make_runner(num_blocks=500)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            before = loop.num_wakeups
            streams = [engine.generate([i, 1], SamplingParams(max_tokens=20)) for i in range(40)]
            await asyncio.gather(*(stream.collect() for stream in streams))
            await until_idle(engine)
            num_wakeups = loop.num_wakeups - before
            assert num_wakeups <= runner.num_steps < 40
            if not async_scheduling:  # else two steps may share one
                assert num_wakeups == runner.num_steps

    run(main, loop_factory=CountingLoop)


@pytest.mark.parametrize(("async_scheduling", "expected"), [(False, 1), (True, 2)])
def test_the_device_is_kept_one_step_ahead(async_scheduling, expected):
    """When a step ends, the next one is with the device before any reader hears of the first."""
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            async with engine.generate(PROMPT, greedy(max_tokens=10)) as stream:
                for _ in range(5):
                    gate.release()
                    await anext(stream)
                    assert scheduler_of(engine).num_in_flight_steps == expected
                gate.release(5)
                await read(stream)

    run(main)


def test_chats_are_encoded_with_the_template():
    async def main() -> None:
        async with make_engine(make_runner()) as engine:
            messages = [{"role": "user", "content": "hello"}]
            text = TOKENIZER.apply_chat_template(messages)
            assert await engine.encode_chat(messages) == TOKENIZER.encode(text)
            assert await engine.encode("the fox") == TOKENIZER.encode("the fox")

    run(main)


def test_two_lines_at_ready_and_one_per_request_at_debug(caplog):
    async def main() -> None:
        async with make_engine(make_runner()) as engine:
            await engine.generate(PROMPT, greedy(max_tokens=2), request_id="mine").collect()

    with caplog.at_level(logging.DEBUG, logger="streamkv"):
        run(main)
    ready, memory, request = (record for record in caplog.records)
    assert ready.levelno == memory.levelno == logging.INFO
    assert "fake is ready on cpu: " in ready.getMessage()
    assert "64 blocks of 4 (2.0 KiB) for 256 tokens, 2.0 sequences of 128" in memory.getMessage()
    assert request.levelno == logging.DEBUG
    assert "mine ended: 3 prompt tokens" in request.getMessage()


def run_program(program: str) -> None:
    """Run it to its end; it prints "ended" as the last thing it does."""
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(tests.parent)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


# An engine that was used, and is not closed.
PROGRAM = """\
import asyncio, threading, time
from engine.support import greedy, make_engine, make_runner
from streamkv.engine import threads
engine = None
async def begin():
    global engine
    engine = make_engine(make_runner())
    await engine.wait_ready()
    await engine.generate([1], greedy(max_tokens=3)).collect()
"""


def test_a_program_that_forgets_to_close_its_engine_still_ends():
    run_program("asyncio.run(begin())\nprint('ended')\n")


def test_a_program_that_forgets_its_loop_in_a_daemon_thread_still_ends():
    run_program("""
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
asyncio.run_coroutine_threadsafe(begin(), loop).result(20)
print('ended')
""")


def test_an_engine_serves_on_in_a_thread_that_outlives_the_main_script():
    """Whatever the idle check sees meanwhile; and once it is closed the process ends."""
    run_program("""
threads.EXIT_CHECK_S = 0.05
is_abandoned = threads.is_abandoned
def check(loop):
    if not threading.main_thread().is_alive():
        verdicts.append(is_abandoned(loop))
        return verdicts[-1]
    return is_abandoned(loop)
verdicts = []
threads.is_abandoned = check
async def use():
    while len(verdicts) < 5:  # looked at with the main thread gone, and let live
        await asyncio.sleep(0.01)
    assert not any(verdicts)
    (completion,) = await engine.generate([1], greedy(max_tokens=3)).collect()
    assert len(completion.token_ids) == 3
    await engine.close()
    print('ended')
async def main():
    await begin()
    await asyncio.wait_for(use(), 20)
threading.Thread(target=lambda: asyncio.run(main())).start()
""")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_stream_can_be_left_after_its_event_loop_was_closed(async_scheduling):
    gate = threading.Semaphore(0)
    engine = make_engine(make_runner(gate=gate), async_scheduling=async_scheduling)
    loop = asyncio.new_event_loop()

    async def begin() -> list[TokenStream]:
        await engine.wait_ready()
        streams = [engine.generate([i, 1], greedy(max_tokens=50)) for i in range(3)]
        for stream in streams:
            await stream.__aenter__()
        return streams

    first, second, third = loop.run_until_complete(begin())
    waiting = [loop.create_task(anext(second)), loop.create_task(engine.wait_draining())]
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()  # with tasks that wait
    first.cancel()
    second.cancel()
    gate.release(10)

    async def end() -> None:
        await third.__aexit__(None, None, None)
        await engine.abort(third.request_id)
        await engine.close()

    run(end)
    assert engine.status is EngineStatus.CLOSED
    assert engine_threads() == []
    for task in waiting:  # or it would say that it was left behind
        task._log_destroy_pending = False
    assert all(stream.finish_s is not None for stream in (first, second, third))


def test_waiting_for_an_engine_that_nobody_has_started_starts_it():
    async def main() -> None:
        engine = make_engine(make_runner())
        await asyncio.gather(engine.wait_ready(), engine.wait_ready())
        assert engine.status is EngineStatus.READY
        assert len(engine_threads()) == 1
        await engine.start()  # asked for once: the same engine
        with pytest.raises(RuntimeError, match="started once"):
            await engine.start()
        (completion,) = await engine.generate(PROMPT, greedy(max_tokens=3)).collect()
        assert len(completion.token_ids) == 3
        assert len(engine_threads()) == 1
        await engine.close()
        assert engine_threads() == []

    run(main)
