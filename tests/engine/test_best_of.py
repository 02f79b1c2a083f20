"""More computed than given: candidates are ranked, and only the best are ever seen."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from engine.support import (
    TOKENIZER,
    check_nothing_is_held,
    make_engine,
    make_runner,
    oracle,
    read,
    run,
    until,
    until_idle,
)
from fakes import fake_logprobs

from streamkv.core.scheduler import TokenEvent
from streamkv.engine.mailbox import Mailbox
from streamkv.engine.outputs import TokenDelta
from streamkv.protocol import FinishReason, RowLogprobs, SamplingParams, pack_ints

PROMPT = [4, 5, 6]


def event(
    choice: int, logprob: float, reason: FinishReason | None = None, *, token_id: int = 9
) -> Any:
    sequence: Any = SimpleNamespace(
        choice=choice, num_cached_tokens=choice, has_sampled=True, stop_reason=None
    )
    row = RowLogprobs(logprob, 1, pack_ints((token_id, 10, 11)), bytes(12))
    return TokenEvent(sequence, token_id, row, reason)


def taken(mailbox: Mailbox) -> list[TokenDelta]:
    deltas = []
    while (delta := mailbox.take()) is not None:
        deltas.append(delta)
    return deltas


def test_the_most_likely_are_given_best_first_once_all_have_ended():
    mailbox = Mailbox(SamplingParams(n=2, best_of=4), TOKENIZER)
    for choice, logprob in enumerate((-2.0, -0.5, -3.0, -1.0)):
        mailbox.push(event(choice, logprob))
    for choice, logprob in enumerate((-1.0, -1.0, -1.0)):
        mailbox.push(event(choice, logprob, FinishReason.LENGTH))
    assert taken(mailbox) == [] and not mailbox.done
    assert mailbox.push(event(3, -0.25, FinishReason.STOP)) is FinishReason.STOP
    assert mailbox.done
    first, second = taken(mailbox)
    assert (first.choice, first.cumulative_logprob) == (0, -1.25)
    assert (second.choice, second.cumulative_logprob) == (1, -1.5)
    assert (first.finish_reason, second.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert first.logprobs == second.logprobs == ()  # nobody asked for them
    assert mailbox.num_generated_tokens == 8  # all were computed
    assert mailbox.num_cached_tokens == 0  # the first choice's: the others find its prompt


def test_log_probabilities_that_were_asked_for_are_given_and_no_more_of_them():
    mailbox = Mailbox(SamplingParams(best_of=2, logprobs=1), TOKENIZER)
    for choice in (0, 1):
        mailbox.push(event(choice, -choice, FinishReason.LENGTH))
    (delta,) = taken(mailbox)
    (logprob,) = delta.logprobs
    assert (logprob.token_id, [top.token_id for top in logprob.top]) == (9, [9])


def test_of_equal_candidates_the_first_wins_and_one_that_was_cut_comes_last():
    mailbox = Mailbox(SamplingParams(n=3, best_of=4), TOKENIZER)
    for choice, token_id in enumerate((20, 21, 22)):
        reason = None if choice == 0 else FinishReason.LENGTH
        mailbox.push(event(choice, -1.0, reason, token_id=token_id))
    mailbox.finish(FinishReason.ABORT)
    assert [delta.token_ids for delta in taken(mailbox)] == [(21,), (22,), (20,)]


def test_a_reader_is_woken_once_when_the_candidates_are_ranked():
    async def main() -> None:
        mailbox = Mailbox(SamplingParams(best_of=2), TOKENIZER)
        waiting = asyncio.create_task(mailbox.wait())
        await asyncio.sleep(0)
        mailbox.push(event(0, -1.0, FinishReason.LENGTH))
        await asyncio.sleep(0)
        assert not waiting.done()
        mailbox.push(event(1, -1.0, FinishReason.LENGTH))
        await asyncio.wait_for(waiting, 5)

    run(main)


def likelihood(token_ids: list[int]) -> float:
    return sum(fake_logprobs(token_id, 0, 1).logprob for token_id in token_ids)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_engine_gives_the_best_of_what_it_computes(streamed: bool):
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = SamplingParams(n=2, best_of=5, seed=3, max_tokens=7, ignore_eos=True)
            options = {"temperature": 1.0, "seed": 3}
            candidates = [oracle(runner, PROMPT, 7, choice=i, **options) for i in range(5)]
            best = sorted(candidates, key=likelihood, reverse=True)[:2]
            async with engine.generate(PROMPT, sampling) as stream:
                answers: Any = await (read(stream) if streamed else stream.collect())
                assert [list(answer.token_ids) for answer in answers] == best
                assert [answer.choice for answer in answers] == [0, 1]
                assert answers[0].cumulative_logprob == pytest.approx(likelihood(best[0]))
                assert stream.usage.num_generated_tokens == 35
                assert stream.usage.num_cached_tokens == 0
            await until_idle(engine)
            check_nothing_is_held(engine, runner)
            assert engine.stats().request_success_total["length"] == 5

    run(main)


def test_leaving_ends_all_candidates():
    runner = make_runner()

    async def main() -> None:
        async with make_engine(runner) as engine:
            sampling = SamplingParams(best_of=5, max_tokens=100, ignore_eos=True)
            async with engine.generate(PROMPT, sampling) as stream:
                await until(lambda: stream.usage.num_generated_tokens > 10)
            (delta,) = taken(stream._admission.mailbox)
            assert delta.finish_reason is FinishReason.ABORT
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)
