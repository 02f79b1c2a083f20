"""The test double itself: it must see each kind of wrong step."""

import threading
from collections.abc import Iterable

import pytest
from core.harness import Harness
from fakes import FakeRunner, expected_tokens, fake_logprobs

from streamkv.protocol import (
    Ask,
    Request,
    RowAdded,
    RowSampling,
    SamplingParams,
    StepInput,
    pack_ints,
    unpack_ints,
)

VOCAB_SIZE = 20
PROMPT = [1, 2, 3]


def row_added(
    row: int,
    token_ids: list[int],
    block_ids: list[int],
    *,
    mask_slots: tuple[int, ...] = (),
    bad_words: Iterable[list[int]] = (),
    **sampling,
) -> RowAdded:
    request = Request(
        request_id="r",
        model="m",
        prompt_token_ids=(),
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
        seed=1,
        max_tokens=1,
        mask_slots=mask_slots,
        bad_words=tuple(tuple(word) for word in bad_words),
    )
    return RowAdded(
        row=row,
        num_prompt_tokens=len(token_ids),
        token_ids=pack_ints(token_ids),
        block_ids=pack_ints(block_ids),
        sampling=RowSampling.build(request, ()).of_choice(0, *mask_slots),
    )


def make_step(step_id, *, removed=(), added=(), appended=(), scheduled=(), copies=()) -> StepInput:
    return StepInput(
        step_id=step_id,
        removed=pack_ints(removed),
        added=tuple(added),
        appended=pack_ints(appended),
        scheduled=pack_ints(scheduled),
        copies=pack_ints(copies),
    )


@pytest.fixture
def runner() -> FakeRunner:
    """Row 0 has its prompt of three tokens and one sampled token, in one block of four."""
    runner = FakeRunner(num_blocks=4, block_size=4, vocab_size=VOCAB_SIZE)
    added = row_added(0, PROMPT, [2])
    output = runner.step(make_step(0, added=[added], scheduled=[0, 0, 3, Ask.SAMPLE]))
    assert list(unpack_ints(output.sampled)) == expected_tokens(PROMPT, 1, VOCAB_SIZE)
    return runner


def test_it_goes_on_from_the_token_it_sampled_itself(runner):
    first = runner.step(make_step(1, scheduled=[0, 3, 1, Ask.SAMPLE]))
    second = runner.step(make_step(2, appended=[0, 1], scheduled=[0, 4, 1, Ask.SAMPLE]))
    assert runner.violations == []
    sampled = [unpack_ints(output.sampled)[0] for output in (first, second)]
    assert sampled == expected_tokens(PROMPT, 3, VOCAB_SIZE)[1:]


def test_a_block_of_another_row_changes_what_it_reads(runner):
    runner.step(make_step(1, added=[row_added(1, [7, 7], [2])], scheduled=[1, 0, 2, Ask.SAMPLE]))
    output = runner.step(make_step(2, scheduled=[0, 3, 1, Ask.SAMPLE]))
    assert "row 0 wants tokens [1, 2, 3," in output.error
    assert len(runner.violations) == 1


def test_a_prefix_that_was_never_written_is_seen(runner):
    step = make_step(1, added=[row_added(1, [1, 2, 3, 4, 5], [3, 1])], scheduled=[1, 4, 1, 1])
    assert "at positions [-1, -1, -1, -1, 4]" in runner.step(step).error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"removed": [5]}, "row 5 is removed but not there"),
        ({"added": [row_added(0, PROMPT, [1])]}, "row 0 is added but taken"),
        ({"appended": [0, 4]}, "block 4 is appended but doesn't exist"),
        ({"appended": [5, 1]}, "row 5 gets block 1 but isn't there"),
        ({"scheduled": [5, 0, 1, 1]}, "row 5 is scheduled but not there"),
        ({"scheduled": [0, 3, 2, 0]}, "scheduled are 3+2"),
        ({"scheduled": [0, 0, 0, 0]}, "scheduled are 0+0"),
        ({"scheduled": [0, 0, 3, Ask.SAMPLE]}, "has 4 tokens and 4 slots, scheduled are 0+3"),
    ],
)
def test_wrong_changes_are_seen(runner, changes, message):
    output = runner.step(make_step(1, **changes))
    assert message in output.error
    assert len(runner.violations) == 1


def test_a_step_out_of_order_is_seen(runner):
    assert "expected step 1, got step 3" in runner.step(make_step(3)).error


def test_a_step_fails_when_told_to_and_the_next_one_may_still_name_its_rows(runner):
    runner.fail_next = "broken"
    assert runner.step(make_step(1, scheduled=[0, 3, 1, 1])).error == "broken"
    output = runner.step(make_step(2, appended=[0, 1], scheduled=[0, 4, 1, 1]))
    assert (output.error, runner.violations) == ("", [])
    assert len(unpack_ints(output.sampled)) == 1


def test_rows_with_a_broken_token_fail_alone(runner):
    runner.broken_token_ids = frozenset((7,))
    changes = {"added": [row_added(1, [7], [1])], "scheduled": [1, 0, 1, 1, 0, 3, 1, 1]}
    output = runner.step(make_step(1, **changes))
    assert list(unpack_ints(output.failed)) == [0]
    assert unpack_ints(output.sampled)[1] == expected_tokens(PROMPT, 2, VOCAB_SIZE)[1]
    assert (output.error, runner.violations) == ("", [])


def test_a_crash_is_raised(runner):
    runner.crash_next = RuntimeError("segfault")
    with pytest.raises(RuntimeError, match="segfault"):
        runner.step(make_step(1))


def test_avoided_tokens_never_come():
    avoid = range(1, VOCAB_SIZE)
    assert expected_tokens(PROMPT, 5, VOCAB_SIZE, avoid=avoid) == [0] * 5


def test_end_tokens_are_masked_until_min_tokens():
    plain = expected_tokens(PROMPT, 6, VOCAB_SIZE)
    harness = Harness(eos_token_ids=frozenset())
    (sequence,) = harness.add(PROMPT, 6, stop_token_ids=range(20), min_tokens=4)
    harness.run()
    harness.check_answer(sequence)
    assert all(token_id >= 20 for token_id in sequence.output_token_ids[:4])
    assert any(token_id < 20 for token_id in plain)


def test_the_gate_holds_each_step():
    gate = threading.Semaphore(0)
    runner = FakeRunner(gate=gate, vocab_size=VOCAB_SIZE)
    outputs = []
    done = threading.Event()

    def work() -> None:
        outputs.append(runner.step(make_step(0)))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert outputs == []
    gate.release()
    assert done.wait(30)
    thread.join(30)
    assert outputs[0].error == ""


def test_logprobs_are_those_of_the_sampled_token():
    runner = FakeRunner(vocab_size=VOCAB_SIZE)
    added = row_added(0, PROMPT, [0], logprobs=3)
    output = runner.step(make_step(0, added=[added], scheduled=[0, 0, 3, Ask.SAMPLE]))
    (token_id,) = unpack_ints(output.sampled)
    assert output.logprobs == (fake_logprobs(token_id, 3, VOCAB_SIZE),)
    assert unpack_ints(output.logprobs[0].top_ids)[0] == token_id


def test_the_most_likely_tokens_are_as_many_as_there_are():
    assert len(unpack_ints(fake_logprobs(3, 50, VOCAB_SIZE).top_ids)) == VOCAB_SIZE


def test_load_reports_progress_and_may_fail():
    stages = []
    assert FakeRunner().load(lambda *stage: stages.append(stage)).num_blocks == 64
    assert stages == [("loading weights", 0.5), ("loading weights", 1.0)]
    with pytest.raises(ValueError, match="no weights"):
        FakeRunner(load_error=ValueError("no weights")).load(lambda *stage: None)
