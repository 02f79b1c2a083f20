"""Tokens that a grammar leaves no choice for, as readers and the event loop see them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from engine.support import (
    VOCAB_SIZE,
    check_nothing_is_held,
    greedy,
    make_engine,
    make_runner,
    read,
    run,
    until,
    until_idle,
)
from fakes import FakeMaskBoard, FakeRunner

from streamkv.engine.async_engine import AsyncEngine
from streamkv.engine.engine_loop import FORCED_PER_TURN
from streamkv.engine.requests import Requests
from streamkv.protocol import SamplingParams
from streamkv.sampling import StructuredOutputs

PROMPT = list(range(10, 40))
# It begins without a choice, and then has one.
JSON = StructuredOutputs(
    json={
        "type": "object",
        "properties": {"name": {"enum": ["aa", "bb"]}},
        "required": ["name"],
        "additionalProperties": False,
    },
    disable_any_whitespace=True,
)
LONG_TEXT = "".join("abcdefghijk"[7 * i % 11] for i in range(600))


@pytest.fixture(params=[False, True])
def async_scheduling(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param


def bound_runner(**options: object) -> FakeRunner:
    masks = FakeMaskBoard(VOCAB_SIZE)
    defaults = {"masks": masks, "mask_wait_s": 10.0, "max_model_len": 1000, "num_blocks": 4000}
    return make_runner(**defaults | {"avoid": ()} | options)


async def num_cached(engine: AsyncEngine) -> int:
    stream = engine.generate(PROMPT, greedy(structured_outputs=JSON))
    await stream.collect()
    return stream.usage.num_cached_tokens


def test_what_was_found_in_the_cache_is_told_alike_at_once_and_after_a_wait_in_the_queue():
    gate = threading.Semaphore(1000)
    runner = bound_runner(gate=gate)

    async def main() -> None:
        async with make_engine(runner, max_num_seqs=1) as engine:
            assert await num_cached(engine) == 0
            at_once = await num_cached(engine)
            assert at_once == len(PROMPT) - 1
            while gate.acquire(blocking=False):
                pass
            async with (
                engine.generate([1, 2, 3], greedy(max_tokens=20)) as other,
                engine.generate(PROMPT, greedy(structured_outputs=JSON)) as stream,
            ):
                # The first tokens are there, though nothing was computed yet.
                await until(lambda: stream.usage.num_generated_tokens > 1)
                assert (stream.usage.num_cached_tokens, stream.progress) == (0, (0, 30))
                gate.release(1000)
                await other.collect()
                await stream.collect()
                assert stream.usage.num_cached_tokens == at_once
                assert stream.progress == (30, 30)

    run(main)


def test_progress_is_what_is_computed_though_tokens_come_before():
    runner = bound_runner()

    async def main() -> None:
        async with make_engine(runner, max_num_batched_tokens=8) as engine:
            sampling = greedy(structured_outputs=JSON)
            async with engine.generate(PROMPT, sampling, wants_progress=True) as stream:
                seen = []
                async for delta in stream:
                    seen.append(stream.progress[0])
                    assert delta.progress is None or delta.progress == (seen[-1], 30)
                first = next(i for i, num in enumerate(seen) if num)
                assert first > 0, "tokens came before"
                assert seen == sorted(seen) and {0, 30} <= set(seen) <= {0, 8, 16, 24, 30}

    run(main)


def test_scores_of_a_prompt_come_whole_though_another_choice_begins_with_forced_tokens():
    runner = bound_runner()

    async def main() -> None:
        async with make_engine(runner, max_num_batched_tokens=8) as engine:
            sampling = greedy(structured_outputs=JSON, prompt_logprobs=0, n=2, temperature=1.0)
            async with engine.generate(PROMPT, sampling) as stream:
                scores = [one for delta in await read(stream) for one in delta.prompt_logprobs]
                assert len(scores) == len(PROMPT) and scores == [*stream.prompt_logprobs]

    run(main)


def test_a_turn_hands_out_only_so_many_and_the_answers_are_whole(monkeypatch, async_scheduling):
    runner = bound_runner()
    nums: list[int] = []
    fan_out = Requests.fan_out

    def counted(self: Requests, events: list, step_error: str) -> None:
        nums.append(sum(event.sequence.mask_slot >= 0 for event in events))
        fan_out(self, events, step_error)

    monkeypatch.setattr(Requests, "fan_out", counted)

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            choice = StructuredOutputs(choice=[LONG_TEXT])
            sampling = SamplingParams(n=3, max_tokens=900, structured_outputs=choice)
            plain = engine.generate([1, 2], greedy(max_tokens=30))
            async with plain, engine.generate(PROMPT, sampling) as stream:
                answers = await stream.collect()
                assert len((await plain.collect())[0].token_ids) == 30
            assert [answer.text for answer in answers] == [LONG_TEXT] * 3
            num_tokens = sum(len(answer.token_ids) for answer in answers)
            assert sum(nums) == num_tokens > 3 * FORCED_PER_TURN
            assert max(nums) <= FORCED_PER_TURN + 3  # of a step each has one
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


def test_a_reader_may_leave_amid_many_forced_tokens(async_scheduling):
    runner = bound_runner()

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            choice = StructuredOutputs(choice=[LONG_TEXT])
            for num_deltas in (1, 3):
                sampling = SamplingParams(max_tokens=900, structured_outputs=choice)
                async with engine.generate(PROMPT, sampling) as stream:
                    for _ in range(num_deltas):
                        await anext(stream)
                await until_idle(engine)
                check_nothing_is_held(engine, runner)

    run(main)


def test_a_paused_answer_gets_none_of_them_until_it_is_resumed(async_scheduling):
    runner = bound_runner()

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            choice = StructuredOutputs(choice=[LONG_TEXT])
            sampling = SamplingParams(max_tokens=900, structured_outputs=choice)
            async with engine.generate(PROMPT, sampling) as stream:
                for num_deltas in (0, 1, 1):
                    for _ in range(num_deltas):
                        await anext(stream)
                    stream.pause()
                    await engine.generate([1, 2], greedy(max_tokens=3)).collect()
                    await until_idle(engine)  # what was sent for it has come
                    num_tokens = stream.usage.num_generated_tokens
                    await engine.generate([1, 2], greedy(max_tokens=30)).collect()
                    assert stream.usage.num_generated_tokens == num_tokens < 600
                    check_nothing_is_held(engine, runner)
                    stream.resume()
                await stream.collect()
                assert stream.so_far()[0].text == LONG_TEXT
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)
