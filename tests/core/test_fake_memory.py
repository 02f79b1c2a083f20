"""The test double of memory and disk: it must see each kind of wrong copy."""

import pytest
from core.test_fake_runner import PROMPT, VOCAB_SIZE, make_step, row_added
from fake_memory import block_digest, root_digest
from fakes import FakeRunner, FakeStore, expected_tokens

from streamkv.protocol import Ask, CopyKind, StoredBlock, StoreOp, pack_ints, unpack_ints

BLOCK, OUT, IN = CopyKind.BLOCK, CopyKind.OUT, CopyKind.IN


@pytest.fixture
def runner() -> FakeRunner:
    """Row 0 has its prompt of three tokens and one sampled token, in block 2 of four places."""
    runner = FakeRunner(
        num_blocks=4, block_size=4, vocab_size=VOCAB_SIZE, num_host_slots=2, store=FakeStore()
    )
    added = row_added(0, PROMPT, [2])
    runner.step(make_step(0, added=[added], scheduled=[0, 0, 3, Ask.SAMPLE]))
    return runner


def copy_step(step_id, *copies, **changes):
    """A step that makes these copies."""
    return make_step(step_id, copies=[number for copy in copies for number in copy], **changes)


def told(output) -> tuple[list[int], list[int]]:
    return list(unpack_ints(output.copies_done)), list(unpack_ints(output.copies_failed))


def test_a_copied_block_is_read_like_its_source(runner):
    added = row_added(1, PROMPT, [0])
    step = copy_step(1, (7, BLOCK, 2, 0), added=[added], scheduled=[1, 2, 1, Ask.SAMPLE])
    output = runner.step(step)
    assert list(unpack_ints(output.sampled)) == expected_tokens(PROMPT, 1, VOCAB_SIZE)
    assert (told(output), runner.violations) == (([7], []), [])


def test_a_block_goes_out_and_in_again_though_its_place_has_a_new_owner(runner):
    added = row_added(1, [9], [2])
    changes = {"removed": [0], "added": [added], "scheduled": [1, 0, 1, Ask.SAMPLE]}
    assert told(runner.step(copy_step(1, (0, OUT, 2, 1), **changes))) == ([0], [])
    again = row_added(0, PROMPT, [3])
    changes = {"added": [again], "scheduled": [0, 2, 1, Ask.SAMPLE]}
    output = runner.step(copy_step(2, (1, IN, 1, 3), **changes))
    assert list(unpack_ints(output.sampled)) == expected_tokens(PROMPT, 1, VOCAB_SIZE)
    assert runner.violations == []


def test_copies_that_take_steps_are_told_of_later(runner):
    runner.memory.copy_delay = 2
    scheduled = [0, 3, 1, Ask.SAMPLE]
    assert told(runner.step(copy_step(1, (5, OUT, 2, 0), scheduled=scheduled))) == ([], [])
    scheduled = [0, 4, 1, Ask.SAMPLE]
    assert told(runner.step(make_step(2, appended=[0, 0], scheduled=scheduled))) == ([], [])
    assert told(runner.step(make_step(3, scheduled=[0, 5, 1, Ask.SAMPLE]))) == ([5], [])
    assert told(runner.step(copy_step(4, (6, OUT, 2, 1)))) == ([6], [])  # no tokens: it waits


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([(0, BLOCK, 1, 3)], "BLOCK copy 0 reads 1, which was never written"),
        ([(0, IN, 1, 3)], "IN copy 0 reads 1, which was never written"),
        ([(0, OUT, 2, 2)], "OUT copy 0 from 2 to 2: no such place"),
        ([(0, IN, 2, 2)], "IN copy 0 from 2 to 2: no such place"),
        ([(0, OUT, 2, 0), (0, OUT, 2, 1)], "copy 0 is on its way already"),
    ],
)
def test_wrong_copies_are_seen(runner, copies, message):
    assert message in runner.step(copy_step(1, *copies)).error
    assert len(runner.violations) == 1


def test_a_slot_that_is_read_before_it_was_written_is_seen(runner):
    runner.memory.copy_delay = 1
    runner.step(copy_step(1, (0, OUT, 2, 0), scheduled=[0, 3, 1, Ask.SAMPLE]))
    assert "reads 0, which was never written" in runner.step(copy_step(2, (1, IN, 0, 3))).error


def test_a_block_that_is_used_before_its_copy_has_ended_is_seen(runner):
    runner.step(copy_step(1, (0, OUT, 2, 0)))
    runner.memory.copy_delay = 1
    added = row_added(1, [*PROMPT, 9], [3])
    changes = {"added": [added], "scheduled": [1, 3, 1, Ask.SAMPLE]}
    error = runner.step(copy_step(2, (1, IN, 0, 3), **changes)).error
    assert "at positions [-1, -1, -1, 3]" in error
    runner.step(make_step(3))
    assert "was written meanwhile" in runner.violations[-1]


def test_failed_copies_leave_nothing_and_the_rows_of_a_block_lost(runner):
    runner.memory.fails_copy = lambda number, kind: number % 2 == 1
    added = row_added(1, PROMPT, [0])
    changes = {"added": [added], "scheduled": [1, 2, 1, Ask.SAMPLE]}
    output = runner.step(copy_step(1, (1, BLOCK, 2, 0), (2, OUT, 2, 0), (3, OUT, 2, 1), **changes))
    assert (told(output), output.error) == (([2], [1, 3]), "")
    assert (runner.memory.slots[0].is_empty, runner.memory.slots[1].is_empty) == (False, True)


def test_a_failed_step_makes_no_copies_and_tells_of_none(runner):
    runner.fail_next = "broken"
    output = runner.step(copy_step(1, (1, OUT, 2, 0)))
    assert (told(output), output.error) == (([], []), "broken")
    assert runner.memory.slots[0].is_empty


# --- the store -----------------------------------------------------------------------------------

KEY = pack_ints([*PROMPT, expected_tokens(PROMPT, 1, VOCAB_SIZE)[0]])
STORED = StoredBlock(-1, block_digest(root_digest(""), KEY), root_digest(""), KEY)


@pytest.fixture
def store(runner) -> FakeStore:
    """Slot 0 holds a full block."""
    runner.step(make_step(1, scheduled=[0, 3, 1, Ask.SAMPLE]))
    runner.step(copy_step(2, (0, OUT, 2, 0)))
    return runner.store


def test_what_was_written_is_read_after_a_restart(store):
    results = []
    store.on_result(results.append)
    store.submit(StoreOp(0, 0, STORED, True))
    assert results == []
    store.deliver()
    (block,) = store.index()
    assert block == STORED._replace(record=results[0].record)
    runner = FakeRunner(num_blocks=4, block_size=4, num_host_slots=2, store=store)
    store.on_result(results.append)
    store.submit(StoreOp(0, 1, block, False))
    store.deliver()
    assert results[1].ok and runner.memory.slots[1].token_ids == unpack_ints(KEY)
    assert store.violations == []


def test_failures_and_drops_are_told_of(store):
    results = []
    store.on_result(results.append)
    store.submit(StoreOp(0, 0, STORED, True))
    store.deliver()
    (block,) = store.index()
    store.drop(block.record)
    store.fails = lambda op: op.number == 1
    for number in (1, 2):
        store.submit(StoreOp(number, 1, block, False))
    store.deliver()
    assert [(result.ok, result.dropped) for result in results[1:]] == [
        (False, (block.record,)),
        (False, ()),
    ]


def test_a_write_of_other_tokens_or_of_a_slot_that_changes_is_seen(store, runner):
    store.on_result(lambda result: None)
    store.submit(StoreOp(0, 1, STORED, True))
    assert "writes a slot that holds" in store.violations[0]
    store.submit(StoreOp(1, 0, STORED._replace(digest=b""), True))
    assert "another digest" in store.violations[1]
    runner.memory.slots[0].token_ids[0] = 9
    store.deliver()
    assert "was written meanwhile" in store.violations[2]
