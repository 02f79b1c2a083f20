"""Requests that can't be served: which error, which field, which numbers."""

from __future__ import annotations

import threading

import pytest
from engine.support import (
    VOCAB_SIZE,
    check_nothing_is_held,
    greedy,
    make_engine,
    make_runner,
    run,
    until,
    until_idle,
)

from streamkv.config import EngineConfig
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
        ([1] * 60, {"max_tokens": 60}, CapacityError, "max_tokens", "needs 30 blocks"),
    ],
)
def test_a_request_that_can_not_be_served_is_refused_on_entering(
    prompt, params, error, param, match
):
    runner = make_runner(num_blocks=25)

    async def main() -> None:
        async with make_engine(runner) as engine:
            stream = engine.generate(prompt, SamplingParams(**params))
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
