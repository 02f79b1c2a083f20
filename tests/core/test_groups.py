"""The sequences of one request: the first computes the prompt, the others go on from there."""

import pytest
from core.harness import EOS, VOCAB_SIZE, Harness, rows
from fakes import expected_beams

from streamkv.core.scheduler import NO_TOKEN
from streamkv.core.sequence import SequenceStatus
from streamkv.errors import CapacityError, InvalidRequestError
from streamkv.protocol import CopyKind, FinishReason, Request, SamplingParams, unpack_ints

PROMPT = [5, 6, 7, 8, 9, 10]  # a block of four and half of one


def scheduled(output) -> list[tuple[int, int, int]]:
    """(choice, start, count) of each row."""
    return [(sequence.choice, start, count) for sequence, start, count in output.scheduled]


def test_the_prompt_is_computed_once_and_then_by_nobody():
    harness = Harness(block_size=4)
    sequences = harness.add(PROMPT, 4, n=3, temperature=1.0)
    assert scheduled(harness.schedule()) == [(0, 0, 6)]
    assert harness.scheduler.num_waiting == 2
    harness.commit()
    output = harness.schedule()
    assert scheduled(output) == [(0, 6, 1), (1, 5, 1), (2, 5, 1)]
    assert [copy.kind for copy in output.copies] == [CopyKind.BLOCK] * 2
    assert len({sequence.block_table[0] for sequence in sequences}) == 1
    assert len({sequence.block_table[1] for sequence in sequences}) == 3
    harness.commit()
    harness.run()
    assert harness.runner.num_computed_tokens == 6 + 2 + 3 * 3
    for sequence in sequences:
        harness.check_answer(sequence)


def test_a_prompt_that_is_cached_whole_starts_all_at_once():
    harness = Harness(block_size=4)
    harness.add_one(PROMPT, 1)
    harness.run()
    harness.add(PROMPT, 4, n=3, temperature=1.0)
    assert scheduled(harness.schedule()) == [(0, 5, 1), (1, 5, 1), (2, 5, 1)]
    harness.commit()
    harness.run()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_forks_do_not_depend_on_prefix_caching(depth, caching):
    harness = Harness(depth=depth, block_size=4, enable_prefix_caching=caching)
    for _ in range(2):
        sequences = harness.add(PROMPT, 6, n=4, temperature=1.0)
        num_before = harness.runner.num_computed_tokens
        harness.run()
        assert harness.runner.num_computed_tokens - num_before <= 6 + 4 * 6
        for sequence in sequences:
            harness.check_answer(sequence)
        assert sequences[0].num_cached_tokens == (
            5 if caching and sequences[0].key[0] > "r0" else 0
        )
    assert harness.scheduler.num_prefix_queries_tokens == (2 * len(PROMPT) if caching else 0)
    assert harness.scheduler.num_prefix_hit_tokens == (5 if caching else 0)


def test_rows_are_kept_for_those_who_wait_for_the_prompt():
    harness = Harness(max_num_seqs=3, max_num_batched_tokens=4)
    group = harness.add(PROMPT, 4, n=3)
    other = harness.add_one([1], 2)
    urgent = harness.add_one([2], 2, priority=-1)
    assert harness.schedule().admitted == [urgent]  # two rows are left, the group needs three
    harness.commit()
    harness.advance()
    assert harness.schedule().admitted == [group[0]]
    harness.commit()
    assert harness.schedule().admitted == []
    harness.commit()
    assert harness.schedule().admitted == group[1:]
    harness.commit()
    harness.run()
    harness.check_answer(other)


def test_blocks_are_kept_for_those_who_wait_for_the_prompt():
    harness = Harness(num_blocks=5, block_size=4, max_num_batched_tokens=4)
    group = harness.add(PROMPT, 1, n=3)
    other = harness.add_one([1, 2, 3, 4, 5], 1)
    harness.schedule()
    harness.commit()
    assert (harness.scheduler.num_free_blocks, other.status) == (4, SequenceStatus.WAITING)
    assert harness.schedule().admitted == []  # three are free, of which the others get two
    harness.commit()
    assert harness.schedule().admitted[:2] == group[1:]
    harness.commit()
    harness.run()
    harness.check_answer(other)


def test_more_sequences_than_rows_run_in_turns():
    harness = Harness(max_num_seqs=2)
    sequences = harness.add(PROMPT, 3, n=5, temperature=1.0)
    harness.run()
    for sequence in sequences:
        harness.check_answer(sequence)


def test_the_next_one_leads_if_the_first_is_gone_before_its_prompt_is_computed():
    harness = Harness(max_num_batched_tokens=4)
    first, second, third = harness.add(PROMPT, 3, n=3, temperature=1.0)
    harness.advance()
    harness.finish(first)
    harness.finish(third)
    assert scheduled(harness.schedule()) == [(1, 4, 2)]
    harness.commit()
    harness.run()
    harness.check_answer(second)


def test_a_leader_whose_step_fails_leaves_the_others_to_themselves():
    harness = Harness(depth=1)
    first, *others = harness.add(PROMPT, 3, n=3, temperature=1.0)
    harness.runner.fail_next = "no"
    harness.run()
    assert first.finish_reason is FinishReason.ERROR
    for sequence in others:
        assert sequence.finish_reason is FinishReason.LENGTH
        harness.check_answer(sequence)


def test_a_leader_that_ends_with_its_first_token_leaves_the_prompt_to_the_others():
    harness = Harness()
    harness.add(PROMPT, 1, n=3, temperature=1.0)
    assert scheduled(harness.schedule()) == [(0, 0, 6)]
    harness.commit()
    assert scheduled(harness.schedule()) == [(1, 5, 1), (2, 5, 1)]
    harness.commit()
    harness.run()


def test_who_waits_for_the_prompt_may_be_aborted():
    harness = Harness(max_num_batched_tokens=4)
    first, *others = harness.add(PROMPT, 3, n=3, temperature=1.0)
    harness.advance()
    for sequence in others:
        harness.finish(sequence)
    assert harness.scheduler.num_waiting == 0
    harness.run()
    harness.check_answer(first)


def test_a_group_is_preempted_as_a_whole_and_comes_back_the_first_one_first():
    harness = Harness(num_blocks=6, block_size=4)
    needy = harness.add_one(range(7), 6)
    group = harness.add([4, 5, 6, 7, 8], 6, n=3, temperature=1.0)
    while harness.scheduler.num_preemptions == 0:
        output = harness.schedule()
        harness.commit()
    assert output.preempted == group[::-1]
    assert [sequence for sequence, _, _ in output.scheduled] == [needy]
    assert [s.num_preemptions for s in group] == [1, 1, 1]
    admitted = []
    while len(admitted) < 3:
        output = harness.schedule()
        admitted += output.admitted
        harness.commit()
    assert admitted == group
    harness.run()
    for sequence in group:
        harness.check_answer(sequence)


def test_the_only_group_takes_from_its_own_last_sequence():
    harness = Harness(num_blocks=7, block_size=2)
    sequences = harness.add([4, 5, 6], 11, n=3, temperature=1.0)
    preempted = []
    while harness.scheduler.has_work:
        preempted += harness.schedule().preempted
        harness.commit()
    assert preempted[0] is sequences[2]
    assert sequences[0] not in preempted
    for sequence in sequences:
        harness.check_answer(sequence)


def test_all_candidates_of_best_of_are_computed_with_their_logprobs():
    harness = Harness()
    sequences = harness.add(PROMPT, 3, n=1, best_of=3, temperature=1.0)
    events = harness.run()
    assert {event.sequence.choice for event in events} == {0, 1, 2}
    assert all(event.logprobs is not None for event in events)
    for sequence in sequences:
        harness.check_answer(sequence)


# --- beams ---------------------------------------------------------------------------------------


def beams(harness: Harness, prompt=PROMPT, max_tokens=6, **sampling):
    return harness.add(prompt, max_tokens, use_beam_search=True, **sampling)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 1},
        {"n": 4},
        {"n": 2, "best_of": 4, "length_penalty": 0.0},
        {"n": 3, "early_stopping": True},
        {"n": 3, "early_stopping": "never", "stop_token_ids": (7, 8)},
    ],
)
def test_beams_have_the_oracles_answers(sampling, block_size, depth):
    harness = Harness(depth=depth, block_size=block_size, eos_token_ids=frozenset({EOS}))
    sequences = beams(harness, **sampling)
    other = harness.add_one([1, 2], 9)
    events = harness.run()
    assert len(sequences) == sampling["n"]
    for sequence in sequences:
        harness.check_answer(sequence)
        own = [event for event in events if event.sequence is sequence]
        assert [event.token_id for event in own] == sequence.output_token_ids
        assert all(event.logprobs is not None for event in own)
        assert (sequence.stop_reason in (7, 8)) == (sequence.output_token_ids[-1] in (7, 8))
    harness.check_answer(other)


def test_beams_fork_from_one_prompt_and_share_what_they_have_in_common():
    harness = Harness(block_size=4)
    beams(harness, list(range(8)), 4, n=3)
    assert scheduled(harness.schedule()) == [(0, 0, 8)]
    harness.commit()
    output = harness.schedule()
    assert scheduled(output) == [(0, 8, 1), (1, 8, 1), (2, 8, 1)]
    assert output.copies == []  # the prompt ends with a block
    assert harness.scheduler.num_held_blocks == 2 + 3
    harness.commit()
    harness.run()


def test_a_shared_block_is_copied_before_the_first_write_and_not_for_the_last_beam():
    harness = Harness(block_size=4)
    beams(harness, PROMPT, 4, n=3)
    harness.advance()
    output = harness.schedule()
    assert [copy.kind for copy in output.copies] == [CopyKind.BLOCK] * 2
    assert harness.scheduler.num_held_blocks == 1 + 3
    added = [row.row for row in output.step.added]  # with other tokens, or another table
    assert len(set(added)) == 3 and set(unpack_ints(output.step.removed)) < set(added)
    harness.commit()
    harness.run()


def test_a_beam_that_goes_on_in_place_sends_nothing_but_its_position():
    harness = Harness(block_size=16)
    beams(harness, PROMPT, 6, n=1)
    harness.advance()
    step = harness.schedule().step
    assert (step.added, step.appended, rows(step)) == ((), b"", [(0, 6, 1, 1)])
    harness.commit()
    harness.run()


def test_beams_are_not_run_ahead():
    harness = Harness(depth=1)
    beams(harness, n=2)
    assert harness.schedule() is not None
    assert harness.schedule() is None
    harness.commit()
    assert scheduled(harness.schedule()) == [(0, 6, 1), (1, 6, 1)]
    assert harness.schedule() is None
    harness.run()


def test_rows_are_kept_for_beams_that_begin_later():
    harness = Harness(max_num_seqs=4)
    sequences = beams(harness, n=3, max_tokens=3)
    others = [harness.add_one([token], 3) for token in range(2)]
    assert harness.schedule().admitted == [sequences[0], others[0]]
    harness.commit()
    assert harness.scheduler.num_running == 4
    harness.run()
    for sequence in (*sequences, *others):
        harness.check_answer(sequence)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("depth", [0, 1])
def test_beams_are_preempted_together_and_choose_the_same(depth, mode):
    harness = Harness(
        depth=depth, num_blocks=8, block_size=2, num_host_slots=16, preemption_mode=mode
    )
    harness.add_one([1, 2, 3], 12)
    sequences = beams(harness, [4, 5, 6], 5, n=2)
    harness.run()
    assert harness.scheduler.num_preemptions >= 2
    assert (harness.scheduler.num_swaps > 0) == (mode == "swap")
    for sequence in sequences:
        harness.check_answer(sequence)


def test_beams_that_just_fit_run_alone_in_the_whole_pool():
    """Whatever is left of their blocks when some of them come back after the others."""
    harness = Harness(num_blocks=10, block_size=2)
    sequences = beams(harness, [4, 5, 6], 6, n=2)
    others = [harness.add_one([token] * 3, 9) for token in range(3)]
    sequences += beams(harness, [5, 5, 6], 6, n=2)
    harness.run()
    for sequence in (*sequences, *others):
        harness.check_answer(sequence)


def test_to_end_one_beam_is_to_end_all():
    harness = Harness(depth=1)
    sequences = beams(harness, n=2, best_of=3)
    for _ in range(2):
        harness.advance()
    harness.fill()
    harness.finish(sequences[1])
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (0, 0)
    assert harness.run() == []
    assert [s.finish_reason for s in sequences] == [FinishReason.ABORT] * 2


def test_beams_fail_together_and_those_with_events_are_told_once():
    harness = Harness(depth=1)
    sequences = beams(harness, n=2, best_of=3)
    other = harness.add_one([1], 9)
    harness.advance()
    harness.advance()
    harness.runner.broken_token_ids = frozenset(PROMPT)
    events = [event for event in harness.advance() if event.sequence is not other]
    assert [(e.sequence, e.finish_reason) for e in events] == [
        (sequence, FinishReason.ERROR) for sequence in sequences
    ]
    harness.run()
    harness.check_answer(other)


def test_what_a_failed_step_should_have_computed_for_beams_is_not_cached():
    harness = Harness(block_size=4)
    sequences = beams(harness, [5], 6, n=3)
    harness.advance()
    answers = [sequence.token_ids.tolist() for sequence in sequences]
    harness.runner.fail_next = "no"
    assert len(harness.advance()) == 3
    again = [harness.add_one([*answer, 1], 2) for answer in answers]
    harness.run()
    for sequence in again:
        assert sequence.num_cached_tokens <= 1
        harness.check_answer(sequence)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("vocab_size", "max_tokens", "stop_token_ids", "num_answers"),
    [(3, 1, (), 3), (2, 2, (), 4), (2, 5, (0, 1), 2), (1, 1, (), 1)],
)
def test_choices_without_an_answer_end_too(
    vocab_size, max_tokens, stop_token_ids, num_answers, depth
):
    harness = Harness(depth=depth, vocab_size=vocab_size)
    sequences = beams(harness, n=5, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
    other = harness.add_one([1, 2], 9)
    ends = [e for e in harness.run() if e.finish_reason is not None and e.sequence is not other]
    assert [event.sequence for event in ends] == sequences
    missing = [(event.token_id, event.finish_reason) for event in ends[num_answers:]]
    assert missing == [(NO_TOKEN, FinishReason.STOP)] * (5 - num_answers)
    for place, sequence in enumerate(sequences):
        harness.check_answer(sequence)
        assert (sequence.output_token_ids == []) == (place >= num_answers)


def test_answers_are_taken_in_pieces_while_others_go_on():
    harness = Harness(answers_at_once=2)
    first, second = beams(harness, max_tokens=5, n=2), beams(harness, [1, 2], 5, n=2)
    events = []
    while not harness.scheduler.has_answers:
        events += harness.advance()
    assert harness.scheduler.num_held_blocks == 0
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (0, 0)
    other = harness.add_one([1], 4)
    while harness.scheduler.has_answers:
        events += harness.advance()
    of_beams = [event for event in events if event.sequence is not other]
    assert [e.sequence.group for e in of_beams[:6:2]] == [
        one[0].group for one in (first, second, first)
    ]
    for sequence in (*first, *second):
        harness.check_answer(sequence)
        own = [event.token_id for event in of_beams if event.sequence is sequence]
        assert own == sequence.output_token_ids
    harness.run()
    harness.check_answer(other)


def test_of_answers_that_nobody_wants_any_more_the_rest_is_dropped():
    harness = Harness(answers_at_once=3)
    first, second = beams(harness, max_tokens=5, n=2), beams(harness, [1, 2], 5, n=2)
    while harness.live.keys() >= {*first, *second}:
        harness.advance()
    harness.finish(first[1])
    harness.finish(first[0])
    events = harness.run()
    assert {event.sequence for event in events} <= {*second}
    for sequence in second:
        harness.check_answer(sequence)


def beam_request(width: int, num_prompt_tokens: int = 6, max_tokens: int = 6) -> Request:
    return Request(
        request_id="r",
        model="m",
        prompt_token_ids=tuple(range(num_prompt_tokens)),
        sampling=SamplingParams(n=1, best_of=width, use_beam_search=True),
        seed=0,
        max_tokens=max_tokens,
    )


def test_more_beams_than_rows_are_refused():
    scheduler = Harness(max_num_seqs=4).scheduler
    scheduler.check_admissible(beam_request(4))
    with pytest.raises(InvalidRequestError) as error:
        scheduler.add(beam_request(5))
    assert str(error.value) == (
        "best_of: expected at most 4 beams, as many as sequences run at once, got 5; "
        "ask for fewer, or start with a higher --max-num-seqs"
    )
    assert (error.value.param, error.value.code) == ("best_of", None), "KV memory isn't the matter"


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "most", "flags"),
    [
        (9, 4, 4, "--max-num-batched-tokens"),
        (4, 9, 4, "--max-num-seqs"),
        (4, 3, 3, "--max-num-seqs and --max-num-batched-tokens"),
    ],
)
def test_what_keeps_beams_from_running_at_once_is_named(
    max_num_seqs, max_num_batched_tokens, most, flags
):
    scheduler = Harness(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    ).scheduler
    with pytest.raises(
        InvalidRequestError, match=f"at most {most} beams, .* with a higher {flags}$"
    ):
        scheduler.add(beam_request(5))


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize(
    ("width", "num_prompt_tokens", "max_tokens"),
    [(2, 30, 1), (5, 4, 1), (2, 15, 2), (3, 8, 2), (4, 6, 2), (2, 1, 6), (1, 4, 5)],
)
def test_beams_that_fit_to_the_last_block_run_and_with_one_less_are_refused(
    width, num_prompt_tokens, max_tokens, block_size
):
    num_full, num_computed = num_prompt_tokens // block_size, num_prompt_tokens + max_tokens - 1
    num_blocks = num_full + width * (-(-num_computed // block_size) - num_full)
    if max_tokens == 1:  # the prompt's row has all answers
        num_blocks = -(-num_prompt_tokens // block_size)
    prompt = [5] * num_prompt_tokens
    if num_blocks > 1:
        with pytest.raises(CapacityError, match=f"needs {num_blocks} .* has {num_blocks - 1} "):
            beams(
                Harness(num_blocks=num_blocks - 1, block_size=block_size),
                prompt,
                max_tokens,
                n=width,
            )
    harness = Harness(num_blocks=num_blocks, block_size=block_size)
    for _ in range(2):  # the second finds the prompt cached
        sequences = beams(harness, prompt, max_tokens, n=width)
        most = 0
        while harness.scheduler.has_work:
            harness.fill()
            most = max(most, harness.scheduler.num_held_blocks)
            harness.commit()
        assert most == num_blocks
        for sequence in sequences:
            harness.check_answer(sequence)


def test_beams_that_do_not_fit_at_full_length_are_refused():
    scheduler = Harness(num_blocks=7, block_size=4).scheduler  # one block shared, two for each beam
    scheduler.check_admissible(beam_request(3))
    with pytest.raises(CapacityError) as error:
        scheduler.add(beam_request(4))
    assert str(error.value).startswith(
        "best_of: a search with 4 beams needs 9 KV blocks of 4 tokens (6 in the prompt, max_tokens "
        "6), the pool has 7 (28 tokens); lower best_of, shorten the prompt, lower max_tokens, or "
    )
    assert (error.value.param, error.value.code) == ("best_of", "kv_capacity_exceeded")


def test_candidates_come_from_the_context_that_was_read():
    """So the oracle of beams sees a beam that reads the blocks of another one."""
    harness = Harness(block_size=1)
    first, second = beams(harness, [1, 2], 4, n=2)
    harness.run()
    expected = expected_beams([1, 2], 4, VOCAB_SIZE, width=2, num_return=2)
    assert [first.output_token_ids, second.output_token_ids] == expected
    assert len({tuple(answer) for answer in expected}) == 2
