"""Beams as readers see them: whole answers at the end, the best first."""

from __future__ import annotations

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
from fakes import expected_beams

from streamkv import BeamSearchOutput, BeamSearchParams, Logprob
from streamkv.engine.outputs import Usage
from streamkv.errors import InvalidRequestError
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
