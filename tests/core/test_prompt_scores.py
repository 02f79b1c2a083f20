"""Log-probabilities of prompts, and what is told while a prompt is computed."""

import msgspec
import pytest
from core.harness import VOCAB_SIZE, Harness, rows
from fakes import expected_scores

from streamkv.core.integrity import IntegrityError
from streamkv.core.scheduler import NO_TOKEN
from streamkv.core.sequence import Sequence
from streamkv.protocol import MAX_SCORED, Ask, FinishReason

LONG = [token % VOCAB_SIZE for token in range(130)]


def scored_rows(harness: Harness) -> list[tuple[int, int]]:
    """(start, count) of rows that ask for scores in the latest step."""
    return [
        (start, count) for _, start, count, ask in rows(harness.in_flight[-1]) if ask & Ask.SCORE
    ]


@pytest.mark.parametrize("num_tokens", [1, 2, 65, 66, 130])
@pytest.mark.parametrize("budget", [1, 7, 256])
@pytest.mark.parametrize("depth", [0, 1])
def test_each_token_but_the_first_has_its_score(num_tokens, budget, depth):
    harness = Harness(depth=depth, max_num_batched_tokens=budget)
    sequence = harness.add_one(LONG[:num_tokens], 3, prompt_logprobs=2)
    harness.run()
    assert harness.scores[sequence] == expected_scores(LONG[:num_tokens], 2, VOCAB_SIZE)
    assert harness.progress[sequence][-1] == num_tokens
    harness.check_answer(sequence)


def test_a_step_scores_as_many_tokens_as_it_may():
    harness = Harness(max_num_batched_tokens=256)
    harness.add_one(LONG, 2, prompt_logprobs=0)
    seen = []
    while harness.schedule() is not None:
        seen.append(rows(harness.in_flight[-1])[0][1:])
        harness.commit()
    assert seen == [
        (0, 64, Ask.SCORE),
        (64, 64, Ask.SCORE),
        (128, 2, Ask.SCORE | Ask.SAMPLE),
        (130, 1, Ask.SAMPLE),
    ]


def test_the_last_token_of_a_prompt_is_computed_with_the_scores_before_it():
    """Its own score comes of the position before, so it needs no place among them."""
    harness = Harness(max_num_batched_tokens=256)
    harness.add_one(LONG[: MAX_SCORED + 1], 1, prompt_logprobs=0)
    assert rows(harness.schedule().step) == [(0, 0, 65, Ask.SCORE | Ask.SAMPLE)]
    harness.run()


def test_who_wants_scores_computes_what_is_cached_and_caches_what_it_computes():
    harness = Harness(block_size=4)
    harness.add_one(LONG[:16], 1)
    harness.run()
    sequence = harness.add_one([*LONG[:16], 5, 6, 7, 8], 1, prompt_logprobs=0)
    harness.run()
    assert (sequence.num_cached_tokens, len(harness.scores[sequence])) == (0, 19)
    assert harness.scheduler.num_prefix_hit_tokens == 0
    plain = harness.add_one([*LONG[:16], 5, 6, 7, 8, 9], 1)
    harness.run()
    assert plain.num_cached_tokens == 20
    harness.check_answer(sequence)


def preempt_in_the_middle(**rest) -> tuple[Harness, Sequence, Sequence]:
    """Of a prompt of 90 tokens, by one that needs its blocks."""
    harness = Harness(num_blocks=100, block_size=1, max_num_batched_tokens=8, **rest)
    needy = harness.add_one([9], 60)
    harness.advance()
    victim = harness.add_one(LONG[:90], 3, prompt_logprobs=1, wants_progress=True)
    while not victim.num_preemptions:
        harness.advance()
    assert 60 < victim.num_scored_tokens < 90
    return harness, needy, victim


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_scores_come_once_though_their_sequence_is_preempted(depth, mode):
    harness, needy, victim = preempt_in_the_middle(
        depth=depth, preemption_mode=mode, num_host_slots=100
    )
    harness.run()
    assert (harness.scheduler.num_swaps > 0) == (mode == "swap")
    harness.check_answer(needy)
    harness.check_answer(victim)


def test_what_had_a_score_before_a_preemption_is_computed_again_without():
    harness, needy, victim = preempt_in_the_middle()
    num_scored = victim.num_scored_tokens
    while needy.finish_reason is None:
        harness.advance()
    asked = []
    while harness.scheduler.has_work:
        harness.fill()
        asked += [row[1:] for row in rows(harness.in_flight[-1])]
        harness.advance()
    again = [(start, count) for start, count, ask in asked if start < num_scored - 1]
    assert again and sum(again[-1]) == num_scored - 1
    assert all(ask == 0 for start, _, ask in asked[: len(again)])
    assert all(ask & Ask.SCORE for start, _, ask in asked[len(again) :] if start < 89)
    harness.check_answer(victim)


def test_progress_never_goes_back_though_its_sequence_does():
    harness, _, victim = preempt_in_the_middle()
    num_told = len(harness.progress[victim])
    harness.run()
    told = harness.progress[victim]
    assert told == sorted(set(told)) and told[-1] == 90
    assert len(told) > num_told


def test_scores_are_shared_out_evenly_and_decoding_goes_on():
    harness = Harness(num_blocks=256, max_num_batched_tokens=256)
    decoding = harness.add_one([9], 30)
    harness.advance()
    long = [harness.add_one([number, *LONG], 1, prompt_logprobs=0) for number in range(3)]
    harness.advance()  # the first has all of them, the others their rows
    for _ in range(2):
        harness.schedule()
        assert [count for _, count in scored_rows(harness)] == [21, 21, 21]
        assert decoding in [event.sequence for event in harness.commit()]
    short = harness.add_one(LONG[:10], 1, prompt_logprobs=0)
    harness.advance()
    assert short.finish_reason is FinishReason.LENGTH
    harness.run()
    for sequence in (decoding, short, *long):
        harness.check_answer(sequence)


def test_a_hundred_prompts_that_want_scores_stop_nobody_else():
    harness = Harness(num_blocks=1000, max_num_seqs=128, max_num_batched_tokens=512, check_every=10)
    long = [
        harness.add_one([n % VOCAB_SIZE, n, *LONG[:20]], 1, prompt_logprobs=0) for n in range(100)
    ]
    plain = harness.add_one([9, 8, 7], 5)
    for _ in range(5):
        harness.advance()
    assert plain.finish_reason is FinishReason.LENGTH
    assert all(sequence.finish_reason is None for sequence in long[64:])
    harness.run()
    for sequence in (plain, *long):
        harness.check_answer(sequence)


@pytest.mark.parametrize("sampling", [{"n": 3}, {"n": 2, "use_beam_search": True}])
def test_the_first_choice_scores_for_all(sampling):
    harness = Harness()
    first, *others = harness.add(LONG[:70], 3, prompt_logprobs=1, wants_progress=True, **sampling)
    harness.run()
    assert list(harness.scores) == [first]
    for sequence in (first, *others):
        harness.check_answer(sequence)


@pytest.mark.parametrize("num_tokens", [20, 100])
def test_a_prompt_whose_logits_are_not_finite_ends_alone(num_tokens):
    harness = Harness(max_num_batched_tokens=64)
    lost = harness.add_one([5, *LONG[:num_tokens]], 4, prompt_logprobs=0, wants_progress=True)
    other = harness.add_one([1, 2], 4)
    harness.runner.broken_token_ids = frozenset({5})
    events = harness.run()
    assert (lost, NO_TOKEN, None, FinishReason.ERROR) in events
    assert lost not in harness.progress
    harness.check_answer(other)


@pytest.mark.parametrize("num_scored", [0, 1, 4])
def test_too_few_scores_or_too_many_are_seen(num_scored):
    harness = Harness()
    harness.add_one([1, 2, 3], 2, prompt_logprobs=0)
    output = harness.runner.step(harness.schedule().step)
    scored = (output.scored * 2)[:num_scored]
    with pytest.raises(IntegrityError, match=f"^I12: expected 2 scores .*, got {num_scored}"):
        harness.scheduler.commit(msgspec.structs.replace(output, scored=scored))


# --- progress ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_how_far_a_prompt_is_computed_is_told_chunk_by_chunk(depth):
    harness = Harness(depth=depth, max_num_batched_tokens=32)
    sequence = harness.add_one(LONG[:100], 4, wants_progress=True)
    harness.run()
    assert harness.progress[sequence] == [32, 64, 96, 100]
    assert harness.scores[sequence] == []


def test_nothing_is_told_to_those_who_did_not_ask():
    harness = Harness(max_num_batched_tokens=32)
    harness.add_one(LONG[:100], 4)
    harness.run()
    assert harness.progress == {}


def test_what_is_cached_is_told_with_the_first_chunk():
    harness = Harness(max_num_batched_tokens=32)
    harness.add_one(LONG[:60], 1)
    harness.run()
    sequence = harness.add_one(LONG[:100], 4, wants_progress=True)
    harness.run()
    assert harness.progress[sequence] == [92, 100]


def test_an_event_is_taken_once_and_a_request_that_ended_has_none():
    harness = Harness(max_num_batched_tokens=4)
    sequence = harness.add_one(LONG[:10], 4, wants_progress=True)
    step = harness.schedule().step
    harness.in_flight.clear()
    harness.scheduler.commit(harness.runner.step(step))
    assert harness.scheduler.take_prompt_events() == [(sequence, 4, ())]
    assert harness.scheduler.take_prompt_events() == []
    harness.schedule()
    harness.finish(sequence)
    harness.commit()
    assert sequence not in harness.progress
