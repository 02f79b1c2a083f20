"""Where a preempted sequence's KV goes, and how it comes back: host memory, disk, or computed."""

import pytest
from core.harness import Harness, rows
from fakes import FakeStore

from streamkv.core.admission import CALM_STEPS, MAX_LOOKAHEAD, RECHECK_STEPS, Headroom
from streamkv.core.cost_model import CostModel
from streamkv.core.kv.loading import MAX_READS
from streamkv.core.sequence import Sequence, SequenceStatus
from streamkv.errors import CapacityError
from streamkv.protocol import CopyKind

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]  # two blocks of four


def preempted(harness: Harness) -> tuple[Sequence, Sequence, list]:
    """Two sequences in a pool for one and a half; the steps until the second is preempted."""
    needy = harness.add_one(range(1, 8), 14)
    victim = harness.add_one(PROMPT, 14)
    outputs = []
    while not victim.num_preemptions:
        outputs.append(harness.schedule())
        harness.commit()
    return needy, victim, outputs


def swapping(**options) -> Harness:
    return Harness(**{"num_blocks": 7, "num_host_slots": 16, "preemption_mode": "swap", **options})


def kinds(output) -> list[CopyKind]:
    return [copy.kind for copy in output.copies]


# --- swap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("copy_delay", [0, 2])
def test_what_was_swapped_is_not_computed_again(copy_delay, depth):
    harness = swapping(depth=depth, copy_delay=copy_delay)
    needy = harness.add_one(range(1, 8), 14)
    victim = harness.add_one(PROMPT, 14)
    harness.run()
    assert harness.scheduler.num_swaps == harness.scheduler.num_preemptions > 0
    for sequence in (needy, victim):
        harness.check_answer(sequence)
    stats = harness.scheduler.kv_stats
    assert stats.num_blocks_out >= stats.num_blocks_in > 0
    num_needed = sum(len(s.token_ids) - 1 for s in (needy, victim))
    assert harness.runner.num_computed_tokens <= num_needed + (depth + 1) * victim.num_preemptions


def test_the_blocks_of_a_swapped_sequence_are_copied_only_when_others_take_them():
    harness = swapping()
    _, victim, outputs = preempted(harness)
    assert outputs[-1].swapped_out == outputs[-1].preempted == [victim]
    assert kinds(outputs[-1]) == [CopyKind.OUT]  # the one that the needy one took
    assert harness.scheduler.kv_stats.num_pinned_blocks == 3
    harness.run()
    assert harness.scheduler.kv_stats.num_pinned_blocks == 0


def test_it_loads_while_others_go_on_and_then_resumes_as_a_hit():
    harness = swapping(copy_delay=2)
    needy, victim, _ = preempted(harness)
    assert len(victim.token_ids) == 14  # three blocks, and a token that isn't worth loading
    while needy.finish_reason is None:  # there is no room before
        harness.advance()
    later = harness.add_one([1, 2], 3)
    output = harness.schedule()
    assert [sequence for sequence, _, _ in output.scheduled] == [later]
    assert CopyKind.IN in kinds(output)
    assert (victim.status, victim.row, victim.block_table) == (SequenceStatus.LOADING, -1, [])
    assert (harness.scheduler.num_loading, harness.scheduler.num_waiting) == (1, 1)
    while victim.status is SequenceStatus.LOADING:
        harness.commit()
        output = harness.schedule()
    assert output.swapped_in == output.admitted == [victim]
    assert (victim, 12, 2) in output.scheduled
    harness.commit()
    harness.run()
    harness.check_answer(victim)
    harness.check_answer(later)


def test_a_step_may_have_copies_only():
    harness = swapping()
    _, victim, _ = preempted(harness)
    outputs = []
    while victim.finish_reason is None:
        outputs.append(harness.schedule())
        harness.commit()
    (copies_only,) = [output for output in outputs if not output.scheduled]
    assert kinds(copies_only)[-1] is CopyKind.IN
    assert copies_only.step.scheduled == b""


def test_a_step_of_nothing_asks_for_copies_that_take_their_time():
    harness = swapping(copy_delay=3, num_host_slots=1)
    harness.runner.memory.copy_delay = 10
    _, victim, outputs = preempted(harness)
    assert kinds(outputs[-1]) == [CopyKind.OUT]
    for sequence in list(harness.live):
        harness.finish(sequence)
    output = harness.schedule()
    assert (output.scheduled, output.copies) == ([], [])
    harness.commit()
    assert not harness.scheduler.has_work


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", [CopyKind.OUT, CopyKind.IN])
def test_what_failed_to_be_copied_is_computed(kind, depth):
    harness = swapping(depth=depth)
    harness.runner.memory.fails_copy = lambda number, copied: copied is kind
    needy, victim = harness.add_one(range(1, 8), 14), harness.add_one(PROMPT, 14)
    harness.run()
    assert harness.scheduler.num_swaps > 0
    assert harness.scheduler.kv_stats.num_failed_copies > 0
    for sequence in (needy, victim):
        harness.check_answer(sequence)


def test_a_sequence_waits_for_loads_once_and_then_computes_the_rest():
    harness = swapping()
    harness.runner.memory.fails_copy = lambda number, kind: kind is CopyKind.IN
    _, victim, _ = preempted(harness)
    num_loads = 0
    while victim.finish_reason is None:
        was = victim.status
        harness.schedule()
        num_loads += victim.status is SequenceStatus.LOADING is not was
        harness.commit()
    assert num_loads == 1
    harness.check_answer(victim)


def test_a_sequence_is_aborted_while_it_loads():
    harness = swapping(copy_delay=2)
    _, victim, _ = preempted(harness)
    while victim.status is not SequenceStatus.LOADING:
        harness.advance()
    harness.fill()
    harness.finish(victim)
    assert (harness.scheduler.num_loading, harness.scheduler.num_waiting) == (0, 0)
    assert harness.run() == []
    assert harness.scheduler.kv_stats.num_pinned_blocks == 0


def test_a_failed_copy_of_a_shared_block_loses_who_holds_it():
    harness = Harness(block_size=4)
    harness.add_one(PROMPT[:6], 1)
    harness.run()
    harness.runner.memory.fails_copy = lambda number, kind: kind is CopyKind.BLOCK
    lost = harness.add_one([*PROMPT[:6], 1], 4)
    other = harness.add_one([1, 2], 4)
    harness.run()
    assert (lost.finish_reason.value, lost.output_token_ids) == ("error", [])
    harness.check_answer(other)
    harness.runner.memory.fails_copy = lambda number, kind: False
    again = harness.add_one([*PROMPT[:6], 1], 4)
    harness.run()
    harness.check_answer(again)


# --- recompute -----------------------------------------------------------------------------------


def test_what_is_given_up_is_not_copied():
    harness = swapping(preemption_mode="recompute")
    _, victim, outputs = preempted(harness)
    assert (outputs[-1].preempted, outputs[-1].swapped_out, outputs[-1].copies) == (
        [victim],
        [],
        [],
    )
    harness.run()
    assert (harness.scheduler.num_swaps, harness.scheduler.kv_stats.num_blocks_in) == (0, 0)
    harness.check_answer(victim)


@pytest.mark.parametrize(("copy_block_s", "swaps"), [(0.001, True), (0.01, False)])
def test_auto_does_what_costs_less(copy_block_s, swaps):
    """Three blocks of four tokens, out and in."""
    harness = swapping(preemption_mode="auto", copy_block_s=copy_block_s, token_s=0.002)
    _, victim, outputs = preempted(harness)
    assert outputs[-1].swapped_out == ([victim] if swaps else [])
    harness.run()
    harness.check_answer(victim)


def test_without_host_memory_nothing_is_swapped():
    harness = swapping(num_host_slots=0)
    _, victim, outputs = preempted(harness)
    assert outputs[-1].swapped_out == []
    harness.run()


def test_the_cost_model_follows_what_steps_report():
    cost = CostModel(0.0, 0.0, min_num_tokens=100)
    assert not cost.is_swap_quicker(1, 16)  # nothing is known
    cost.learn(200, 0, duration_s=0.2, copies_s=0.0)
    assert cost.token_s == pytest.approx(0.001)
    cost.learn(1, 10, duration_s=0.05, copies_s=0.04)  # a token of an answer says nothing
    assert (cost.token_s, cost.copy_block_s) == (pytest.approx(0.001), pytest.approx(0.004))
    assert cost.is_swap_quicker(1, 16)
    for _ in range(50):
        cost.learn(200, 10, duration_s=0.3, copies_s=0.2)
    assert cost.copy_block_s == pytest.approx(0.02, rel=0.01)
    assert not cost.is_swap_quicker(1, 16)


# --- disk ----------------------------------------------------------------------------------------


def start(store: FakeStore, **options) -> Harness:
    return Harness(**{"num_host_slots": 4, "store": store, **options})


def test_full_blocks_are_written_when_nothing_else_is_to_do_and_found_after_a_restart():
    store = FakeStore()
    harness = start(store)
    harness.add_one([*PROMPT, 1], 1)
    harness.run()
    assert [block.token_ids for block in store.index()] == [
        b"".join(token.to_bytes(4, "little") for token in PROMPT[:4]),
        b"".join(token.to_bytes(4, "little") for token in PROMPT[4:]),
    ]
    harness = start(store)
    again = harness.add_one([*PROMPT, 2], 4)
    assert harness.schedule() is None  # it reads
    assert (again.status, harness.store.num_pending) == (SequenceStatus.LOADING, 2)
    assert harness.scheduler.is_busy
    harness.deliver()
    assert kinds(harness.schedule()) == [CopyKind.IN] * 2
    harness.commit()
    assert rows(harness.schedule().step) == [(0, 8, 1, 1)]
    harness.commit()
    harness.run()
    harness.check_answer(again)
    assert (again.num_cached_tokens, harness.scheduler.kv_stats.num_disk_hit_tokens) == (8, 8)


def test_what_cannot_be_read_is_computed():
    store = FakeStore()
    harness = start(store)
    harness.add_one([*PROMPT, 1], 1)
    harness.run()
    harness = start(store)
    store.drop(list(store.records)[1])
    again = harness.add_one([*PROMPT, 2], 4)
    harness.run()
    assert again.num_cached_tokens == 4
    harness.check_answer(again)


def test_others_go_on_while_one_waits_for_the_disk():
    store = FakeStore()
    harness = start(store)
    harness.add_one([*PROMPT, 1], 1)
    harness.run()
    harness = start(store)
    waiting = harness.add_one([*PROMPT, 2], 4)
    other = harness.add_one([1, 2, 3], 4)
    while not other.finish_reason:
        assert harness.schedule().admitted in ([other], [])
        harness.commit()
    assert waiting.status is SequenceStatus.LOADING
    harness.run()
    harness.check_answer(waiting)


def test_without_prefix_caching_nothing_is_kept_on_disk():
    store = FakeStore()
    harness = start(store, enable_prefix_caching=False)
    harness.add_one([*PROMPT, 1], 1)
    harness.run()
    assert store.records == {}


@pytest.mark.parametrize("copy_delay", [0, 2])
@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_that_are_loaded_at_once_do_not_evict_each_other(depth, copy_delay):
    harness = Harness(depth=depth, num_blocks=12, num_host_slots=64, copy_delay=copy_delay)
    prompts = [[token] * 21 for token in range(8)]  # five blocks, and a token: two fit
    for prompt in prompts:
        harness.add_one(prompt, 1)
        harness.run()
    num_before = harness.runner.num_computed_tokens
    again = [harness.add_one(prompt, 2) for prompt in prompts]
    harness.run()
    for sequence in again:
        harness.check_answer(sequence)
    assert [sequence.num_cached_tokens for sequence in again] == [20] * 8
    assert harness.runner.num_computed_tokens - num_before == 8 * 2
    assert harness.scheduler.kv_stats.num_host_hit_tokens >= 6 * 20


def stored(prompts: list[list[int]], **options) -> Harness:
    """After a restart: these are on disk."""
    store = FakeStore()
    harness = start(store)
    for prompt in prompts:
        harness.add_one(prompt, 1)
        harness.run()
    return start(store, **{"num_host_slots": 64, **options})


LONG, SHORT = list(range(20)) * 6, [7] * 9  # 30 blocks; two, and a token


def test_a_short_load_does_not_wait_for_a_long_one():
    harness = stored([LONG, SHORT])
    long, short = harness.add_one([*LONG, 1], 2), harness.add_one(SHORT, 2)
    assert harness.schedule() is None
    assert harness.store.num_pending == MAX_READS
    assert harness.scheduler.num_loading == 2
    num_read = 0
    while harness.scheduler.num_loading == 2:
        harness.deliver(1)
        num_read += 1
        if harness.schedule():
            harness.commit()
    assert (short.num_cached_tokens, long.status) == (8, SequenceStatus.LOADING)
    assert num_read <= MAX_READS + 2
    harness.run()
    assert long.num_cached_tokens == 120
    for sequence in (long, short):
        harness.check_answer(sequence)


def test_reads_that_nobody_wants_any_more_are_not_begun():
    harness = stored([LONG, SHORT])
    long, same = harness.add_one([*LONG, 1], 2), harness.add_one([*LONG[:60], 1], 2)
    short = harness.add_one(SHORT, 2)
    assert harness.schedule() is None and harness.scheduler.num_loading == 3
    harness.finish(long)
    harness.run()
    assert (same.num_cached_tokens, short.num_cached_tokens) == (60, 8)
    assert harness.scheduler.kv_stats.num_store_reads <= 15 + 2 + MAX_READS


def test_what_several_load_together_is_kept_free_once():
    harness = stored([LONG, SHORT], num_blocks=50)
    together = [harness.add_one([*LONG, token], 2) for token in range(3)]
    short = harness.add_one(SHORT, 2)
    assert harness.schedule() is None
    assert harness.scheduler.num_loading == 4, "31 blocks, one, one, and three"
    harness.run()
    assert [sequence.num_cached_tokens for sequence in together] == [120] * 3
    harness.check_answer(short)
    assert harness.scheduler.kv_stats.num_store_reads == 30 + 2


def test_a_load_that_finds_nothing_any_more_ends_at_once():
    harness = stored([LONG])
    long = harness.add_one([*LONG, 1], 2)
    assert harness.schedule() is None and harness.scheduler.num_loading == 1
    for record in list(harness.store.records):
        harness.store.drop(record)
    harness.run()
    assert long.num_cached_tokens == 0
    harness.check_answer(long)


def test_a_load_that_has_ended_is_cancelled_before_anybody_was_told():
    harness = stored([SHORT])
    loading = harness.add_one(SHORT, 2)
    assert harness.schedule() is None
    for record in list(harness.store.records):
        harness.store.drop(record)
    harness.deliver()
    harness.finish(loading)
    assert harness.schedule() is None
    harness.run()


def test_a_search_of_which_one_beam_loads_gets_its_blocks_from_those_behind():
    store = FakeStore()
    harness = Harness(
        num_blocks=14, block_size=1, num_host_slots=3, store=store, preemption_mode="swap"
    )
    beams = harness.add([1], 5, use_beam_search=True, n=3)
    for _ in range(3):
        harness.advance()
    other = harness.add_one([29] * 5, 10, priority=-1)  # the search's blocks go to disk
    while other in harness.live:
        harness.advance()
        harness.deliver()
    while not (harness.scheduler.num_loading and harness.scheduler.num_running):
        if harness.schedule():
            harness.commit()
        else:
            harness.deliver(1)
    harness.add_one([20], 13, priority=1)  # it grows into what the load was to have
    for _ in range(200):
        if harness.schedule():
            harness.commit()
        elif store.num_pending:
            harness.deliver(1)
        else:
            harness.take_answers()
    assert not harness.live
    for beam in beams:
        harness.check_answer(beam)


def test_a_preempted_search_in_a_pool_that_just_holds_it_goes_on():
    harness = Harness(num_blocks=9, block_size=1)
    beams = harness.add([10], 5, use_beam_search=True, n=2)  # needs all of it
    for _ in range(2):
        harness.advance()
    harness.add_one([29, 29], 8, priority=-1)  # preempts it
    harness.run()
    for beam in beams:
        harness.check_answer(beam)
    assert harness.scheduler.num_preemptions < 10


def test_who_waits_for_a_prompt_that_runs_is_admitted_once_that_is_cached():
    harness = Harness(num_blocks=60, block_size=1)
    prompt = [token % 29 for token in range(40)]
    first, second = harness.add_one(prompt, 15), harness.add_one([*prompt, 1], 2)
    while second in harness.live:
        harness.advance()
    assert first.num_output_tokens <= RECHECK_STEPS + 4 and first in harness.live
    harness.run()


# --- sessions, and the size of the pool ----------------------------------------------------------


def test_a_session_keeps_its_blocks_until_its_time_is_over():
    harness = Harness(num_blocks=8, block_size=4, max_session_blocks=4)
    harness.scheduler.advance_clock(100.0)
    (turn,) = harness.add(PROMPT, 2, session_id="s", session_ttl_s=10.0)
    harness.run()
    stats = harness.scheduler.kv_stats
    assert (stats.num_sessions, stats.num_pinned_blocks) == (1, 3)
    for token in range(3):
        harness.add_one([token] * 16, 1)
        harness.run()
    assert harness.scheduler.kv_stats.num_pinned_blocks == 3
    (next_turn,) = harness.add([*turn.token_ids, 1], 2, session_id="s", session_ttl_s=10.0)
    harness.run()
    assert next_turn.num_cached_tokens == 9
    harness.scheduler.advance_clock(109.9)
    assert harness.scheduler.kv_stats.num_sessions == 1
    harness.scheduler.advance_clock(110.1)
    stats = harness.scheduler.kv_stats
    assert (stats.num_sessions, stats.num_pinned_blocks) == (0, 0)


def test_a_session_keeps_the_first_choice_and_the_best_beam():
    harness = Harness(block_size=4, max_session_blocks=16)
    for sampling in ({"n": 3, "temperature": 1.0}, {"n": 2, "use_beam_search": True}):
        first = harness.add(PROMPT, 6, session_id="s", **sampling)[0]
        harness.run()
        assert harness.scheduler.kv_stats.num_sessions == 1
        next_turn = harness.add_one([*first.token_ids, 1], 2)
        harness.run()
        assert next_turn.num_cached_tokens >= len(PROMPT)


def test_a_smaller_pool_preempts_and_a_larger_one_goes_on():
    harness = Harness(num_blocks=12, block_size=2)
    sequences = [harness.add_one([token] * 4, 6) for token in range(3)]
    for _ in range(3):
        harness.advance()
    assert harness.scheduler.num_held_blocks == 9
    harness.scheduler.resize(6)
    while harness.scheduler.num_preemptions == 0:
        harness.advance()
    while harness.scheduler.num_held_blocks > 6:
        harness.advance()
    harness.scheduler.resize(12)
    assert harness.scheduler.num_blocks == 12
    harness.run()
    for sequence in sequences:
        harness.check_answer(sequence)


def test_a_pool_in_which_somebody_would_not_fit_any_more_is_refused():
    harness = Harness(num_blocks=12, block_size=2)
    sequence = harness.add_one([1, 2, 3], 7)
    with pytest.raises(CapacityError) as error:
        harness.scheduler.resize(4)
    assert str(error.value) == (
        "expected at least 5 blocks of 2 tokens, which request r0 needs, got 4; wait until it has "
        "ended, or end it"
    )
    harness.scheduler.resize(5)
    with pytest.raises(CapacityError, match="the pool has 5"):
        harness.add_one([1, 2, 3, 4, 5], 7)
    harness.run()
    harness.check_answer(sequence)


@pytest.mark.parametrize("num_blocks", [0, 13])
def test_a_pool_of_more_blocks_than_there_are_is_refused(num_blocks):
    harness = Harness(num_blocks=12)
    with pytest.raises(CapacityError, match=f"expected 1 to 12 blocks, .* got {num_blocks};"):
        harness.scheduler.resize(num_blocks)


def test_beams_that_wait_for_one_that_loads_get_it_the_block_it_needs():
    """Else they wait for each other: they hold blocks, the one that loads has none, and the last
    sequence sits out, as it may not preempt those before it."""
    harness = swapping(num_blocks=6)
    sequences = harness.add([1, 0] * 3, 4, n=2, use_beam_search=True)
    sequences += harness.add([0] * 10, 8, n=2, temperature=1.0)
    sequences += harness.add([1] * 5, 9, priority=-1)
    harness.run()
    assert harness.scheduler.num_swaps > 0
    for sequence in sequences:
        harness.check_answer(sequence)


# --- room for those that run --------------------------------------------------------------------


def preemptions_of(min_lookahead: int) -> int:
    """Of 12 equal requests that take 2 blocks at first and 6 in the end, on a pool of 24."""
    harness = Harness(num_blocks=24, max_num_seqs=12, min_lookahead=min_lookahead)
    sequences = [harness.add_one([number] * 8, 16) for number in range(12)]
    harness.run()
    for sequence in sequences:
        harness.check_answer(sequence)
    return harness.scheduler.num_preemptions


def test_who_waits_is_admitted_when_those_that_run_have_blocks_to_go_on() -> None:
    assert preemptions_of(0) >= 6
    assert preemptions_of(16) == 0


def test_the_lookahead_grows_with_each_preemption_and_shrinks_in_calm_times() -> None:
    headroom = Headroom(block_size=4, min_lookahead=8)
    for _ in range(2):
        headroom.note_step(has_preempted=True)
    assert headroom.lookahead == 32
    for _ in range(2 * CALM_STEPS - 1):
        headroom.note_step(has_preempted=False)
    assert headroom.lookahead == 16
    for _ in range(10 * CALM_STEPS):
        headroom.note_step(has_preempted=False)
    assert headroom.lookahead == 8
    for _ in range(20):
        headroom.note_step(has_preempted=True)
    assert headroom.lookahead == MAX_LOOKAHEAD


def test_one_alone_is_admitted_whatever_it_may_need_later() -> None:
    harness = Harness(num_blocks=6, min_lookahead=1024)
    sequence = harness.add_one(range(8), 16)
    harness.run()
    harness.check_answer(sequence)
