"""Masks that come late, and tokens that a grammar leaves no choice for."""

import msgspec
import pytest
from core.harness import EOS, VOCAB_SIZE, Harness, rows
from fakes import FakeMatcher, expected_tokens

from streamkv.core.integrity import IntegrityError
from streamkv.core.scheduler import TokenEvent
from streamkv.core.sequence import Sequence
from streamkv.protocol import FinishReason, StepOutput, pack_ints

PROMPT = [1, 2, 3]


def seed_that_begins(num_forced: int, *, with_choice: int = 0) -> int:
    """Of a grammar that first leaves a choice for so many tokens, then none for just so many."""
    for seed in range(10_000):
        matcher = FakeMatcher(seed, VOCAB_SIZE)
        tokens = expected_tokens(PROMPT, with_choice, VOCAB_SIZE, grammar=seed)
        has_choice = True
        for token_id in tokens:
            has_choice = has_choice and not matcher.forced
            matcher.consume(token_id)
        if has_choice and len(matcher.forced) == num_forced:
            return seed
    raise AssertionError("no such grammar")


FREE = seed_that_begins(0, with_choice=6)


def force(
    harness: Harness, sequence: Sequence, start: int, token_ids: list[int]
) -> list[TokenEvent]:
    """What comes of them at once."""
    harness.scheduler.force(sequence, start, token_ids)
    return harness.scheduler.take_forced(1000)


# --- late masks ----------------------------------------------------------------------------------


def defer(harness: Harness, num_others: int = 12) -> tuple[Sequence, Sequence]:
    """One whose second mask came late, and another one."""
    late = harness.add_one(PROMPT, 6, grammar=FREE)
    other = harness.add_one([4, 5], num_others)
    harness.advance()
    assert [event.sequence for event in harness.advance()] == [other]
    assert harness.runner.num_deferrals == 1
    return late, other


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_row_without_its_mask_gets_no_token_and_is_computed_again(depth):
    harness = Harness(depth=depth, masks_are_late=True)
    late, other = defer(harness)
    assert (late.num_output_tokens, late.num_pending_tokens) == (1, 0)
    assert late.num_computed_tokens == len(late.token_ids) - 1
    harness.make_masks()
    harness.run()
    harness.check_answer(late)
    harness.check_answer(other)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_slow_grammar_costs_one_wait_in_its_life(depth):
    harness = Harness(depth=depth, masks_are_late=True)
    late, _ = defer(harness, 60)
    for num_output_tokens in range(1, 6):
        for _ in range(depth + 2):  # nothing of it is asked for until there is a mask
            harness.advance()
        assert late.num_output_tokens == num_output_tokens
        assert late.num_computed_tokens == len(late.token_ids) - 1
        harness.make_masks()
    harness.run()
    assert harness.runner.num_deferrals == 1
    harness.check_answer(late)


def test_the_others_go_on_while_one_waits_for_its_mask():
    harness = Harness(depth=1, masks_are_late=True)
    late, other = defer(harness)
    while other.finish_reason is None:
        assert [event.sequence for event in harness.advance()] == [other]
    assert other.num_output_tokens == 12
    assert harness.schedule() is None
    assert harness.scheduler.is_busy and harness.scheduler.has_work
    assert harness.scheduler.num_running == 1
    harness.run()
    harness.check_answer(late)


def test_what_was_run_ahead_in_vain_is_neither_told_nor_cached():
    """The steps on their way computed what comes after a token that never was."""
    harness = Harness(depth=2, masks_are_late=True, block_size=1)
    late = harness.add_one(PROMPT, 6, grammar=FREE)
    harness.fill()
    assert len(harness.commit()) == 1
    num_cached = len(harness.scheduler._kv.tree.nodes())
    assert harness.commit() == harness.commit() == []
    assert len(harness.scheduler._kv.tree.nodes()) == num_cached + 1  # of the first token
    assert late.num_output_tokens == 1
    again = harness.add_one([*late.token_ids, 9], 1)
    harness.run()
    assert again.num_cached_tokens == len(late.request.prompt_token_ids) + 1
    harness.check_answer(late)
    harness.check_answer(again)


def test_what_was_run_ahead_in_vain_stays_unknown_when_other_tokens_come_in_its_place():
    harness = Harness(depth=1, masks_are_late=True, block_size=1)
    late = harness.add_one(PROMPT, 6, grammar=FREE)
    for _ in range(2):
        harness.fill()
        harness.commit()
    assert late.is_gated and len(harness.in_flight) == 1  # its KV is no token's
    force(harness, late, 4, [7, 8])
    harness.finish(late)
    harness.commit()
    again = harness.add_one([*late.token_ids, 9], 1)
    harness.run()
    assert again.num_cached_tokens == 4
    harness.check_answer(again)


def test_a_mask_that_came_before_the_news_that_it_was_late_is_asked_for_at_once():
    harness = Harness(depth=0)
    late = harness.add_one(PROMPT, 6, grammar=FREE)
    harness.advance()
    harness.runner.late_masks.add((late.mask_slot, 4))
    assert harness.advance() == []
    assert rows(harness.schedule().step) == [(0, 3, 1, 1)]
    harness.run()
    assert harness.runner.num_deferrals == 1
    harness.check_answer(late)


def test_old_news_of_a_mask_takes_nothing_back():
    harness = Harness(masks_are_late=True)
    late, _ = defer(harness)
    harness.make_masks()
    harness.scheduler.on_mask(late, 3)
    assert late in [sequence for sequence, _, _ in harness.schedule().scheduled]
    harness.run()
    harness.check_answer(late)


def test_what_a_step_sent_in_vain_reports_means_nothing():
    """Its logits were made of what nobody knows."""
    harness = Harness(depth=1, masks_are_late=True)
    late = harness.add_one(PROMPT, 6, grammar=FREE)
    for _ in range(2):
        harness.fill()
        harness.commit()
    output = harness.runner.step(harness.in_flight.popleft())
    assert output.deferred == pack_ints([0])
    output = msgspec.structs.replace(output, deferred=b"", failed=pack_ints([0]))
    assert harness.scheduler.commit(output) == []
    harness.run()
    harness.check_answer(late)


def test_a_mask_that_is_in_time_lets_its_sequence_be_run_ahead():
    harness = Harness(depth=1)
    sequence = harness.add_one(PROMPT, 6, grammar=FREE)
    harness.fill()
    assert sequence.num_pending_tokens == 2
    harness.run()
    assert harness.runner.num_deferrals == 0
    harness.check_answer(sequence)


def test_nobody_is_preempted_because_all_wait_for_masks():
    harness = Harness(num_blocks=3, block_size=2, masks_are_late=True)
    late = harness.add_one(PROMPT, 3, grammar=FREE)
    harness.advance()
    assert harness.advance() == []
    waiting = harness.add_one([7, 8, 9], 2)
    assert harness.schedule() is None
    assert harness.scheduler.num_preemptions == 0
    harness.run()
    harness.check_answer(late)
    harness.check_answer(waiting)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_deferred_sequence_is_preempted_and_waits_for_its_mask_with_its_blocks(depth):
    harness = Harness(depth=depth, num_blocks=6, block_size=2, masks_are_late=True)
    needy = harness.add_one([4] * 7, 5)
    late = harness.add_one(PROMPT, 3, grammar=FREE)
    while not late.num_preemptions:
        harness.advance()
    assert late.awaits_mask
    harness.finish(needy)
    harness.fill()
    while harness.in_flight:
        harness.commit()
        harness.fill()
    assert (late.row, late.num_computed_tokens) == (0, len(late.token_ids) - 1)
    assert harness.schedule() is None
    harness.run()
    harness.check_answer(late)


def test_a_deferred_sequence_that_is_aborted_gives_back_all():
    harness = Harness(depth=1, masks_are_late=True)
    late, other = defer(harness)
    harness.finish(late)
    harness.finish(other)
    harness.run()


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_deferred_sequence_ends_once_with_a_step_that_fails(fails_at):
    harness = Harness(depth=1, masks_are_late=True)
    harness.runner.fail_step_ids = frozenset({fails_at})
    late = harness.add_one(PROMPT, 6, grammar=FREE)
    harness.run()
    assert late.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("forces", ["never", "always"])
def test_an_end_token_that_the_grammar_wants_comes_however_early(forces):
    seed = seed_that_begins(1)
    end_token = FakeMatcher(seed, VOCAB_SIZE).forced[0]
    harness = Harness(forces=forces)
    sequence = harness.add_one(PROMPT, 6, grammar=seed, min_tokens=2, stop_token_ids=[end_token])
    harness.run()
    assert sequence.output_token_ids == [end_token]
    assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.STOP, end_token)
    harness.check_answer(sequence)


def test_a_row_without_a_grammar_is_never_deferred():
    harness = Harness()
    harness.add_one(PROMPT, 6)
    step_id = harness.schedule().step.step_id
    output = StepOutput(step_id=step_id, sampled=pack_ints([0]), deferred=pack_ints([0]))
    with pytest.raises(IntegrityError, match="^I11: .* has no grammar, and is deferred"):
        harness.scheduler.commit(output)


# --- forced tokens -------------------------------------------------------------------------------


def test_tokens_forced_at_the_end_of_the_prompt_cost_no_step():
    harness = Harness()
    sequence = harness.add_one(PROMPT, 8)
    events = force(harness, sequence, 3, [7, 8, 9])
    assert events == [(sequence, token_id, None, None) for token_id in (7, 8, 9)]
    assert sequence.output_token_ids == [7, 8, 9]
    assert rows(harness.schedule().step) == [(0, 0, 6, 1)]
    harness.commit()
    assert sequence.output_token_ids[3:] == expected_tokens([*PROMPT, 7, 8, 9], 1, VOCAB_SIZE)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_is_in_flight_gives_the_first_forced_tokens_itself(depth):
    seed = seed_that_begins(5, with_choice=1)
    harness = Harness(depth=depth, forces="always")
    sequence = harness.add_one(PROMPT, 12, grammar=seed)
    harness.fill()
    commits = [harness.commit()]
    for num_left in range(depth, 0, -1):
        assert harness.schedule() is None
        assert sequence.num_pending_tokens == num_left
        commits.append(harness.commit())
    assert [len(events) for events in commits] == [1] * depth + [6 - depth]
    assert sequence.output_token_ids == harness.oracle(sequence)[:6]
    step = harness.schedule().step
    assert rows(step) == [(0, 3 + depth, 6 - depth, 1)]  # the last known token, and all forced
    assert step.added[0].row == 0 and list(step.removed) == [0, 0, 0, 0]
    harness.run()
    harness.check_answer(sequence)


def test_forced_tokens_end_where_max_tokens_says():
    harness = Harness()
    sequence = harness.add_one(PROMPT, 2)
    events = force(harness, sequence, 3, [7, 8, 9])
    assert [(e.token_id, e.finish_reason) for e in events] == [(7, None), (8, FinishReason.LENGTH)]
    assert not harness.scheduler.has_work
    harness.scheduler.check_integrity()


def test_forced_tokens_end_with_the_first_end_token():
    harness = Harness(eos_token_ids=frozenset({EOS}))
    first = harness.add_one(PROMPT, 8)
    events = force(harness, first, 3, [7, EOS, 9])
    assert [(e.token_id, e.finish_reason) for e in events] == [(7, None), (EOS, FinishReason.STOP)]
    assert first.stop_reason is None
    second = harness.add_one(PROMPT, 8, stop_token_ids=[9])
    force(harness, second, 3, [7, 9])
    assert (second.finish_reason, second.stop_reason) == (FinishReason.STOP, 9)


def test_nothing_is_forced_where_logprobs_are_wanted():
    harness = Harness(forces="always")
    seed = seed_that_begins(4)
    for sampling in ({"logprobs": 0}, {"prompt_logprobs": 0}, {"best_of": 2}):
        (sequence, *_) = harness.add(PROMPT, 6, grammar=seed, **sampling)
        assert sequence.num_output_tokens == 0
        events = harness.run()
        assert harness.num_forced == 0
        if "logprobs" in sampling:
            assert all(event.logprobs is not None for event in events)
        harness.check_answer(sequence)


def test_what_was_forced_is_dropped_if_something_else_came():
    harness = Harness(depth=1)
    sequence = harness.add_one(PROMPT, 6)
    wrong = (harness.oracle(sequence)[0] + 1) % VOCAB_SIZE
    harness.fill()
    assert force(harness, sequence, 3, [wrong] * 9) == []
    harness.run()
    harness.check_answer(sequence)


def test_tokens_that_are_there_already_are_not_forced_again():
    harness = Harness()
    sequence = harness.add_one(PROMPT, 6)
    harness.advance()
    expected = harness.oracle(sequence)
    assert force(harness, sequence, 3, expected[:1]) == []
    assert [e.token_id for e in force(harness, sequence, 3, expected[:2])] == expected[1:2]
    harness.run()
    harness.check_answer(sequence)


def test_tokens_cannot_be_forced_after_unknown_ones():
    harness = Harness()
    sequence = harness.add_one(PROMPT, 6)
    with pytest.raises(IntegrityError, match="^I11: expected forced tokens from position 3 on"):
        force(harness, sequence, 4, [7])


def test_nothing_comes_after_a_stop_among_forced_tokens():
    harness = Harness(depth=1)
    sequence = harness.add_one(PROMPT, 20)
    harness.fill()
    force(harness, sequence, 3, harness.oracle(sequence)[:9])
    harness.commit()
    assert len(harness.commit()) == 1 + 7  # in flight, then what was left
    harness.finish(sequence, FinishReason.STOP)
    assert force(harness, sequence, 12, [1]) == []
    assert harness.run() == []


def test_a_sequence_ends_while_its_forced_tokens_are_still_to_be_appended():
    harness = Harness(depth=1)
    sequence, other = harness.add_one(PROMPT, 20), harness.add_one([4], 4)
    harness.fill()
    force(harness, sequence, 3, harness.oracle(sequence)[:9])
    harness.finish(sequence)
    events = harness.run()
    assert {event.sequence for event in events} == {other}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_sequence_is_preempted_in_the_middle_of_forced_tokens(depth):
    harness = Harness(depth=depth, num_blocks=6, block_size=2)
    needy, victim = harness.add_one([4] * 4, 7), harness.add_one(PROMPT, 9)
    harness.advance()
    harness.fill()
    events = force(harness, victim, 4, harness.oracle(victim)[1:6])
    assert bool(events) == (depth == 0 and not harness.in_flight)
    harness.run()
    assert victim.num_preemptions > 0
    harness.check_answer(needy)
    harness.check_answer(victim)


def test_forced_tokens_are_cached_only_once_computed():
    harness = Harness(block_size=2, max_num_seqs=1)
    first = harness.add_one(PROMPT, 8)
    force(harness, first, 3, [7, 8, 9, 10])
    second = harness.add_one([*PROMPT, 7, 8, 9, 10], 1, priority=-1)
    harness.advance()
    assert second.num_cached_tokens == 0
    harness.finish(first)
    harness.run()
    third = harness.add_one([*PROMPT, 7, 8, 9, 10], 1)
    harness.run()
    assert third.num_cached_tokens == 6


def test_forced_tokens_leave_a_prompt_as_many_cached_tokens_as_it_has_without_them():
    harness = Harness(block_size=2)
    harness.add_one([*PROMPT, 7, 8, 9, 10], 1)
    harness.run()
    sequence = harness.add_one(PROMPT, 8)
    force(harness, sequence, 3, [7, 8, 9, 10])
    assert rows(harness.schedule().step) == [(0, 6, 1, 1)]
    assert sequence.num_cached_tokens == 2


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_each_choice_follows_a_grammar_of_its_own(depth, late):
    harness = Harness(depth=depth, masks_are_late=late, forces="sometimes", block_size=2)
    choices = harness.add(PROMPT, 10, n=4, grammar=seed_that_begins(3), temperature=1.0)
    assert len({sequence.mask_slot for sequence in choices}) == 4
    harness.run()
    for sequence in choices:
        harness.check_answer(sequence)
    assert len({tuple(sequence.output_token_ids) for sequence in choices}) == 4


def test_choices_share_their_prompt_until_one_has_forced_tokens():
    harness = Harness()
    first, second, third = harness.add(PROMPT, 8, n=3, temperature=1.0)
    force(harness, second, 3, [7, 8])
    assert first.token_ids is third.token_ids
    assert (first.num_output_tokens, second.output_token_ids) == (0, [7, 8])


@pytest.mark.parametrize("depth", [0, 1])
def test_many_forced_tokens_come_as_they_are_taken_and_no_other_before_all_are_there(depth):
    harness = Harness(depth=depth, max_num_seqs=1, forced_at_once=4)
    running, waiting = harness.add_one(PROMPT, 40), harness.add_one([4, 5], 40)
    harness.advance()
    num_sampled = running.num_tokens - 3
    harness.scheduler.force(running, 3, harness.oracle(running)[:20])
    harness.scheduler.force(waiting, 2, harness.oracle(waiting)[:30])
    while running.num_output_tokens < 20:
        assert harness.scheduler.is_busy
        assert len(harness.advance()) <= 4 + depth
        assert running.num_output_tokens + running.num_pending_tokens <= 20
    assert running.num_forced_tokens == 20 - num_sampled
    harness.run()
    assert harness.num_forced == 20 - num_sampled + 30
    harness.check_answer(running)
    harness.check_answer(waiting)


def test_those_with_many_forced_tokens_take_turns():
    harness = Harness()
    sequences = [harness.add_one([n], 40) for n in range(3)]
    for sequence in sequences:
        harness.scheduler.force(sequence, 1, [7] * 10)
    last = harness.add_one([9], 40)
    harness.scheduler.force(last, 1, [7])
    taken = []
    while events := harness.scheduler.take_forced(6):
        taken.append([(event.sequence.request.prompt_token_ids[0]) for event in events])
    assert taken == [[0] * 6, [1] * 6, [2] * 6, [9] + [0] * 4 + [1], [2] * 4 + [1] * 2, [1]]


def test_whether_tokens_are_forced_changes_no_answer():
    answers = []
    for depth, forced_at_once in ((0, 1000), (1, 1000), (0, 1), (1, 2)):
        for forces in ("never", "sometimes", "always"):
            for late in (False, True):
                harness = Harness(
                    depth=depth,
                    forces=forces,
                    forced_at_once=forced_at_once,
                    masks_are_late=late,
                    block_size=2,
                )
                sequences = [harness.add_one([7, n], 16, grammar=n) for n in range(12)]
                harness.run()
                answers.append([sequence.output_token_ids for sequence in sequences])
                assert (harness.num_forced > 0) == (forces != "never")
    assert all(answer == answers[0] for answer in answers)
