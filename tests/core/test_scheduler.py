"""What the scheduler decides, at overlap depth 0."""

import gc
import sys

import pytest
from core.harness import EOS, Harness, rows

from streamkv.core.sequence import SequenceStatus
from streamkv.errors import CapacityError, ContextLengthError, InvalidRequestError
from streamkv.protocol import Ask, FinishReason, Request, SamplingParams, unpack_ints

SAMPLE, NONE = Ask.SAMPLE, Ask.NONE


def test_one_request_gets_the_oracles_answer_and_leaves_nothing_behind():
    harness = Harness()
    sequence = harness.add_one([5, 6, 7, 8, 9], 6)
    events = harness.run()
    assert [event.token_id for event in events] == harness.oracle(sequence)
    assert [event.finish_reason for event in events] == [None] * 5 + [FinishReason.LENGTH]
    assert sequence.output_token_ids == harness.oracle(sequence)
    assert harness.scheduler.num_free_blocks == 64


def test_nothing_to_do_is_no_step():
    harness = Harness()
    assert harness.schedule() is None
    assert not harness.scheduler.has_work


def test_a_long_prompt_goes_in_chunks_and_asks_for_a_token_only_at_its_end():
    harness = Harness(max_num_batched_tokens=4)
    harness.add_one(range(10), 2)
    steps = []
    while harness.scheduler.has_work:
        steps.append(rows(harness.schedule().step))
        harness.commit()
    assert steps == [
        [(0, 0, 4, NONE)],
        [(0, 4, 4, NONE)],
        [(0, 8, 2, SAMPLE)],
        [(0, 10, 1, SAMPLE)],
    ]


def test_decodes_and_a_prompt_chunk_share_the_budget():
    harness = Harness(max_num_batched_tokens=6)
    harness.add_one([1], 5)
    harness.add_one([2], 5)
    harness.advance()
    harness.add_one(range(9), 5)
    assert rows(harness.schedule().step) == [
        (0, 1, 1, SAMPLE),
        (1, 1, 1, SAMPLE),
        (2, 0, 4, NONE),
    ]


def test_a_more_important_prompt_leaves_each_running_row_its_token():
    harness = Harness(max_num_batched_tokens=4)
    harness.add_one([1], 8, priority=1)
    harness.add_one([2], 8, priority=1)
    harness.advance()
    harness.add_one(range(12), 5, priority=0)
    for _ in range(3):
        counts = [count for _, _, count in harness.schedule().scheduled]
        assert sorted(counts) == [1, 1, 2]
        harness.commit()


def test_waiting_requests_come_by_priority_then_arrival():
    harness = Harness(max_num_seqs=1)
    first = harness.add_one([1], 1, priority=1)
    second = harness.add_one([2], 1, priority=1)
    urgent = harness.add_one([3], 1, priority=0)
    order = []
    while harness.scheduler.has_work:
        order += harness.schedule().admitted
        harness.commit()
    assert order == [urgent, first, second]


def test_nobody_overtakes_the_head_of_the_queue():
    harness = Harness(num_blocks=6, block_size=4)
    harness.add_one(range(12), 8)
    harness.advance()
    big = harness.add_one(range(1, 17), 4)
    small = harness.add_one([9], 1)
    output = harness.schedule()
    assert output.admitted == []
    assert (big.status, small.status) == (SequenceStatus.WAITING,) * 2
    harness.commit()
    harness.run()


def test_a_prompt_is_admitted_only_if_the_whole_of_it_fits_now():
    harness = Harness(num_blocks=4, block_size=4, max_num_batched_tokens=4)
    runner_up = harness.add_one(range(8), 4)
    harness.advance()
    harness.advance()
    later = harness.add_one(range(10, 19), 4)  # needs 3 blocks, 2 are free
    assert harness.schedule().admitted == []
    harness.commit()
    harness.finish(runner_up)
    assert harness.schedule().admitted == [later]


def test_out_of_blocks_the_latest_sequence_is_preempted_and_recomputed():
    harness = Harness(num_blocks=4, block_size=2)
    first = harness.add_one([1, 2, 3], 5)
    second = harness.add_one([4, 5, 6], 5)
    preempted = []
    while harness.scheduler.has_work:
        output = harness.schedule()
        if output.preempted:
            assert output.admitted == []
        preempted += output.preempted
        harness.commit()
    assert preempted[0] is second
    assert first not in preempted
    assert harness.scheduler.num_preemptions == len(preempted) == second.num_preemptions
    harness.check_answer(first)
    harness.check_answer(second)


def test_the_least_important_sequence_is_preempted_first():
    harness = Harness(num_blocks=4, block_size=2)
    minor = harness.add_one([1, 2, 3], 5, priority=1)
    harness.advance()
    major = harness.add_one([4, 5, 6], 5)
    harness.run()
    assert (minor.num_preemptions > 0, major.num_preemptions) == (True, 0)
    harness.check_answer(minor)


def test_a_sequence_with_none_behind_it_keeps_its_blocks_and_sits_out():
    harness = Harness(num_blocks=4, block_size=2, enable_prefix_caching=False)
    first = harness.add_one([1, 2, 3], 2)
    second = harness.add_one([4, 5, 6, 7], 4)
    harness.advance()
    assert len(first.block_table) == len(second.block_table) == 2
    output = harness.schedule()  # the second needs a third block, and there is none behind it
    assert [sequence for sequence, _, _ in output.scheduled] == [first]
    assert (len(second.block_table), second.status) == (2, SequenceStatus.RUNNING)
    harness.commit()
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    harness.check_answer(second)


def test_nobody_is_admitted_in_a_step_that_preempted():
    harness = Harness(num_blocks=5, block_size=2, max_num_seqs=2)
    first, second = harness.add_one([1, 2, 3], 5), harness.add_one([4, 5, 6, 7, 8, 9], 4)
    harness.advance()
    urgent = harness.add_one([7], 2, priority=-1)
    assert harness.schedule().preempted == []
    harness.commit()
    output = harness.schedule()
    assert (output.preempted, output.admitted) == ([second], [])
    assert harness.scheduler.num_free_blocks == 2
    harness.commit()
    assert harness.schedule().admitted == [urgent]
    harness.commit()
    harness.run()
    for sequence in (first, second, urgent):
        harness.check_answer(sequence)


def test_a_full_pool_of_partial_prompts_comes_to_an_end():
    harness = Harness(num_blocks=8, block_size=2, max_num_seqs=4, max_num_batched_tokens=4)
    sequences = [harness.add_one([token] * 11, 5, priority=3 - token) for token in range(3)]
    harness.schedule()
    harness.commit()
    sequences += [harness.add_one([token] * 11, 5, priority=-token) for token in range(3, 6)]
    harness.run()
    for sequence in sequences:
        harness.check_answer(sequence)


def test_the_largest_admissible_request_runs_alone_in_the_whole_pool():
    harness = Harness(num_blocks=3, block_size=4, max_num_batched_tokens=3)
    sequence = harness.add_one(range(5), 8)
    harness.run()
    harness.check_answer(sequence)
    assert sequence.num_output_tokens == 8


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(1, 1), (4, 1), (3, 2), (5, 8)])
def test_what_fits_to_the_last_block_runs_and_with_one_less_is_refused(
    num_prompt_tokens, max_tokens, block_size
):
    num_blocks = -(-(num_prompt_tokens + max_tokens - 1) // block_size)
    prompt = range(num_prompt_tokens)
    if num_blocks > 1:
        with pytest.raises(
            CapacityError, match=f" needs {num_blocks} KV blocks .* has {num_blocks - 1} "
        ):
            Harness(num_blocks=num_blocks - 1, block_size=block_size).add_one(prompt, max_tokens)
    harness = Harness(num_blocks=num_blocks, block_size=block_size)
    for _ in range(2):  # of what the first leaves, the second finds the most
        sequence = harness.add_one(prompt, max_tokens)
        most = 0
        while harness.scheduler.has_work:
            harness.fill()
            most = max(most, harness.scheduler.num_held_blocks)
            harness.commit()
        assert most == num_blocks
        harness.check_answer(sequence)


def make_request(num_prompt_tokens: int, max_tokens: int) -> Request:
    return Request(
        request_id="r",
        model="m",
        prompt_token_ids=tuple(range(num_prompt_tokens)),
        sampling=SamplingParams(),
        seed=0,
        max_tokens=max_tokens,
    )


def test_a_request_that_could_never_fit_is_refused_with_the_numbers_and_the_remedy():
    scheduler = Harness(num_blocks=3, block_size=4).scheduler
    scheduler.check_admissible(make_request(5, 8))  # of 13 tokens, the last is not computed
    with pytest.raises(CapacityError) as error:
        scheduler.add(make_request(5, 9))
    assert str(error.value) == (
        "max_tokens: the request needs 4 KV blocks of 4 tokens (5 in the prompt, max_tokens 9), "
        "the pool has 3 (12 tokens); shorten the prompt, lower max_tokens, or start with more KV "
        "memory: by --num-gpu-blocks-override where that is given, else by "
        "--kv-cache-memory-bytes or --gpu-memory-utilization"
    )
    assert (error.value.param, error.value.code) == ("max_tokens", "kv_capacity_exceeded")
    assert not scheduler.has_work


def test_a_request_beyond_the_context_is_refused():
    scheduler = Harness(num_blocks=64, max_model_len=16).scheduler
    with pytest.raises(ContextLengthError, match="at most 16 tokens of context, got 17"):
        scheduler.check_admissible(make_request(10, 7))


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(0, 1), (1, 0)])
def test_a_request_for_nothing_is_refused(num_prompt_tokens, max_tokens):
    with pytest.raises(InvalidRequestError, match="expected at least one token, got 0"):
        Harness().scheduler.add(make_request(num_prompt_tokens, max_tokens))


def find_prompt(harness: Harness, **sampling) -> list[int]:
    """A prompt whose answer meets an end token after its first and before its last token."""
    for first in range(200):
        (sequence,) = Harness(eos_token_ids=harness.eos_token_ids).add([first], 8, **sampling)
        if 1 < len(harness.oracle(sequence)) < 8:
            return [first]
    raise AssertionError("no such prompt")


def test_the_end_token_is_delivered_and_ends_the_sequence_without_a_stop_reason():
    harness = Harness(eos_token_ids=frozenset({EOS}))
    sequence = harness.add_one(find_prompt(harness), 8)
    events = harness.run()
    assert (events[-1].token_id, events[-1].finish_reason) == (EOS, FinishReason.STOP)
    assert sequence.stop_reason is None
    harness.check_answer(sequence)


def test_a_stop_token_id_is_the_stop_reason():
    harness = Harness()
    stop_token_ids = (8, 9, 10)
    prompt = find_prompt(harness, stop_token_ids=stop_token_ids)
    (sequence,) = harness.add(prompt, 8, stop_token_ids=stop_token_ids)
    events = harness.run()
    assert events[-1].finish_reason is FinishReason.STOP
    assert sequence.stop_reason == sequence.token_ids[-1] in stop_token_ids


def test_an_ignored_end_token_is_a_token_like_others():
    harness = Harness(eos_token_ids=frozenset({EOS}))
    (sequence,) = harness.add(find_prompt(harness), 8, ignore_eos=True)
    harness.run()
    assert EOS in sequence.output_token_ids
    assert sequence.finish_reason is FinishReason.LENGTH


def test_the_choices_of_a_request_are_sequences_of_their_own():
    harness = Harness()
    sequences = harness.add([1, 2, 3], 6, n=3, temperature=1.0, seed=7)
    harness.run()
    assert [sequence.key[1] for sequence in sequences] == [0, 1, 2]
    assert len({tuple(sequence.output_token_ids) for sequence in sequences}) == 3
    for sequence in sequences:
        harness.check_answer(sequence)


def test_a_decode_step_carries_changes_only():
    harness = Harness(block_size=4)
    harness.add_one([1, 2], 6)
    harness.advance()
    sizes = []
    for _ in range(5):
        step = harness.schedule().step
        assert step.added == () and step.removed == b""
        sizes.append(len(step.appended))
        harness.commit()
    assert sizes == [0, 0, 8, 0, 0]  # one (row, block) at position 4


def test_low_rows_are_used_again_and_announced_as_removed_first():
    harness = Harness(max_num_seqs=2)
    harness.add_one([1], 1)
    harness.add_one([2], 9)
    harness.advance()
    harness.add_one([3], 1)
    step = harness.schedule().step
    assert list(unpack_ints(step.removed)) == [0]
    assert [added.row for added in step.added] == [0]


def test_aborting_while_waiting_frees_nothing_and_is_idempotent():
    harness = Harness(max_num_seqs=1)
    running = harness.add_one([1], 4)
    waiting = harness.add_one([2], 4)
    harness.advance()
    num_free = harness.scheduler.num_free_blocks
    harness.finish(waiting)
    harness.finish(waiting, FinishReason.STOP)
    assert waiting.finish_reason is FinishReason.ABORT
    assert harness.scheduler.num_free_blocks == num_free
    assert harness.scheduler.num_waiting == 0
    harness.run()
    harness.check_answer(running)


def test_a_failed_step_ends_its_sequences_once_and_no_others():
    harness = Harness(max_num_seqs=2)
    first, second = harness.add_one([1], 4), harness.add_one([2], 4)
    harness.advance()
    waiting = harness.add_one([3], 4)
    harness.runner.fail_next = "kernel launch failed"
    events = harness.advance()
    assert [(e.sequence, e.token_id, e.finish_reason) for e in events] == [
        (first, -1, FinishReason.ERROR),
        (second, -1, FinishReason.ERROR),
    ]
    harness.run()
    harness.check_answer(waiting)
    assert waiting.finish_reason is FinishReason.LENGTH


def test_logprobs_come_with_their_token():
    harness = Harness()
    (sequence,) = harness.add([1], 3, logprobs=2)
    plain = harness.add_one([2], 3)
    for event in harness.run():
        if event.sequence is plain:
            assert event.logprobs is None
        else:
            assert unpack_ints(event.logprobs.top_ids)[0] == event.token_id


def count_calls(num_blocks: int) -> int:
    """Python calls in twenty decode steps."""
    harness = Harness(num_blocks=num_blocks, block_size=2, check_every=10**9)
    for token in range(8):
        harness.add_one([token, 1, 2], 40)
    harness.advance()
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # a collection calls whoever has asked to be told of it
    sys.setprofile(count)
    try:
        for _ in range(20):
            harness.advance()
    finally:
        sys.setprofile(None)
        gc.enable()
    return num_calls


def test_the_work_of_a_step_does_not_grow_with_the_pool():
    assert count_calls(200) == count_calls(20_000) > 0


def test_choices_share_their_prompt_until_they_are_admitted():
    harness = Harness(max_num_seqs=2)
    sequences = harness.add([5, 6, 7], 4, n=4, temperature=1.0)
    assert len({id(sequence.token_ids) for sequence in sequences}) == 1
    harness.advance()
    harness.schedule()
    first, second, third, fourth = (sequence.token_ids for sequence in sequences)
    assert first is not second and first is not third and second is not third
    assert third is fourth
    assert third.tolist() == [5, 6, 7]
