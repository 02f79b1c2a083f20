"""Answers that grammars bind, through the whole engine: against an oracle that knows no steps."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from engine.bound import (
    CHOICE,
    JSON,
    PROMPT,
    SCHEMA,
    bound,
    check_all_is_given_back,
    make_bound_runner,
)
from engine.support import (
    EOS_ID,
    TOKENIZER,
    VOCAB_SIZE,
    greedy,
    make_engine,
    make_runner,
    oracle,
    read,
    run,
    until,
    until_idle,
)
from fake_model import ends_of_bad_words
from fakes import next_token
from tiny import save_tiny_checkpoint
from walks import allowed

from streamkv.engine.admission import bad_word_tokens
from streamkv.engine.async_engine import AsyncEngine
from streamkv.engine.matchers import Matchers
from streamkv.errors import (
    EngineDeadError,
    GenerationError,
    InvalidRequestError,
)
from streamkv.protocol import FinishReason, SamplingParams, pack_ints
from streamkv.sampling import StructuredOutputs
from streamkv.text.grammar import GrammarCompiler
from streamkv.text.tokenizer import Tokenizer

BOTH_DEPTHS = pytest.mark.parametrize("async_scheduling", [False, True])


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE)
    yield compiler
    compiler.close()


def expected(
    compiler: GrammarCompiler, prompt: list[int], sampling: SamplingParams, choice: int = 0
) -> list[int]:
    """One token after another, each of those that the grammar allows."""
    assert sampling.structured_outputs is not None
    structured, stop_ids = sampling.structured_outputs, {EOS_ID, *sampling.stop_token_ids}
    matcher = compiler.compile(structured).matcher(ignore_end=sampling.ignore_eos)
    bad_words = [list(word) for word in bad_word_tokens(sampling.bad_words, TOKENIZER)]
    crc, output = zlib.crc32(pack_ints(prompt)), []
    while len(output) < (sampling.max_tokens or 999):
        tokens = set(allowed(matcher, VOCAB_SIZE))
        avoid = ends_of_bad_words(output, bad_words)
        for kept in (
            tokens & set(sampling.allowed_token_ids or tokens),
            tokens - avoid,
            tokens - stop_ids if len(output) < sampling.min_tokens else tokens,
        ):
            tokens = tokens & kept or tokens
        token_id = next_token(
            crc,
            VOCAB_SIZE,
            allowed=tokens,
            temperature=sampling.temperature,
            seed=sampling.seed or 0,
            choice=choice,
        )
        output.append(token_id)
        if token_id in stop_ids:
            break
        matcher.consume(token_id)
        crc = zlib.crc32(pack_ints((token_id,)), crc)
    return output


@BOTH_DEPTHS
@pytest.mark.parametrize("options", [{}, {"mask_wait_s": 0.0}, {"num_blocks": 60}])
def test_answers_are_those_of_the_oracle_however_late_masks_are(
    compiler, async_scheduling, options
):
    runner = make_bound_runner(**options)

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            samplings = [bound(seed=seed, temperature=seed % 2) for seed in range(6)]
            prompts = [[*PROMPT, seed] for seed in range(6)]
            answers, free = await asyncio.gather(
                asyncio.gather(
                    *(
                        engine.generate(prompt, sampling).collect()
                        for prompt, sampling in zip(prompts, samplings, strict=True)
                    )
                ),
                engine.generate(PROMPT, greedy(max_tokens=50, ignore_eos=True)).collect(),
            )
            assert list(free[0].token_ids) == oracle(runner, PROMPT, 50)
            for (answer,), prompt, sampling in zip(answers, prompts, samplings, strict=True):
                token_ids = expected(compiler, prompt, sampling)
                assert list(answer.token_ids) == token_ids
                assert (answer.finish_reason is FinishReason.STOP) == (token_ids[-1] == EOS_ID)
                if answer.finish_reason is FinishReason.STOP:
                    jsonschema.validate(json.loads(answer.text), SCHEMA)
            assert any(answer.finish_reason is FinishReason.STOP for (answer,) in answers)
            assert runner.num_deferrals > 0 or "mask_wait_s" not in options
            await check_all_is_given_back(engine, runner)

    run(main)


@BOTH_DEPTHS
def test_tokens_without_a_choice_take_no_steps_of_their_own(compiler, async_scheduling):
    runner = make_bound_runner()

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            token_ids = expected(compiler, PROMPT, bound(CHOICE))
            assert len(token_ids) > 10
            (answer,) = await engine.generate(PROMPT, bound(CHOICE)).collect()
            assert (list(answer.token_ids), answer.text) == (token_ids, CHOICE.choice[0])
            assert answer.finish_reason is FinishReason.STOP
            assert runner.num_steps <= 4
            # With log-probabilities each is computed, and is the same.
            (scored,) = await engine.generate(PROMPT, bound(CHOICE, logprobs=1)).collect()
            assert (scored.token_ids, len(scored.logprobs)) == (answer.token_ids, len(token_ids))
            await check_all_is_given_back(engine, runner)

    run(main)


@BOTH_DEPTHS
def test_each_choice_follows_the_grammar_for_itself(compiler, async_scheduling):
    runner = make_bound_runner()

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            answers = await engine.generate(PROMPT, bound(n=4)).collect()
            for answer in answers:
                token_ids = expected(compiler, PROMPT, bound(), answer.choice)
                assert list(answer.token_ids) == token_ids
            assert len({answer.token_ids for answer in answers}) == 4
            best = await engine.generate(PROMPT, bound(n=1, best_of=3)).collect()
            every = [expected(compiler, PROMPT, bound(), choice) for choice in range(3)]
            assert list(best[0].token_ids) in every
            await check_all_is_given_back(engine, runner)

    run(main)


def test_on_the_cpu_both_depths_give_the_same_valid_answers(tmp_path):
    save_tiny_checkpoint(tmp_path, hidden_size=64)  # heads of 16

    async def answers(async_scheduling: bool) -> list[Any]:
        options = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 3}
        async with AsyncEngine(
            str(tmp_path), async_scheduling=async_scheduling, **options
        ) as engine:
            streams = [
                engine.generate("the fox", bound(JSON, seed=seed, n=1 + seed % 2, max_tokens=150))
                for seed in range(5)
            ]
            return await asyncio.gather(*(stream.collect() for stream in streams))

    first, second = run(lambda: answers(False)), run(lambda: answers(True))
    assert first == second
    ended = [one for all_of_them in first for one in all_of_them if one.finish_reason == "stop"]
    assert len(ended) >= 3
    for one in ended:
        jsonschema.validate(json.loads(one.text), SCHEMA)


LIST = StructuredOutputs(regex=r"(the|fox|,| |[0-9]){2,30}")


@BOTH_DEPTHS
@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 7},
        {"min_tokens": 20},
        {"ignore_eos": True},
        {"stop_token_ids": TOKENIZER.encode("5")},
        {"stop_token_ids": TOKENIZER.encode(","), "min_tokens": 9},
        {"bad_words": [" ", ",", "1", "2", "3"]},
        {"allowed_token_ids": [EOS_ID, *TOKENIZER.encode("the123")]},
    ],
    ids=lambda params: next(iter(params)),
)
def test_other_limits_hold_beside_a_grammar(compiler, async_scheduling, params):
    runner = make_bound_runner()

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            sampling = bound(LIST, **params)
            (answer,) = await engine.generate(PROMPT, sampling).collect()
            assert list(answer.token_ids) == expected(compiler, PROMPT, sampling)
            await check_all_is_given_back(engine, runner)

    run(main)


@BOTH_DEPTHS
def test_a_stop_string_ends_an_answer_amid_tokens_without_a_choice(async_scheduling):
    runner = make_bound_runner()

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            for n in (1, 2):
                sampling = bound(CHOICE, stop=["fox"], n=n)
                for answer in await engine.generate(PROMPT, sampling).collect():
                    assert answer.text == "the quick brown "
                    assert answer.stop_reason == "fox"
            await check_all_is_given_back(engine, runner)

    run(main)


@BOTH_DEPTHS
def test_without_end_tokens_an_answer_ends_where_nothing_is_left(async_scheduling):
    runner = make_bound_runner(mask_wait_s=0.1)
    tokenizer = Tokenizer(
        TOKENIZER._backend,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[],
        special_tokens={},
        chat_templates={},
    )

    async def main() -> None:
        options = {"tokenizer": tokenizer, "async_scheduling": async_scheduling}
        async with make_engine(runner, **options) as engine:
            for ignore_eos in (False, True):
                sampling = bound(CHOICE, n=2, ignore_eos=ignore_eos)
                for answer in await engine.generate(PROMPT, sampling).collect():
                    assert answer.text == CHOICE.choice[0]
                    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, None)
            assert engine.stats().request_success_total["stop"] == 4
            await check_all_is_given_back(engine, runner)

    run(main)


@BOTH_DEPTHS
def test_readers_may_leave_at_any_moment(async_scheduling):
    gate = threading.Semaphore(0)
    runner = make_bound_runner(gate=gate)

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling, max_num_seqs=2) as engine:
            streams = [
                engine.generate([*PROMPT, i], bound(n=1 + i % 2, max_tokens=60)) for i in range(5)
            ]
            for stream in streams:
                await stream.__aenter__()
            board = runner.masks
            assert board.num_slots == 7
            streams[-1].cancel()  # waits in the queue
            for number, stream in enumerate(streams[:-1]):
                num_steps = runner.num_steps + number
                gate.release(number + 1)
                await until(lambda num_steps=num_steps: runner.num_steps >= num_steps)
                stream.cancel()
            gate.release(1000)
            for stream in streams:
                assert (await read(stream))[-1].finish_reason is FinishReason.ABORT
                await stream.__aexit__(None, None, None)
            await check_all_is_given_back(engine, runner)

    run(main)


@BOTH_DEPTHS
def test_a_paused_answer_goes_on_as_if_nothing_had_been(compiler, async_scheduling):
    gate = threading.Semaphore(0)
    runner = make_bound_runner(gate=gate)

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            sampling = bound(n=2)
            async with engine.generate(PROMPT, sampling, request_id="a") as stream:
                for num_steps in (2, 3, 5):
                    gate.release(num_steps)
                    await until(lambda: runner.num_steps > 0)
                    stream.pause()
                    gate.release(3)  # what was sent is done
                    await until_idle(engine)
                    assert engine.stats().num_free_blocks == engine.stats().num_blocks
                    stream.resume()
                gate.release(1000)
                answers = await stream.collect()
            for answer in answers:
                assert list(answer.token_ids) == expected(compiler, PROMPT, sampling, answer.choice)
            await check_all_is_given_back(engine, runner)

    run(main)


TOO_COMPLEX = StructuredOutputs(regex="[0-9]{200}([a-z ]*[aeiou][a-z ]{1,100}){100}")


@BOTH_DEPTHS
def test_a_grammar_that_fails_on_the_way_ends_its_own_answer(caplog, async_scheduling):
    runner = make_bound_runner(mask_wait_s=0.1, max_model_len=600, num_blocks=400)

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            failing = engine.generate(PROMPT, bound(TOO_COMPLEX, n=2, max_tokens=500))
            free = engine.generate(PROMPT, greedy(max_tokens=60, ignore_eos=True))
            failed, (answer,) = await asyncio.gather(
                failing.collect(), free.collect(), return_exceptions=True
            )
            assert isinstance(failed, GenerationError)
            told = "the answer can't follow its regex any further: it has too many repetitions"
            assert failed.message.startswith(told)
            assert caplog.text.count(told) == 1, "for all its choices"
            assert list(answer.token_ids) == oracle(runner, PROMPT, 60)
            await check_all_is_given_back(engine, runner)

    run(main)


def test_a_failing_step_ends_the_answers_that_were_in_it():
    runner = make_bound_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            for step in (2, 9):
                runner.fail_step_ids = frozenset({runner.num_steps + step})
                with pytest.raises(GenerationError, match="told to fail"):
                    await engine.generate(PROMPT, bound()).collect()
            await check_all_is_given_back(engine, runner)

    run(main)


# --- what is refused -----------------------------------------------------------------------------


def test_what_can_not_be_followed_is_refused_before_anything_runs():
    runner = make_bound_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            for structured, why in (
                (StructuredOutputs(json={"not": {}}), "not"),
                (StructuredOutputs(regex="("), "unclosed"),
            ):
                with pytest.raises(InvalidRequestError, match=why) as raised:
                    await engine.generate(PROMPT, bound(structured)).collect()
                assert raised.value.param == "structured_outputs"
            with pytest.raises(InvalidRequestError, match="0 to 338, got 9999"):
                await engine.generate([9999], bound()).collect()
            assert runner.num_steps == 0
            await check_all_is_given_back(engine, runner)

    run(main)


def test_a_device_without_masks_can_not_be_asked_for_grammars():
    async def main() -> None:
        async with make_engine(make_runner()) as engine:
            with pytest.raises(InvalidRequestError, match="bound to a grammar on cpu") as raised:
                await engine.generate(PROMPT, bound()).collect()
            assert raised.value.param == "structured_outputs"

    run(main)


def test_who_leaves_while_the_grammar_is_compiled_holds_nothing(monkeypatch):
    runner = make_bound_runner()
    entered, leave = threading.Event(), threading.Event()
    add = Matchers.add

    def add_late(*args: Any, **options: Any) -> Any:
        entered.set()
        assert leave.wait(20)
        return add(*args, **options)

    monkeypatch.setattr(Matchers, "add", add_late)

    async def main() -> None:
        async with make_engine(runner) as engine:
            task = asyncio.create_task(engine.generate(PROMPT, bound()).collect())
            await asyncio.to_thread(entered.wait, 20)
            task.cancel()
            leave.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            (answer,) = await engine.generate(PROMPT, bound(CHOICE)).collect()
            assert answer.text == CHOICE.choice[0]
            await check_all_is_given_back(engine, runner)

    run(main)


# --- the end -------------------------------------------------------------------------------------


def grammar_threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith(("streamkv-matchers", "streamkv-grammar"))]


@BOTH_DEPTHS
def test_closing_the_engine_ends_the_threads_and_the_process(async_scheduling):
    gate = threading.Semaphore(0)
    runner = make_bound_runner(gate=gate, mask_wait_s=0.01)

    async def main() -> None:
        engine = make_engine(runner, async_scheduling=async_scheduling)
        async with engine:
            stream = engine.generate(PROMPT, bound())
            async with stream:
                gate.release(4)
                await until(lambda: stream.usage.num_generated_tokens >= 3)
                assert "streamkv-matchers" in grammar_threads()
                process = engine._reception._grammars._compiler._quick_process._process
                gate.release(1000)
                await engine.close()
                assert (await read(stream))[-1].finish_reason is FinishReason.ABORT
            assert process.poll() is not None
        assert grammar_threads() == []

    run(main)


def test_what_is_compiled_when_the_engine_is_closed_is_given_up():
    runner = make_bound_runner()
    slow = StructuredOutputs(json={"patternProperties": {f"^{i}_.*$": {} for i in range(3000)}})

    async def main() -> None:
        async with make_engine(runner) as engine:
            task = asyncio.create_task(engine.generate(PROMPT, bound(slow)).collect())
            await until(lambda: engine._reception._grammars.has_begun)
        with pytest.raises((EngineDeadError, GenerationError)):
            await task
        assert grammar_threads() == []

    run(main)


def test_an_engine_that_is_idle_prepares_for_grammars(monkeypatch):
    monkeypatch.setattr("streamkv.engine.reception.WARM_UP_S", 0.01)
    gate = threading.Semaphore(0)

    async def main() -> None:
        async with make_engine(make_bound_runner(gate=gate)) as engine:
            grammars = engine._reception._grammars
            async with engine.generate(PROMPT, greedy(max_tokens=2)) as stream:
                await asyncio.sleep(0.03)
                assert not grammars.has_begun  # it is busy
                gate.release(10)
                await read(stream)
            await until(lambda: grammars._compiler is not None)
        async with make_engine(make_runner()) as engine:
            await asyncio.sleep(0.03)
            assert engine._reception._grammars is None

    run(main)
