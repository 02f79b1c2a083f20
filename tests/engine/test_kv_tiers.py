"""Blocks in host memory and on disk, as an engine's readers and operators see them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from engine.support import (
    check_nothing_is_held,
    greedy,
    make_engine,
    make_runner,
    oracle,
    run,
    scheduler_of,
    until,
    until_idle,
)
from fakes import FakeStore

from streamkv.engine import async_engine
from streamkv.engine.async_engine import AsyncEngine
from streamkv.errors import CapacityError, ConfigError
from streamkv.protocol import SamplingParams, StoreOp

LONG = list(range(5, 45))  # ten blocks


class ThreadedStore(FakeStore):
    """A FakeStore whose results come from a thread of its own, when `gate` lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def submit(self, op: StoreOp) -> None:
        super().submit(op)
        threading.Thread(target=self._deliver_one).start()

    def _deliver_one(self) -> None:
        self.gate.wait(20)
        if not self.closed:
            self.deliver(1)


def with_store(store: FakeStore) -> Iterator[AsyncEngine]:
    """Engines of one start after the other, with the same folder, so to speak."""
    while True:
        yield make_engine(make_runner(num_host_slots=64, store=store))


def test_a_prefix_is_found_after_a_restart():
    store = ThreadedStore()
    starts = with_store(store)

    async def main() -> None:
        async with next(starts) as engine:
            stream = engine.generate(LONG, greedy(max_tokens=3))
            (first,) = await stream.collect()
            assert stream.usage.num_cached_tokens == 0
        # Nobody waited for the disk but `close`.
        assert len(store.records) == 10
        async with next(starts) as engine:
            stream = engine.generate(LONG, greedy(max_tokens=3))
            (again,) = await stream.collect()
            assert again.token_ids == first.token_ids
            assert stream.usage.num_cached_tokens >= 36
            await until_idle(engine)
            stats = engine.stats()
            assert stats.prefix_cache_hits_by_tier_total["disk"] >= 36
            assert stats.kv_store_reads_total >= 9
            assert stats.kv_blocks_swapped_in_total >= 9
            assert (stats.num_requests_loading, stats.kv_store_failures_total) == (0, 0)
            assert stats.num_host_slots == 64
        assert store.violations == []

    run(main)


def test_one_that_loads_waits_while_others_go_on():
    store = ThreadedStore()
    starts = with_store(store)

    async def main() -> None:
        async with next(starts) as engine:
            await engine.generate(LONG, greedy(max_tokens=1)).collect()
        async with next(starts) as engine:
            store.gate.clear()
            async with engine.generate(LONG, greedy(max_tokens=2)) as loading:
                await until(lambda: engine.stats().num_requests_loading == 1)
                await engine.generate([4], greedy(max_tokens=5)).collect()
                assert engine.stats().num_requests_waiting == 1
                assert loading.usage.num_generated_tokens == 0
                store.gate.set()
                (answer,) = await loading.collect()
            assert len(answer.token_ids) == 2

    run(main)


def test_a_disk_that_never_answers_holds_nobody_up_at_the_end(monkeypatch):
    monkeypatch.setattr(async_engine, "SETTLE_S", 0.2)
    store = ThreadedStore()
    starts = with_store(store)

    async def main() -> None:
        async with next(starts) as engine:
            store.gate.clear()
            await engine.generate(LONG, greedy(max_tokens=1)).collect()
            began_s = asyncio.get_running_loop().time()
        assert 0.1 < asyncio.get_running_loop().time() - began_s < 5
        store.gate.set()

    run(main)


def test_close_ends_who_still_reads_and_keeps_what_was_computed():
    store = ThreadedStore()
    starts = with_store(store)

    async def main() -> None:
        async with next(starts) as engine:
            stream = engine.generate(LONG, greedy(max_tokens=80, ignore_eos=True))
            async with stream:
                await anext(stream)
                await engine.close()
                (answer,) = await stream.collect()
                assert answer.finish_reason == "abort"
        assert len(store.records) >= 10

    run(main)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemptions_are_counted_by_what_became_of_the_blocks(mode: str):
    runner = make_runner(num_blocks=24, num_host_slots=64)

    async def main() -> None:
        async with make_engine(runner, preemption_mode=mode, swap_space=1) as engine:
            sampling = greedy(max_tokens=80, ignore_eos=True)
            prompts = [[number, 5, 6, 7] for number in range(8, 14)]
            streams = [engine.generate(prompt, sampling) for prompt in prompts]
            answers = await asyncio.gather(*(stream.collect() for stream in streams))
            for prompt, (answer,) in zip(prompts, answers, strict=True):
                assert list(answer.token_ids) == oracle(runner, prompt, 80)
            await until_idle(engine)
            check_nothing_is_held(engine, runner)
            stats = engine.stats()
            by_mode = stats.preemptions_by_mode_total
            assert by_mode[mode] == sum(by_mode.values()) == stats.num_preemptions_total > 0
            assert (stats.kv_blocks_swapped_in_total > 0) == (mode == "swap")

    run(main)


def test_memory_that_is_held_is_told_and_shared_blocks_count_once():
    runner = make_runner(gate=(gate := threading.Semaphore(0)))

    async def main() -> None:
        async with make_engine(runner, async_scheduling=False) as engine:
            assert engine.stats().num_blocks == 64
            sampling = SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=1)
            async with engine.generate(LONG + [4], sampling) as stream:
                for _ in range(6):  # the prompt, which both share but for its last token
                    gate.release()
                    await until(lambda: runner.gate._value == 0)
                await until(lambda: stream.usage.num_generated_tokens >= 6)
                stats = engine.stats()
                tables = {
                    (sequence.choice, tuple(sequence.block_table), sequence.num_computed_tokens)
                    for entry in engine._loop._requests
                    for sequence in entry.sequences
                }
                blocks: dict[int, int] = {}
                for _, table, num_tokens in tables:
                    for place, block_id in enumerate(table):
                        rows = min(4, num_tokens - 4 * place)
                        blocks[block_id] = max(blocks.get(block_id, 0), rows)
                assert len(tables) == 2
                assert (stats.num_held_blocks, stats.num_held_tokens) == (
                    len(blocks),
                    sum(blocks.values()),
                )
                assert len(blocks) < sum(len(table) for _, table, _ in tables)
                gate.release(100)
            await until_idle(engine)
            stats = engine.stats()
            assert (stats.num_held_blocks, stats.num_held_tokens) == (0, 0)

    run(main)


def test_what_can_never_fit_is_refused_with_numbers_and_flags():
    async def main() -> None:
        async with make_engine(make_runner(num_blocks=8)) as engine:
            with pytest.raises(CapacityError, match="--kv-cache-memory-bytes") as raised:
                await engine.generate(LONG, greedy(max_tokens=1)).collect()
            assert "needs 10 KV blocks of 4 tokens" in raised.value.message
            beams = SamplingParams(use_beam_search=True, n=4, max_tokens=16)
            with pytest.raises(CapacityError, match="4 beams"):
                await engine.generate([5], beams).collect()
            assert scheduler_of(engine).num_running == 0

    run(main)


def test_wishes_that_need_each_other_are_checked_before_anything_loads():
    with pytest.raises(ConfigError, match="--swap-space"):
        AsyncEngine("m", preemption_mode="swap")
    with pytest.raises(ConfigError, match="--no-enable-prefix-caching"):
        AsyncEngine("m", kv_cache_dir="x", enable_prefix_caching=False)
