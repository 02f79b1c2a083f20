"""Sharing of computed prefixes between sequences."""

from core.harness import Harness, rows

from streamkv.protocol import CopyKind, FinishReason

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]  # two blocks of four


def test_a_prompt_that_is_cached_whole_computes_its_last_token_again():
    harness = Harness(block_size=4)
    harness.add_one([*PROMPT, 1], 4)
    harness.run()
    again = harness.add_one(PROMPT, 4)
    assert rows(harness.schedule().step) == [(0, 7, 1, 1)]
    assert again.num_cached_tokens == 7
    harness.commit()
    harness.run()
    harness.check_answer(again)


def test_a_block_that_begins_alike_is_copied_up_to_the_difference():
    harness = Harness(block_size=4)
    harness.add_one([*PROMPT, 1, 2, 3, 4], 1)
    harness.run()
    fork = harness.add_one([*PROMPT[:6], 1, 2, 3], 9)
    output = harness.schedule()
    assert rows(output.step) == [(0, 6, 3, 1)]
    assert [copy.kind for copy in output.copies] == [CopyKind.BLOCK]
    assert output.copies[0].target == fork.block_table[1]
    harness.commit()
    harness.run()
    harness.check_answer(fork)
    other = harness.add_one([*PROMPT, 1, 2, 9], 4)
    harness.run()
    assert other.num_cached_tokens == 10
    harness.check_answer(other)


def test_the_last_block_of_an_answer_is_found_though_it_is_not_full():
    harness = Harness(block_size=4)
    turn = harness.add_one(PROMPT, 3)
    harness.run()
    next_turn = harness.add_one([*turn.token_ids, 1, 2], 4)
    harness.run()
    assert next_turn.num_cached_tokens == len(turn.token_ids) - 1  # the last one was never computed
    harness.check_answer(next_turn)


def test_a_longer_prompt_shares_all_full_blocks():
    harness = Harness(block_size=4)
    harness.add_one(PROMPT, 1)
    harness.run()
    longer = harness.add_one([*PROMPT, 1, 2], 4)
    assert rows(harness.schedule().step) == [(0, 8, 2, 1)]
    assert longer.num_cached_tokens == 8
    harness.commit()
    harness.run()
    harness.check_answer(longer)
    scheduler = harness.scheduler
    assert (scheduler.num_prefix_queries_tokens, scheduler.num_prefix_hit_tokens) == (18, 8)


def test_an_answer_is_a_prefix_for_the_next_turn():
    harness = Harness(block_size=4)
    turn = harness.add_one(PROMPT, 9)
    harness.run()
    next_turn = harness.add_one([*turn.token_ids, 1, 2], 4)
    harness.run()
    assert next_turn.num_cached_tokens == 16
    harness.check_answer(next_turn)


def test_running_sequences_share_blocks_by_reference():
    harness = Harness(block_size=4)
    first = harness.add_one([*PROMPT, 1], 9)
    harness.advance()
    second = harness.add_one([*PROMPT, 2], 9)
    harness.advance()
    assert first.block_table[:2] == second.block_table[:2]
    assert harness.scheduler.num_held_blocks == 4
    harness.finish(first)
    harness.run()
    harness.check_answer(second)


def test_only_equal_salts_share():
    harness = Harness(block_size=4)
    harness.add([*PROMPT, 1], 2, cache_salt="tenant a")
    harness.run()
    (other,) = harness.add([*PROMPT, 1], 2, cache_salt="tenant b")
    (none,) = harness.add([*PROMPT, 1], 2)
    (same,) = harness.add([*PROMPT, 1], 2, cache_salt="tenant a")
    harness.run()
    assert [s.num_cached_tokens for s in (other, none, same)] == [0, 0, 8]


def test_a_block_is_published_only_after_its_step_was_committed():
    harness = Harness(depth=1, block_size=4)
    harness.add_one([*PROMPT, 1], 9)
    harness.schedule()
    early = harness.add_one([*PROMPT, 2], 9)
    harness.schedule()
    assert early.num_cached_tokens == 0
    harness.commit()
    late = harness.add_one([*PROMPT, 3], 9)
    harness.schedule()
    assert late.num_cached_tokens == 8
    harness.run()
    harness.check_answer(early)
    harness.check_answer(late)


def test_a_step_that_failed_publishes_nothing():
    harness = Harness(depth=1, block_size=4, max_num_batched_tokens=4)
    harness.add_one([*PROMPT, 1], 9)
    harness.schedule()
    harness.schedule()
    harness.runner.fail_next = "no"
    assert harness.commit()[0].finish_reason is FinishReason.ERROR
    harness.commit()  # succeeded, on top of a first chunk that was never computed
    again = harness.add_one([*PROMPT, 1], 9)
    harness.run()
    assert again.num_cached_tokens == 0
    harness.check_answer(again)


def test_a_step_that_failed_after_an_abort_publishes_nothing():
    harness = Harness(depth=1, block_size=4, max_num_batched_tokens=4)
    aborted = harness.add_one([*PROMPT, 1], 9)
    harness.fill()
    harness.finish(aborted)
    harness.runner.fail_next = "no"
    assert harness.commit() == []
    harness.commit()  # succeeded, on top of a first chunk that was never computed
    again = harness.add_one([*PROMPT, 1], 9)
    harness.run()
    assert again.num_cached_tokens == 0
    harness.check_answer(again)


def test_a_row_without_finite_logits_publishes_nothing():
    harness = Harness(depth=1, block_size=4)
    harness.add_one(PROMPT, 9)
    harness.fill()
    harness.runner.broken_token_ids = frozenset(PROMPT)
    assert harness.commit()[0].finish_reason is FinishReason.ERROR
    harness.runner.broken_token_ids = frozenset()
    harness.run()
    again = harness.add_one([*PROMPT, 1], 9)
    harness.run()
    assert again.num_cached_tokens == 0
    harness.check_answer(again)


def test_an_aborted_prompt_still_leaves_what_it_computed():
    harness = Harness(depth=1, block_size=4)
    aborted = harness.add_one([*PROMPT, 1], 9)
    harness.fill()
    harness.finish(aborted)
    harness.run()
    again = harness.add_one([*PROMPT, 1], 9)
    harness.run()
    assert again.num_cached_tokens == 8
    harness.check_answer(again)


def test_a_dropped_token_is_not_published():
    """The extra token of a stopped sequence was written into its block, but nobody knows it."""
    harness = Harness(depth=1, block_size=4)
    stopped = harness.add_one([1, 2], 9)
    harness.schedule()
    harness.schedule()
    harness.commit()
    harness.schedule()  # position 3 completes the first block; its token is in flight
    harness.finish(stopped, FinishReason.STOP)
    harness.run()
    assert stopped.num_output_tokens == 1
    dropped = harness.oracle(stopped)[1]
    again = harness.add_one([*stopped.token_ids, dropped, 1], 4)
    harness.run()
    assert again.num_cached_tokens == len(stopped.token_ids)
    harness.check_answer(again)


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    harness = Harness(num_blocks=4, block_size=4)
    harness.add_one([*PROMPT, 1, 1, 1, 1], 1)
    harness.run()
    harness.add_one([0] * 5, 1)  # takes the never published block and one cached one
    harness.run()
    again = harness.add_one([*PROMPT, 1, 1, 1, 1], 1)
    harness.run()
    assert again.num_cached_tokens == 8
    harness.check_answer(again)


def test_blocks_that_cache_nothing_are_taken_before_cached_ones():
    harness = Harness(num_blocks=3, block_size=4)
    harness.add_one([1, 1, 1, 1, 0], 1)
    harness.run()
    harness.runner.broken_token_ids = frozenset({2})
    for token in range(5):  # these fail, so nobody knows what is in their blocks
        harness.add_one([token, 2, 2], 1)
        harness.run()
    again = harness.add_one([1, 1, 1, 1, 0], 1)
    harness.run()
    assert again.num_cached_tokens == 4


def test_the_prefix_that_was_unused_for_longest_is_evicted_first():
    harness = Harness(num_blocks=4, block_size=4)
    old, new = [1] * 4, [2] * 4
    for prompt in (old, new, old):
        harness.add_one([*prompt, 0], 1)
        harness.run()
    harness.add_one([3] * 12, 1)
    harness.run()
    found = [harness.add_one([*prompt, 9], 1) for prompt in (old, new)]
    harness.run()
    assert [sequence.num_cached_tokens for sequence in found] == [4, 0]


def test_preempted_sequences_find_their_own_blocks_again():
    harness = Harness(num_blocks=8, block_size=2)
    first, second = harness.add_one([1, 2, 3], 12), harness.add_one([4, 5, 6], 12)
    harness.run()
    assert second.num_preemptions > 0
    num_needed = sum(len(s.token_ids) - 1 for s in (first, second))
    assert harness.runner.num_computed_tokens < num_needed + 12
    assert second.num_cached_tokens == 0  # said of the first admission only
    harness.check_answer(second)


def test_twins_computed_together_go_on_publishing_below_the_first_ones_blocks():
    harness = Harness(block_size=4)
    twins = harness.add(PROMPT, 9, n=2, temperature=1.0)
    harness.run()
    for twin in twins:
        next_turn = harness.add_one([*twin.token_ids, 1], 2)
        harness.run()
        assert next_turn.num_cached_tokens == 16


def test_a_twin_outlives_the_blocks_it_published_below():
    """Its own copy of the prefix takes the place of the evicted one."""
    harness = Harness(num_blocks=8, block_size=2, max_num_seqs=3)
    short = harness.add_one([1, 2, 3, 4], 1)
    long = harness.add_one([1, 2, 3, 4], 9)
    harness.advance()
    assert short.finish_reason is FinishReason.LENGTH
    harness.add_one([9] * 7, 1)  # evicts the prefix that `short` published
    harness.run()
    harness.check_answer(long)
    again = harness.add_one([*long.token_ids[:8], 0], 1)
    harness.run()
    assert again.num_cached_tokens == 8
    harness.check_answer(again)


def test_without_prefix_caching_nothing_is_found():
    harness = Harness(enable_prefix_caching=False)
    for _ in range(2):
        sequence = harness.add_one([*PROMPT, 1], 2)
        harness.run()
        assert sequence.num_cached_tokens == 0
    assert harness.scheduler.num_prefix_hit_tokens == 0
