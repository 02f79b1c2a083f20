"""Closed loops through AsyncEngine, in this process: `bench throughput` and `bench latency`.

Owns prompts, the loop and its figures. Knows the engine by its public interface alone. Prompts are
random tokens, new in each round, so that nothing but what is meant to be shared is found in the
prefix cache; greedy, without end tokens, so that every run does equal work.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ..config import EngineConfig
from ..engine.async_engine import AsyncEngine
from ..errors import StreamkvError
from ..protocol import SamplingParams
from .report import Figures, medians, percentile, print_report

THROUGHPUT = ("tokens_per_s", "prompt_tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "cores_busy")
LATENCY = (
    "ttft_p50_ms",
    "ttft_p90_ms",
    "ttft_p99_ms",
    "itl_p50_ms",
    "itl_p90_ms",
    "itl_p99_ms",
    "itl_max_ms",
    "tokens_per_s",
)


class Load(NamedTuple):
    """One closed loop."""

    concurrency: int
    input_len: int
    output_len: int
    shared_len: int  # of the input
    num_requests: int

    @property
    def name(self) -> str:
        shared = f" ({self.shared_len} shared)" if self.shared_len else ""
        return f"{self.concurrency} x {self.input_len}{shared} in, {self.output_len} out"

    def prompts(self, vocab_size: int, seed: str) -> list[list[int]]:
        source = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [source.randrange(vocab_size) for _ in range(count)]

        shared = tokens(self.shared_len)
        rest = self.input_len - self.shared_len
        return [shared + tokens(rest) for _ in range(self.num_requests)]


@dataclass
class Arrivals:
    """When tokens of the requests came, in seconds."""

    first_s: list[float] = field(default_factory=list)  # from sending to the first token
    gaps_s: list[float] = field(default_factory=list)  # between deltas
    num_tokens: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache


async def read(engine: AsyncEngine, prompt: Sequence[int], num: int, arrivals: Arrivals) -> None:
    """One request to its end."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num)
    last_s = time.perf_counter()
    is_first = True
    async with engine.generate(prompt, sampling) as stream:
        async for _ in stream:
            now_s = time.perf_counter()
            (arrivals.first_s if is_first else arrivals.gaps_s).append(now_s - last_s)
            last_s, is_first = now_s, False
        arrivals.num_tokens += stream.usage.num_generated_tokens
        arrivals.num_cached += stream.usage.num_cached_tokens


async def closed_loop(engine: AsyncEngine, load: Load, seed: str) -> Figures:
    """One round. Rates count the whole round, prompts included."""
    waiting = load.prompts(engine.info.vocab_size, seed)
    arrivals = Arrivals()

    async def client() -> None:
        while waiting:
            await read(engine, waiting.pop(), load.output_len, arrivals)

    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency):
            group.create_task(client())
    elapsed_s = time.perf_counter() - started_s
    figures = {
        "tokens_per_s": arrivals.num_tokens / elapsed_s,
        "prompt_tokens_per_s": load.num_requests * load.input_len / elapsed_s,
        "cached_tokens": arrivals.num_cached / load.num_requests,
        "cores_busy": (time.process_time() - started_cpu_s) / elapsed_s,
        "itl_max_ms": 1e3 * max(arrivals.gaps_s, default=0.0),
    }
    for name, times in (("ttft", arrivals.first_s), ("itl", arrivals.gaps_s)):
        for share in (50, 90, 99):
            figures[f"{name}_p{share}_ms"] = 1e3 * percentile(times, share / 100)
    return figures


async def measure(
    engine: AsyncEngine, loads: Sequence[Load], num_rounds: int, seed: str
) -> dict[str, list[Figures]]:
    """Every load in every round, after each was tried once with few tokens."""
    for load in loads:
        tried = load._replace(num_requests=load.concurrency, output_len=min(load.output_len, 4))
        await closed_loop(engine, tried, f"{seed} first {load.name}")
    rounds: dict[str, list[Figures]] = {load.name: [] for load in loads}
    for number in range(num_rounds):
        for load in loads:
            rounds[load.name].append(await closed_loop(engine, load, f"{seed} {number} {load}"))
    return rounds


def run(
    benchmark: str,
    engine_config: EngineConfig,
    loads: Sequence[Load],
    *,
    num_rounds: int,
    seed: int,
    shown: Sequence[str],
) -> int:
    """Load the model, measure, report. Returns the exit code."""

    async def main() -> None:
        async with AsyncEngine(engine_config) as engine:
            key = str(seed or random.SystemRandom().getrandbits(48))
            rounds = await measure(engine, loads, num_rounds, key)
            middle = {name: medians(runs) for name, runs in rounds.items()}
            rows = [(name, {key: one[key] for key in shown}) for name, one in middle.items()]
            details = {
                "model": msgspec.to_builtins(engine.info),
                "config": msgspec.to_builtins(engine_config),
                "medians": middle,
                "rounds": rounds,
            }
            title = f"{engine_config.model_id}, {engine.info.formats}, {engine.info.ops}"
            print_report(benchmark, title, rows, details)

    try:
        asyncio.run(main())
    except* StreamkvError as group:
        raise _first(group) from None
    return 0


def _first(group: BaseExceptionGroup[StreamkvError]) -> StreamkvError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
