"""Requests that are paused: they hold nothing, are in nobody's way, and go on where they were."""

import pytest
from core.harness import EOS, Harness
from fakes import FakeStore

from streamkv.core.sequence import SequenceStatus
from streamkv.errors import CapacityError
from streamkv.protocol import FinishReason


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_paused_sequence_gives_back_its_row_and_blocks_within_its_steps_in_flight(depth):
    harness = Harness(depth=depth)
    sequence = harness.add_one([1, 2, 3, 4, 5], 12)
    harness.advance()
    harness.fill()
    harness.pause(sequence)
    num_in_flight = len(harness.in_flight)
    for _ in range(num_in_flight):
        assert [event.sequence for event in harness.commit()] == [sequence]
    assert (sequence.row, sequence.block_table, sequence.num_pending_tokens) == (-1, [], 0)
    assert harness.scheduler.num_held_blocks == 0
    harness.resume(sequence)
    harness.run()
    harness.check_answer(sequence)


def test_what_it_had_computed_stays_cached():
    harness = Harness(block_size=2)
    sequence = harness.add_one([1, 2, 3, 4, 5], 6)
    for _ in range(3):
        harness.advance()
    harness.pause(sequence)
    harness.resume(sequence)
    assert [(start, count) for _, start, count in harness.schedule().scheduled] == [(7, 1)]
    harness.run()
    assert harness.runner.num_computed_tokens == 5 + 5  # none twice
    assert harness.scheduler.num_preemptions == 0
    harness.check_answer(sequence)


def test_paused_sequences_are_no_work():
    harness = Harness(num_blocks=4)
    running, waiting = harness.add_one([1] * 9, 5), harness.add_one([2] * 9, 5)
    harness.advance()
    for sequence in (running, waiting):
        harness.pause(sequence)
    scheduler = harness.scheduler
    assert harness.schedule() is None
    assert not (scheduler.has_work or scheduler.is_busy)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_paused) == (0, 0, 2)
    scheduler.check_at_rest()
    harness.resume(running)
    assert (scheduler.num_waiting, scheduler.num_paused) == (1, 1)
    harness.advance()
    harness.resume(waiting)
    harness.run()
    harness.check_answer(running)
    harness.check_answer(waiting)


def test_nobody_waits_behind_one_that_is_paused():
    harness = Harness(num_blocks=5)
    large, small = harness.add_one([1] * 12, 4), harness.add_one([2], 2)
    harness.add_one([3] * 12, 4, priority=-1)
    harness.advance()
    assert small.status is SequenceStatus.WAITING
    harness.pause(large)
    harness.advance()
    assert small.status is SequenceStatus.RUNNING
    harness.resume(large)
    harness.run()
    harness.check_answer(large)


def test_pausing_and_resuming_twice_is_doing_it_once():
    harness = Harness()
    sequence, other = harness.add_one([1, 2], 8), harness.add_one([3], 8)
    harness.advance()
    for _ in range(2):
        harness.pause(sequence)
        assert harness.scheduler.num_paused == 1
    for _ in range(2):
        harness.resume(sequence)
        harness.resume(other)
        assert harness.scheduler.num_paused == 0
    harness.run()
    harness.pause(other)  # it has ended
    assert harness.scheduler.num_paused == 0
    harness.check_answer(sequence)
    harness.check_answer(other)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 3, "temperature": 1.0},
        {"n": 2, "best_of": 3, "use_beam_search": True},
        {"n": 2, "grammar": 5},
        {"prompt_logprobs": 1},
    ],
)
def test_all_of_a_request_pauses_and_goes_on(sampling, num_steps, depth):
    harness = Harness(depth=depth, block_size=2, max_num_batched_tokens=6, forces="sometimes")
    sequences = harness.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 8, **sampling)
    other = harness.add_one([7], 20)
    for _ in range(num_steps):
        harness.advance()
    harness.fill()
    harness.pause(sequences[-1])
    while other.finish_reason is None:
        harness.advance()
    assert harness.scheduler.num_held_blocks == 0
    harness.resume(sequences[0])
    harness.run()
    for sequence in (*sequences, other):
        harness.check_answer(sequence)


def test_a_sequence_is_paused_while_it_loads():
    harness = Harness(num_blocks=4, block_size=2, num_host_slots=16, store=FakeStore())
    harness.add_one([1, 2, 3, 4, 5, 6], 1)
    harness.run()
    harness.add_one([9] * 7, 1)
    harness.run()  # the first one's blocks are in host memory or on disk
    sequence = harness.add_one([1, 2, 3, 4, 5, 6], 2)
    harness.schedule()
    assert sequence.status is SequenceStatus.LOADING
    harness.pause(sequence)
    harness.run_while_paused()
    assert harness.scheduler.num_loading == 0
    harness.resume(sequence)
    harness.run()
    harness.check_answer(sequence)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_swapped_sequence_that_is_paused_pins_nothing(depth):
    """Nor does one that is still to be swapped, once its step in flight is committed."""
    harness = Harness(
        depth=depth, num_blocks=4, block_size=2, num_host_slots=16, preemption_mode="swap"
    )
    needy, victim = harness.add_one([1, 2, 3], 6), harness.add_one([4, 5], 6)
    while not victim.num_preemptions:
        if len(harness.in_flight) > depth:
            harness.commit()
        harness.schedule()
    assert (victim.row >= 0) == (depth == 1)
    harness.pause(victim)
    harness.run_while_paused()
    assert harness.scheduler._kv._pinned == {}
    harness.resume(victim)
    harness.run()
    harness.check_answer(needy)
    harness.check_answer(victim)


@pytest.mark.parametrize("sampling", [{}, {"n": 3}, {"n": 2, "use_beam_search": True}])
def test_a_paused_request_is_aborted(sampling):
    harness = Harness(depth=1)
    sequences = harness.add([1, 2, 3], 9, **sampling)
    harness.advance()
    harness.fill()
    harness.pause(sequences[0])
    for sequence in sequences:
        harness.finish(sequence)
    assert harness.scheduler.num_paused == 0
    harness.run()


def test_one_choice_of_a_paused_request_ends_and_the_others_go_on():
    harness = Harness()
    first, second, third = harness.add([1, 2, 3], 9, n=3, temperature=1.0)
    harness.advance()
    harness.pause(first)
    harness.finish(first)
    assert harness.scheduler.num_paused == 2
    harness.resume(second)
    harness.run()
    harness.check_answer(second)
    harness.check_answer(third)


def test_the_token_in_flight_may_end_a_paused_sequence():
    for first in range(100):
        harness = Harness(depth=1, eos_token_ids=frozenset({EOS}))
        sequence = harness.add_one([first], 8)
        if len(harness.oracle(sequence)) == 2:
            break
    harness.fill()
    harness.pause(sequence)
    harness.commit()
    assert [event.finish_reason for event in harness.commit()] == [FinishReason.STOP]
    assert harness.scheduler.num_paused == 0
    harness.run()


def test_a_step_in_flight_may_fail_for_a_paused_sequence():
    harness = Harness(depth=1)
    sequence = harness.add_one([1, 2], 8)
    harness.fill()
    harness.pause(sequence)
    harness.runner.fail_next = "out of luck"
    assert [event.finish_reason for event in harness.commit()] == [FinishReason.ERROR]
    harness.run()


def test_the_pool_stays_large_enough_for_those_that_are_paused():
    harness = Harness(num_blocks=8, block_size=2)
    sequence = harness.add_one([1] * 9, 4)
    harness.advance()
    harness.pause(sequence)
    with pytest.raises(CapacityError, match="expected at least 6 blocks"):
        harness.scheduler.resize(5)
    harness.finish(sequence)
    harness.scheduler.resize(5)


@pytest.mark.parametrize("is_running", [False, True])
def test_tokens_without_a_choice_wait_for_a_paused_request_too(is_running):
    harness = Harness()
    sequence, other = harness.add_one([1, 2, 3], 20), harness.add_one([4, 5], 20)
    if is_running:
        harness.advance()
    num_tokens = len(sequence.token_ids)
    forced = harness.oracle(sequence)[num_tokens - 3 :][:10]
    harness.scheduler.force(sequence, num_tokens, forced[:5])
    harness.pause(sequence)
    scheduler = harness.scheduler
    assert not scheduler.has_forced and scheduler.take_forced(10) == []
    harness.run_while_paused()
    assert other.finish_reason is not None
    assert not (scheduler.has_work or scheduler.is_busy)
    scheduler.check_at_rest()
    assert len(sequence.token_ids) == num_tokens
    harness.resume(sequence)
    assert scheduler.has_forced
    harness.run()
    assert harness.num_forced == 5
    harness.check_answer(sequence)
    harness.check_answer(other)


def test_a_paused_request_with_tokens_without_a_choice_may_end():
    harness = Harness()
    first, second = harness.add([1, 2, 3], 8, n=2, temperature=1.0)
    for sequence in (first, second):
        harness.scheduler.force(sequence, 3, [7, 8])
    harness.pause(first)
    harness.finish(first)
    assert not harness.scheduler.is_busy
    harness.finish(second)
    assert harness.take_forced() == []
    assert not harness.scheduler.is_busy
    harness.run()
