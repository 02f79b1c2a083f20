"""What the engine tests share: running a coroutine with a deadline, and a small engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fakes import FakeRunner, expected_tokens
from tiny import tiny_tokenizer

from streamkv.core.scheduler import Scheduler
from streamkv.engine.async_engine import AsyncEngine
from streamkv.engine.stream import TokenDelta, TokenStream
from streamkv.protocol import SamplingParams

DEADLINE_S = 20.0
TOKENIZER = tiny_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size
SPECIAL_IDS = sorted(TOKENIZER.special_token_ids)
(EOS_ID,) = TOKENIZER.eos_token_ids
# With these avoided, each token is one or more whole characters.
NOT_ASCII_IDS = [
    i
    for i in range(VOCAB_SIZE)
    if i in SPECIAL_IDS or not all(32 <= byte < 127 for byte in TOKENIZER.token_bytes(i))
]


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts its iterations, and its wake-ups by what others have made readable."""

    num_iterations = 0
    num_wakeups = 0

    def _run_once(self) -> None:
        self.num_iterations += 1
        super()._run_once()

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        def counted() -> None:
            self.num_wakeups += 1
            callback(*args)

        super().add_reader(fd, counted)


def run(main: Callable[[], Awaitable[Any]], *, loop_factory: Any = None) -> Any:
    """Run to the end on a new loop, or fail after the deadline."""

    async def bounded() -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await main()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(bounded())


def make_runner(**options: Any) -> FakeRunner:
    """A FakeRunner of the tiny tokenizer's vocabulary that never samples a special token."""
    return FakeRunner(**{"vocab_size": VOCAB_SIZE, "avoid": SPECIAL_IDS} | options)


def make_engine(runner: FakeRunner, **overrides: Any) -> AsyncEngine:
    return AsyncEngine("fake", runner=runner, **{"tokenizer": TOKENIZER} | overrides)


def greedy(**params: Any) -> SamplingParams:
    """As far as the context allows, unless `params` say otherwise."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": None} | params)


def oracle(runner: FakeRunner, prompt: Sequence[int], num: int, **options: Any) -> list[int]:
    """What the runner answers to the prompt, computed one token after another."""
    return expected_tokens(prompt, num, runner.info.vocab_size, avoid=runner.avoid, **options)


def scheduler_of(engine: AsyncEngine) -> Scheduler:
    assert engine._loop is not None
    return engine._loop.scheduler


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds; `run` sets the deadline."""
    while not condition():
        await asyncio.sleep(0)


async def until_idle(engine: AsyncEngine) -> None:
    scheduler = scheduler_of(engine)
    await until(lambda: not (scheduler.has_work or scheduler.is_busy))


def check_nothing_is_held(engine: AsyncEngine, runner: FakeRunner) -> None:
    """Every block is free, the books are right, and the runner saw nothing wrong."""
    stats = engine.stats()
    assert stats.num_requests_running == stats.num_requests_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks
    scheduler_of(engine).check_integrity()
    assert runner.violations == []


async def read(stream: TokenStream) -> list[TokenDelta]:
    return [delta async for delta in stream]
