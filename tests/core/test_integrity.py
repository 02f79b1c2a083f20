"""`check_integrity` sees planted damage, and names the invariant."""

import pytest
from core.harness import Harness

from streamkv.core.integrity import IntegrityError
from streamkv.core.sequence import Sequence, SequenceStatus
from streamkv.protocol import StepOutput, pack_ints


@pytest.fixture
def harness() -> Harness:
    """Two running sequences that share a block, one waiting; one step in flight."""
    harness = Harness(num_blocks=8, block_size=2, max_num_seqs=2)
    harness.add_one([1, 2, 3], 5)
    harness.advance()
    harness.add_one([1, 2, 4], 5)
    harness.add_one([6], 2)
    harness.schedule()
    return harness


def sequences(harness: Harness) -> list[Sequence]:
    return list(harness.live)


def test_a_sound_scheduler_passes(harness):
    first, second, waiting = sequences(harness)
    assert first.block_table[0] == second.block_table[0]
    assert waiting.status is SequenceStatus.WAITING
    harness.scheduler.check_integrity()


def leak_a_block(first, second, waiting):
    first.block_table.pop()
    first.num_computed_tokens = 2


def compute_too_much(first, second, waiting):
    first.num_computed_tokens += 2


def run_without_a_row(first, second, waiting):
    first.row = -1


def share_a_row(first, second, waiting):
    first.row = second.row


def lie_about_status(first, second, waiting):
    waiting.status = SequenceStatus.RUNNING


def hold_blocks_while_waiting(first, second, waiting):
    waiting.block_table = [7]


def hold_back_one_that_waits(first, second, waiting):
    waiting.group.aside.append(waiting)


def hold_back_one_that_runs(first, second, waiting):
    first.group.spare.append(second)


def rewrite_shared_tokens(first, second, waiting):
    second.token_ids[0] = 9


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        (leak_a_block, "I1"),
        (compute_too_much, "I2"),
        (run_without_a_row, "I3"),
        (share_a_row, "I3"),
        (lie_about_status, "I3"),
        (hold_blocks_while_waiting, "I3"),
        (hold_back_one_that_waits, "I3"),
        (hold_back_one_that_runs, "I3"),
        (rewrite_shared_tokens, "I6"),
    ],
)
def test_damage_is_named(harness, damage, invariant):
    damage(*sequences(harness))
    with pytest.raises(IntegrityError, match=f"^{invariant}: ") as error:
        harness.scheduler.check_integrity()
    assert error.value.invariant == invariant


def test_a_leak_shows_once_all_are_gone(harness):
    harness.commit()
    harness.run()
    harness.scheduler.check_at_rest()
    harness.scheduler._kv.pool.take()
    with pytest.raises(IntegrityError, match="^I1: "):
        harness.scheduler.check_integrity()
    with pytest.raises(IntegrityError, match="^I7: nobody is left, but 0 rows, 1 blocks and 0"):
        harness.scheduler.check_at_rest()


def test_results_of_another_step_are_refused(harness):
    with pytest.raises(IntegrityError, match="expected step 1, got step 7"):
        harness.scheduler.commit(StepOutput(step_id=7, sampled=b""))


def test_results_without_a_step_in_flight_are_refused():
    with pytest.raises(IntegrityError, match="none in flight"):
        Harness().scheduler.commit(StepOutput(step_id=0, sampled=b""))


def test_results_of_the_wrong_length_are_refused(harness):
    with pytest.raises(IntegrityError, match="expected 2 tokens for step 1, got 1"):
        harness.scheduler.commit(StepOutput(step_id=1, sampled=pack_ints([1])))
