"""A step is sent before the last one's results are known: what is known one step late."""

import msgspec
import pytest
from core.harness import EOS, VOCAB_SIZE, Harness, rows
from fakes import expected_tokens

from streamkv.core.integrity import IntegrityError
from streamkv.core.scheduler import NO_TOKEN
from streamkv.core.sequence import SequenceStatus
from streamkv.protocol import FinishReason, pack_ints, unpack_ints


def test_the_next_step_assumes_one_token_for_each_row_in_flight():
    harness = Harness(depth=1)
    sequence = harness.add_one([1, 2, 3], 4)
    assert rows(harness.schedule().step) == [(0, 0, 3, 1)]
    assert rows(harness.schedule().step) == [(0, 3, 1, 1)]
    assert sequence.num_pending_tokens == 2
    harness.run()
    harness.check_answer(sequence)


def test_a_row_whose_length_limit_is_in_flight_is_not_scheduled_again():
    harness = Harness(depth=1)
    harness.add_one([1, 2, 3], 1)
    assert harness.schedule() is not None
    assert harness.schedule() is None
    assert harness.commit()[0].finish_reason is FinishReason.LENGTH
    assert harness.runner.num_computed_tokens == 3


def test_the_token_after_an_end_token_is_dropped():
    """EOS is seen when its step is committed; one more token is on its way by then."""
    for first in range(100):
        harness = Harness(depth=1, eos_token_ids=frozenset({EOS}))
        sequence = harness.add_one([first], 8)
        expected = harness.oracle(sequence)
        if 1 < len(expected) < 8:
            break
    events = harness.run()
    assert [event.token_id for event in events] == expected
    assert harness.runner.num_computed_tokens == len(expected) + 1  # prompt, tokens, extra one


def test_a_stop_string_is_found_one_step_late_and_nothing_comes_after_it():
    harness = Harness(depth=1)
    sequence = harness.add_one([1, 2, 3], 20)
    harness.fill()
    assert len(harness.commit()) == 1
    harness.fill()
    harness.finish(sequence, FinishReason.STOP)  # the text of the first token was enough
    assert harness.scheduler.num_held_blocks == 2
    assert harness.commit() == []
    assert harness.scheduler.num_held_blocks == 2  # the second step in flight names them too
    assert harness.commit() == []
    assert harness.scheduler.num_held_blocks == 0
    assert (sequence.num_output_tokens, sequence.num_pending_tokens) == (1, 0)
    harness.add_one([9], 1)
    assert list(unpack_ints(harness.schedule().step.removed)) == [0]


def test_blocks_are_free_within_two_steps_after_an_abort():
    harness = Harness(depth=1)
    aborted = harness.add_one(range(9), 20)
    harness.add_one([1], 20)
    for _ in range(3):
        harness.advance()
    harness.fill()
    harness.finish(aborted)
    num_others = 1 + harness.scheduler.num_held_blocks - len(aborted.block_table)
    for _ in range(2):
        harness.advance()
    assert aborted.block_table == []
    assert harness.scheduler.num_held_blocks <= num_others
    harness.fill()
    assert [row for row, *_ in rows(harness.in_flight[-1])] == [1]


def test_aborting_before_the_first_commit_frees_all():
    harness = Harness(depth=1)
    sequence = harness.add_one(range(9), 20)
    harness.fill()
    harness.finish(sequence)
    assert harness.run() == []
    assert sequence.num_output_tokens == 0


def preempt_with_a_pending_token(harness: Harness, second_prompt: list[int]):
    """Two rows fill the pool; the first needs a block while a token of the second is in flight."""
    first, second = harness.add_one([1, 2, 3], 5), harness.add_one(second_prompt, 5)
    harness.schedule()
    harness.schedule()
    harness.commit()
    assert harness.schedule() is None  # the blocks of the second are still named by a step
    assert (second.status, second.num_pending_tokens) == (SequenceStatus.WAITING, 1)
    assert (len(second.block_table), second.row) == (2, 1)
    return first, second


def test_a_preempted_sequence_keeps_the_token_in_flight_and_resumes_after_its_commit():
    harness = Harness(depth=1, num_blocks=4, block_size=2)
    first, second = preempt_with_a_pending_token(harness, [4, 5])
    assert second in [event.sequence for event in harness.commit()]
    assert second.num_output_tokens == 2
    assert (second.block_table, second.row, second.num_pending_tokens) == ([], -1, 0)
    assert second.num_computed_tokens == 0
    output = harness.schedule()
    assert [sequence for sequence, _, _ in output.scheduled] == [first]
    assert list(unpack_ints(output.step.removed)) == [1]
    harness.run()
    harness.check_answer(first)
    harness.check_answer(second)


def test_a_preempted_sequence_is_aborted_while_its_last_step_is_in_flight():
    harness = Harness(depth=1, num_blocks=4, block_size=2)
    first, second = preempt_with_a_pending_token(harness, [4, 5])
    harness.finish(second)
    assert second.row == 1
    assert [event.sequence for event in harness.commit()] == [first]
    assert (second.row, second.block_table) == (-1, [])
    harness.run()
    harness.check_answer(first)


def test_a_preempted_sequence_does_not_resume_while_a_step_names_it():
    """Though its own blocks are cached, and there would be room."""
    harness = Harness(depth=1, num_blocks=12, block_size=2, max_num_batched_tokens=8)
    victim = harness.add_one([4, 5, 6], 8, priority=1)
    harness.schedule()
    needy = harness.add_one([7] * 20, 2)
    harness.schedule()
    for _ in range(2):
        harness.commit()
        output = harness.schedule()
    assert output is None  # the last chunk takes three blocks, two are free
    assert (victim.num_preemptions, victim.num_pending_tokens) == (1, 1)
    harness.finish(needy)
    assert harness.schedule() is None
    assert [event.sequence for event in harness.commit()] == [victim]
    assert harness.schedule().admitted == [victim]
    harness.run()
    harness.check_answer(victim)


def test_a_preempted_sequence_may_end_with_the_token_in_flight():
    for token_id in range(100):
        harness = Harness(depth=1, num_blocks=4, block_size=2, eos_token_ids=frozenset({EOS}))
        if len(expected_tokens([4, token_id], 5, VOCAB_SIZE, end_token_ids={EOS})) == 2:
            break
    first, second = preempt_with_a_pending_token(harness, [4, token_id])
    events = harness.commit()
    assert (second, FinishReason.STOP) in [(e.sequence, e.finish_reason) for e in events]
    assert (second.row, second.block_table) == (-1, [])
    assert harness.scheduler.num_waiting == 0
    harness.run()
    harness.check_answer(first)
    harness.check_answer(second)


def test_nobody_is_preempted_for_blocks_that_a_step_in_flight_gives_back():
    harness = Harness(depth=1, num_blocks=5, block_size=2)
    first = harness.add_one([1, 2, 3], 6)
    ended = harness.add_one([4, 5, 6], 5)
    last = harness.add_one([7], 3)
    harness.fill()
    assert harness.scheduler.num_free_blocks == 0
    harness.finish(ended)
    harness.commit()
    assert harness.schedule() is None  # both need a block
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    harness.check_answer(first)
    harness.check_answer(last)


def test_nobody_is_preempted_whose_last_token_is_in_flight():
    harness = Harness(depth=1, num_blocks=4, block_size=2)
    first, second = harness.add_one([1, 2, 3], 5), harness.add_one([4, 5], 2)
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    harness.check_answer(first)
    harness.check_answer(second)


def test_who_waits_for_blocks_is_not_robbed_of_the_free_ones():
    """Neither by a sequence that runs behind it, nor by one that waits for admission."""
    harness = Harness(depth=1, num_blocks=48, block_size=2, max_num_batched_tokens=32)
    ended = harness.add_one(range(8), 30, priority=1)
    harness.schedule()
    in_its_block = harness.add_one([7], 30, priority=1)
    at_its_end = harness.add_one([8, 9], 30, priority=1)
    harness.schedule()
    needy = harness.add_one([4] * 80, 2)
    harness.commit()
    assert harness.schedule().scheduled[-1] == (needy, 0, 29)
    harness.commit()
    assert harness.schedule().scheduled[0] == (needy, 29, 29)
    harness.commit()
    waiting = harness.add_one([5], 2, priority=2)
    harness.finish(ended)
    assert harness.scheduler.num_free_blocks == 9  # the needy one wants eleven
    output = harness.schedule()
    assert [sequence for sequence, _, _ in output.scheduled] == [in_its_block]
    assert output.admitted == output.preempted == []
    harness.commit()
    assert [s for s, _, _ in harness.schedule().scheduled] == [
        needy,
        in_its_block,
        at_its_end,
        waiting,
    ]
    harness.run()
    for sequence in (needy, in_its_block, at_its_end, waiting):
        harness.check_answer(sequence)


def test_everyone_waits_for_a_release_and_then_goes_on():
    harness = Harness(depth=1, num_blocks=2, block_size=2)
    first = harness.add_one([1, 2, 3], 1)
    second = harness.add_one([4, 5, 6], 1)
    harness.schedule()
    harness.finish(first)
    assert harness.schedule() is None
    assert harness.scheduler.has_work
    assert harness.commit() == []
    assert [s for s, _, _ in harness.schedule().scheduled] == [second]
    harness.run()
    harness.check_answer(second)


def test_rows_whose_last_token_is_in_flight_count_against_the_budget():
    """Else more rows would run than a step has tokens, once a longer prompt comes in between."""
    harness = Harness(depth=1, max_num_batched_tokens=2)
    for token in range(6):
        harness.add_one([token], 1)
    while harness.scheduler.has_work:
        harness.fill()
        assert harness.scheduler.num_running <= 2
        harness.commit()


def test_rows_of_a_failed_step_are_dropped_from_the_step_after_it():
    harness = Harness(depth=1)
    lost = harness.add_one([1, 2, 3], 9)
    harness.schedule()
    later = harness.add_one([4, 5, 6], 3)
    harness.schedule()
    harness.runner.fail_next = "device lost its mind"
    (event,) = harness.commit()
    assert (event.sequence, event.finish_reason) == (lost, FinishReason.ERROR)
    assert [e.sequence for e in harness.commit()] == [later]
    assert lost.block_table == []
    harness.run()
    harness.check_answer(later)
    assert lost.output_token_ids == []


@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_without_finite_logits_ends_alone_and_its_next_step_is_dropped(depth):
    harness = Harness(depth=depth, block_size=2)
    sequences = [harness.add_one(prompt, 9) for prompt in ([1, 2, 3], [4, 5, 6], [7, 8, 9, 10])]
    healthy, lost, other = sequences
    harness.fill()
    harness.runner.broken_token_ids = frozenset((6,))
    events = harness.commit()
    assert [(e.sequence, e.token_id, e.finish_reason) for e in events] == [
        (healthy, harness.oracle(healthy)[0], None),
        (lost, NO_TOKEN, FinishReason.ERROR),
        (other, harness.oracle(other)[0], None),
    ]
    harness.runner.broken_token_ids = frozenset()  # the step sent ahead samples something for it
    events = harness.advance()
    assert [event.sequence for event in events] == [healthy, other]
    harness.run()
    for sequence in sequences:
        harness.check_answer(sequence)
    assert healthy.num_output_tokens == other.num_output_tokens == 9
    assert lost.output_token_ids == []


def test_a_row_that_fails_after_its_sequence_ended_has_no_event():
    harness = Harness(depth=1)
    aborted, other = harness.add_one([6, 2], 9), harness.add_one([1], 2)
    harness.fill()
    harness.finish(aborted)
    harness.runner.broken_token_ids = frozenset((6,))
    assert [event.sequence for event in harness.commit()] == [other]
    harness.run()
    harness.check_answer(other)


@pytest.mark.parametrize("failed", [[1], [-1]])
def test_a_failed_row_that_did_not_ask_is_seen(failed):
    harness = Harness()
    harness.add_one([1, 2], 2)
    output = harness.runner.step(harness.schedule().step)
    with pytest.raises(IntegrityError, match="as failed"):
        harness.scheduler.commit(msgspec.structs.replace(output, failed=pack_ints(failed)))


def test_depths_give_the_same_answers_with_fewer_waits():
    answers = []
    for depth in (0, 1, 2):
        harness = Harness(depth=depth, num_blocks=10, block_size=2, eos_token_ids=frozenset({EOS}))
        sequences = [harness.add_one([token % 5, token], 8) for token in range(12)]
        harness.run()
        answers.append([sequence.output_token_ids for sequence in sequences])
    assert answers[0] == answers[1] == answers[2]
