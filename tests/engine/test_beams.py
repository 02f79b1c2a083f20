"""Beams as readers see them: whole answers at the end, the best first."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from engine.llm_support import check_idle, make_llm
from engine.support import (
    EOS_ID,
    VOCAB_SIZE,
    check_nothing_is_held,
    make_engine,
    make_runner,
    read,
    run,
    until,
    until_idle,
)
from fakes import FakeRunner, expected_beams

from streamkv import BeamSearchOutput, BeamSearchParams, Logprob
from streamkv.engine import engine_loop
from streamkv.engine.outputs import Usage
from streamkv.errors import EngineDeadError, InvalidRequestError
from streamkv.protocol import FinishReason, SamplingParams

PROMPT = [4, 5, 6]


def beams(num: int, width: int, n: int, **options: Any) -> list[list[int]]:
    options = {"end_token_ids": (EOS_ID,)} | options
    return expected_beams(PROMPT, num, VOCAB_SIZE, width=width, num_return=n, **options)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_best_hypotheses_come_at_the_end_with_what_was_asked_for(streamed: bool):
    runner = make_runner(avoid=())

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = SamplingParams(
                n=2, best_of=4, use_beam_search=True, max_tokens=9, logprobs=1, length_penalty=0.5
            )
            async with engine.generate(PROMPT, sampling) as stream:
                answers: Any = await (read(stream) if streamed else stream.collect())
                expected = beams(9, 4, 2, length_penalty=0.5)
                assert [list(answer.token_ids) for answer in answers] == expected
                assert [answer.choice for answer in answers] == [0, 1]
                for answer in answers:
                    assert len(answer.logprobs) == len(answer.token_ids)
                    assert all(len(one.top) == 1 for one in answer.logprobs)
                    total = sum(one.logprob for one in answer.logprobs)
                    assert answer.cumulative_logprob == pytest.approx(total)
                assert stream.usage == Usage(3, 0, sum(map(len, expected)))
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


def test_nobody_sees_log_probabilities_that_only_the_search_needed():
    runner = make_runner(avoid=())

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = SamplingParams(n=3, use_beam_search=True, max_tokens=5, ignore_eos=True)
            answers = await engine.generate(PROMPT, sampling).collect()
            assert [list(one.token_ids) for one in answers] == beams(5, 3, 3, end_token_ids=())
            assert all(one.logprobs == () for one in answers)
            assert all(one.finish_reason is FinishReason.LENGTH for one in answers)

    run(main)


def test_leaving_ends_all_beams():
    runner = make_runner(avoid=())

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = SamplingParams(n=2, best_of=4, use_beam_search=True, max_tokens=40)
            async with engine.generate(PROMPT, sampling):
                await until(lambda: runner.num_steps > 5)
            await until_idle(engine)
            check_nothing_is_held(engine, runner)
            assert engine.stats().request_success_total["abort"] == 2

    run(main)


FEW = [4, 5, 3]  # a prompt in a vocabulary of eight tokens


def make_small_runner(**options: Any) -> FakeRunner:
    return make_runner(vocab_size=8, avoid=(), **options)


@pytest.mark.parametrize("num_at_once", [1, 3, 10, 500])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_search_with_fewer_answers_than_choices_gives_those(
    streamed: bool, num_at_once: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_loop, "ANSWERS_PER_TURN", num_at_once)
    runner = make_small_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = SamplingParams(n=16, use_beam_search=True, max_tokens=1)
            async with engine.generate(FEW, sampling) as stream:
                answers: Any = await (read(stream) if streamed else stream.collect())
                assert [answer.choice for answer in answers] == list(range(8))
                assert {answer.token_ids for answer in answers} == {(i,) for i in range(8)}
                assert stream.usage == Usage(3, 0, 8)
                assert stream.finish_s is not None
            total = engine.stats().request_success_total
            assert (total["stop"], total["length"], sum(total.values())) == (1, 7, 8)
            async with engine.generate(FEW, sampling) as stream:
                await until(lambda: stream.usage.num_generated_tokens == 8)
                stream.cancel()  # nobody may have been told yet that there are no more
                reasons = [delta.finish_reason for delta in await read(stream)]
                assert len([one for one in reasons if one is not FinishReason.ABORT]) == 8
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


def test_llm_gives_as_many_answers_as_there_are():
    runner = make_small_runner()
    with make_llm(runner) as llm:
        (found,) = llm.beam_search([FEW], BeamSearchParams(beam_width=9, max_tokens=1))
        assert sorted(one.tokens for one in found.sequences) == [[*FEW, i] for i in range(8)]
        sampling = SamplingParams(n=9, use_beam_search=True, max_tokens=1)
        (output,) = llm.generate([FEW], sampling, use_tqdm=False)
        assert [one.index for one in output.outputs] == list(range(8))
        check_idle(llm, runner)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "ANSWERS_PER_TURN", 7)


LONG = SamplingParams(n=4, use_beam_search=True, max_tokens=40, ignore_eos=True)


@pytest.mark.usefixtures("in_pieces")
def test_the_answers_of_a_long_search_come_in_pieces_while_others_go_on():
    runner = make_runner(avoid=())

    async def main() -> None:
        async with make_engine(runner) as engine:
            async with engine.generate(PROMPT, LONG) as stream, asyncio.TaskGroup() as group:
                reading = group.create_task(read(stream))
                await until(lambda: stream.first_token_s is not None)
                other = group.create_task(engine.generate([7]).collect())
                nums = [stream.usage.num_generated_tokens]
                while stream.finish_s is None:
                    await asyncio.sleep(0)
                    nums.append(stream.usage.num_generated_tokens)
                assert max(after - before for before, after in itertools.pairwise(nums)) == 7
            assert other.result()[0].finish_reason is not None
            deltas = reading.result()
            assert max(len(delta.token_ids) for delta in deltas) == 7
            for choice, answer in enumerate(beams(40, 4, 4, end_token_ids=())):
                own = [delta for delta in deltas if delta.choice == choice]
                assert [token_id for delta in own for token_id in delta.token_ids] == answer
                reasons = [delta.finish_reason for delta in own]
                assert reasons == [None] * (len(own) - 1) + [FinishReason.LENGTH]
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("end", ["cancel", "leave", "abort", "end_requests", "close", "die"])
def test_a_search_may_end_while_its_answers_come(end: str):
    runner = make_runner(avoid=())

    async def main() -> None:
        engine = make_engine(runner)
        async with engine:
            stream = engine.generate(PROMPT, LONG, request_id="r")
            async with stream:
                await until(lambda: stream.usage.num_generated_tokens > 50)
                if end == "cancel":
                    stream.cancel()
                elif end == "abort":
                    await engine.abort("r")
                elif end == "end_requests":
                    engine.end_requests()
                elif end == "close":
                    await engine.close()
                elif end == "die":
                    assert engine._loop is not None
                    engine._loop.die(EngineDeadError("a test"))
                if end in ("end_requests", "die"):
                    with pytest.raises(EngineDeadError):
                        await read(stream)
                elif end != "leave":
                    reasons = [delta.finish_reason for delta in await read(stream)]
                    assert reasons == [FinishReason.LENGTH] + [FinishReason.ABORT] * 3
            total = engine.stats().request_success_total
            cut = "error" if end in ("end_requests", "die") else "abort"
            assert (total["length"], total[cut], sum(total.values())) == (1, 3, 4)
            if end in ("close", "die"):
                return
            await until_idle(engine)
            check_nothing_is_held(engine, runner)
            again = await engine.generate(PROMPT, LONG, request_id="r").collect()
            assert [list(one.token_ids) for one in again] == beams(40, 4, 4, end_token_ids=())

    run(main)


@pytest.mark.parametrize("beam_width", [None, "3", 0, 65, 2.5])
def test_a_beam_width_that_makes_no_sense_is_named(beam_width: Any):
    with pytest.raises(InvalidRequestError, match=r"^beam_width: expected a ") as error:
        BeamSearchParams(beam_width=beam_width, max_tokens=3).sampling_params()
    assert error.value.param == "beam_width"
    if beam_width != 2.5:
        assert f"a number of beams in [1, 64], got {beam_width!r}" in str(error.value)


def test_llm_searches_as_vllm_does():
    runner = make_runner(avoid=())
    with make_llm(runner) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=6)
        outputs = llm.beam_search([{"prompt_token_ids": PROMPT}, "the fox"], params)
        assert [type(output) for output in outputs] == [BeamSearchOutput] * 2
        sequences = outputs[0].sequences
        expected = beams(6, 3, 3)
        assert [one.tokens for one in sequences] == [PROMPT + answer for answer in expected]
        scores = [one.cum_logprob / (len(one.tokens) - 3) for one in sequences]
        assert scores == sorted(scores, reverse=True)
        for one in sequences:
            assert one.text == llm.tokenizer.decode(one.tokens, skip_special_tokens=False)
            assert [token_id for token_id, *_ in one.logprobs] == one.tokens[3:]
            assert all(
                isinstance(found[token], Logprob) for found in one.logprobs for token in found
            )
        sampling = SamplingParams(n=3, use_beam_search=True, max_tokens=6)
        (output,) = llm.generate([PROMPT], sampling, use_tqdm=False)
        assert [list(one.token_ids) for one in output.outputs] == expected
        assert [one.cumulative_logprob for one in output.outputs] == pytest.approx(
            [one.cum_logprob for one in sequences]
        )
        with pytest.raises(InvalidRequestError, match="^temperature: "):
            llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=3, temperature=0.7))
        check_idle(llm, runner)


def test_llm_gives_the_best_of_several():
    runner = make_runner()
    with make_llm(runner) as llm:
        sampling = SamplingParams(n=2, best_of=6, max_tokens=8, seed=1)
        (output,) = llm.generate([PROMPT], sampling, use_tqdm=False)
        first, second = output.outputs
        assert (first.index, second.index) == (0, 1)
        assert first.cumulative_logprob >= second.cumulative_logprob
        assert first.logprobs is second.logprobs is None
