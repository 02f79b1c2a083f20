"""SchedulerMachine: any order of commands, failures and news, in tiny pools.

Collisions, preemption, swapping and eviction are the normal case. After each command, or each
third, the harness checks the invariants; at the end everything is free, and all answers, scores of
prompts included, are the oracle's.
"""

from __future__ import annotations

from collections import Counter

from core.harness import EOS, VOCAB_SIZE, Harness
from fakes import FakeStore
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streamkv.core.sequence import Sequence, SequenceStatus
from streamkv.errors import CapacityError, InvalidRequestError
from streamkv.protocol import CopyKind, FinishReason

STEPS_PER_RUN = 60

COMMON = [1, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 0]  # prompts begin with some of it
COMMON_LENS = st.integers(0, len(COMMON))
ENDS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
LENGTHS = st.integers(1, 16)
PLACES = st.integers(0, 100)  # in a list, modulo its length


class SchedulerMachine(RuleBasedStateMachine):
    seen: Counter[str] = Counter()  # in all runs

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []
        self.now_s = 0.0

    @initialize(
        depth=st.integers(0, 2),
        num_blocks=st.integers(4, 12),
        block_size=st.sampled_from([1, 2, 4]),
        vocab_size=st.sampled_from([VOCAB_SIZE, VOCAB_SIZE, 2, 3]),
        answers_at_once=st.sampled_from([1, 5, 1000]),
        forced_at_once=st.sampled_from([1, 3, 1000]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([1, 3, 8, 64]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        eos=st.booleans(),
        num_host_slots=st.sampled_from([0, 2, 8, 32]),
        copy_delay=st.sampled_from([0, 0, 1, 3]),
        max_copies=st.sampled_from([1, 2, 32]),
        max_session_blocks=st.integers(0, 4),
        preemption_mode=st.sampled_from(["auto", "swap", "recompute"]),
        has_store=st.booleans(),
        masks_are_late=st.booleans(),
        forces=st.sampled_from(["never", "sometimes", "always"]),
        check_every=st.sampled_from([1, 3]),
    )
    def start(self, eos, has_store, num_host_slots, **rest):
        self.options = {
            "eos_token_ids": frozenset({EOS} if eos else ()),
            "num_host_slots": max(num_host_slots, 2 if has_store else 0),
            "store": FakeStore() if has_store else None,
            "copy_block_s": 0.0001,
            "token_s": 0.00005,
            **rest,
        }
        self.harness = Harness(**self.options)

    def _add(self, prompt, max_tokens, **rest):
        """As much of it as fits."""
        scheduler = self.harness.scheduler
        num_tokens = scheduler.num_blocks * scheduler.block_size
        prompt = prompt[:num_tokens]
        max_tokens = min(max_tokens, num_tokens - len(prompt) + 1)  # the last isn't computed
        self.sequences += self.harness.add(prompt, max_tokens, **rest)

    # --- requests ----------------------------------------------------------------------------

    @rule(
        common_len=COMMON_LENS,
        end=ENDS,
        max_tokens=LENGTHS,
        several=st.sampled_from([{}, {}, {"n": 2}, {"n": 3}, {"n": 1, "best_of": 3}]),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.integers(0, 1),
        cache_salt=st.sampled_from(["", "", "x"]),
        session_id=st.sampled_from(["", "", "s", "t"]),
        stop_token_ids=st.sampled_from([(), (), tuple(range(10, 20))]),
    )
    def add(self, common_len, end, max_tokens, several, **rest):
        self._add([*COMMON[:common_len], *end], max_tokens, **several, **rest)

    @rule(
        common_len=COMMON_LENS,
        end=ENDS,
        max_tokens=LENGTHS,
        width=st.integers(1, 4),
        num_fewer=st.integers(0, 3),
        length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
        early_stopping=st.sampled_from([False, True, "never"]),
        stop_token_ids=st.sampled_from([(), (), (0,), (0, 1, 2)]),
        priority=st.integers(0, 1),
    )
    def add_beams(self, common_len, end, max_tokens, width, num_fewer, **rest):
        """Fewer and shorter ones if they don't fit."""
        while width:
            sampling = {"use_beam_search": True, "n": max(1, width - num_fewer), "best_of": width}
            try:
                self._add([*COMMON[:common_len], *end], max_tokens, **sampling, **rest)
                return
            except InvalidRequestError as error:
                assert "beams" in str(error)
                width, max_tokens = width - 1, -(-max_tokens // 2)

    @rule(
        common_len=COMMON_LENS,
        end=ENDS,
        max_tokens=LENGTHS,
        several=st.sampled_from([{}, {}, {"n": 2}, {"n": 1, "best_of": 2}, {"logprobs": 1}]),
        temperature=st.sampled_from([0.0, 1.0]),
        grammar=st.integers(0, 50),
        priority=st.integers(0, 1),
        stop_token_ids=st.sampled_from([(), (), tuple(range(10, 20))]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
    )
    def add_with_a_grammar(self, common_len, end, max_tokens, several, **rest):
        self._add([*COMMON[:common_len], *end], max_tokens, **several, **rest)

    @rule(
        num_more=st.sampled_from([0, 3, 12]),
        common_len=COMMON_LENS,
        end=ENDS,
        max_tokens=st.integers(1, 3),
        several=st.sampled_from([{}, {}, {"n": 2}, {"n": 1, "use_beam_search": True}]),
        prompt_logprobs=st.sampled_from([None, 0, 0, 2]),
        wants_progress=st.booleans(),
        priority=st.integers(0, 1),
    )
    def add_with_scores(self, num_more, common_len, end, max_tokens, several, **rest):
        prompt = [*COMMON[:common_len], *[1] * num_more, *end]
        self._add(prompt, max_tokens, **several, **rest)

    @precondition(lambda self: self.harness.vocab_size < 4)
    @rule(common_len=COMMON_LENS)
    def add_beams_of_which_some_find_no_answer(self, common_len):
        self.add_beams(common_len, [1], 1, 4, 0)

    @rule(place=PLACES, num_more=st.integers(0, 3), session_id=st.sampled_from(["", "s"]))
    def add_the_continuation_of_an_answer(self, place, num_more, session_id):
        if self.sequences:
            prompt = self.sequences[place % len(self.sequences)].token_ids
            self._add([*prompt, *[1] * num_more], 2, session_id=session_id)

    @precondition(lambda self: self.harness.live)
    @rule(place=PLACES, reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def finish(self, place, reason):
        live = list(self.harness.live)
        sequence = live[place % len(live)]
        reason = sequence.finish_reason or reason  # a beam may have ended, and not yet be told
        self.harness.finish(sequence, reason)
        self.harness.finish(sequence, FinishReason.ERROR)
        assert sequence.finish_reason is reason
        if sequence.is_beam:
            self.sequences = [s for s in self.sequences if s.group is not sequence.group]
            return
        expected = self.harness.oracle(sequence)
        assert sequence.output_token_ids == expected[: sequence.num_output_tokens]
        self.sequences.remove(sequence)

    @precondition(lambda self: self.harness.live)
    @rule(place=PLACES, num_steps=st.integers(0, 2))
    def pause(self, place, num_steps):
        live = list(self.harness.live)
        self.harness.pause(live[place % len(live)])
        self.advance(num_steps)

    @precondition(lambda self: self.harness.scheduler.num_paused)
    @rule(place=PLACES)
    def resume(self, place):
        paused = list(self.harness.scheduler._roster.paused)
        self.harness.resume(paused[place % len(paused)].sequences[0])

    # --- steps -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.harness.in_flight) <= self.harness.depth)
    @rule()
    def schedule(self):
        idle = not self.harness.in_flight
        output = self.harness.schedule()
        if output is None:
            store = self.harness.store
            waits = self.harness.grammars.due or (store is not None and store.num_pending)
            has_work = any(s.finish_reason is None for s in self.harness.going_on)
            waits = waits or self.harness.scheduler.has_forced
            assert waits or not (idle and has_work), "I5: work, nothing on its way"

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def commit(self):
        self.harness.commit()

    @precondition(lambda self: self.harness.grammars.due)
    @rule(num=st.integers(1, 3))
    def make_masks(self, num):
        self.harness.make_masks(num)

    @precondition(lambda self: self.harness.scheduler.has_forced)
    @rule()
    def take_forced(self):
        self.harness.take_forced()

    @rule(num_steps=st.integers(1, 20))
    def advance(self, num_steps):
        for _ in range(num_steps):
            if self.harness.scheduler.has_work:
                self.harness.advance()

    @precondition(lambda self: self.harness.store is not None and self.harness.store.num_pending)
    @rule(num=st.integers(1, 8))
    def deliver(self, num):
        self.harness.deliver(num)

    # --- trouble -----------------------------------------------------------------------------

    @rule(
        fails=st.booleans(),
        token_ids=st.sampled_from([(), (), (5,)]),
        kinds=st.sampled_from([(), (), (CopyKind.OUT,), (CopyKind.IN,), tuple(CopyKind)]),
        copies_one_in=st.integers(1, 4),
        store_one_in=st.sampled_from([0, 0, 1, 3]),
    )
    def let_fail(self, fails, token_ids, kinds, copies_one_in, store_one_in):
        """The next step; rows, copies and the store until they are told otherwise."""
        runner, store = self.harness.runner, self.harness.store
        if fails and self.harness.in_flight:
            runner.fail_next = "out of luck"
        runner.broken_token_ids = frozenset(token_ids)
        runner.memory.fails_copy = lambda number, kind: (
            kind in kinds and number % copies_one_in == 0
        )
        if store is not None:
            store.fails = lambda op: store_one_in > 0 and op.number % store_one_in == 0

    @rule(num_blocks=st.integers(1, 16))
    def resize(self, num_blocks):
        try:
            self.harness.scheduler.resize(min(num_blocks, self.options["num_blocks"]))
        except CapacityError:
            assert self.harness.live
        self.harness.check()

    @rule(num_s=st.sampled_from([0.0, 1.0, 20.0]), place=PLACES)
    def let_time_pass(self, num_s, place):
        """Sessions end, and the store drops something."""
        store = self.harness.store
        if store is not None and store.records:
            records = list(store.records)
            store.drop(records[place % len(records)])
        self.now_s += num_s
        self.harness.scheduler.advance_clock(self.now_s)
        self.harness.check()

    @precondition(lambda self: not self.harness.live)
    @rule()
    def start_again(self):
        """What the store has is still there."""
        self._end()
        self.harness = Harness(**self.options)

    # --- always ------------------------------------------------------------------------------

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "harness"):
            return
        self.seen["commands"] += 1
        scheduler = self.harness.scheduler
        assert scheduler.num_in_flight_steps == len(self.harness.in_flight)
        going_on = [s for s in self.harness.live if s.finish_reason is None]
        num_live = len({s for first in going_on for s in _all_of(first)})
        assert scheduler.num_running + scheduler.num_waiting + scheduler.num_paused == num_live

    def teardown(self):
        if hasattr(self, "harness"):
            self._end()

    def _end(self):
        for group in list(self.harness.scheduler._roster.paused):
            self.seen["paused"] += 1
            self.harness.resume(group.sequences[0])
        self.harness.run()
        self.harness.scheduler.advance_clock(self.now_s + 1000.0)
        self.harness.check()
        scheduler = self.harness.scheduler
        stats = scheduler.kv_stats
        assert (stats.num_sessions, stats.num_pinned_blocks) == (0, 0)
        ended = (FinishReason.STOP, FinishReason.LENGTH)
        for sequence in self.sequences:
            assert sequence.status is SequenceStatus.FINISHED
            self.harness.check_answer(sequence)
            self.seen["answers"] += sequence.finish_reason in ended
            self.seen["beams"] += sequence.is_beam and sequence.finish_reason in ended
            self.seen["scores"] += len(self.harness.scores.get(sequence, []))
            self.seen["missing"] += sequence.is_beam and self.harness.oracle(sequence) is None
        self.sequences.clear()
        self.seen.update(
            steps=self.harness.num_scheduled,
            preemptions=scheduler.num_preemptions,
            swaps=scheduler.num_swaps,
            hits=stats.num_device_hit_tokens,
            host_hits=stats.num_host_hit_tokens,
            disk_hits=stats.num_disk_hit_tokens,
            block_copies=stats.num_block_copies,
            blocks_out=stats.num_blocks_out,
            blocks_in=stats.num_blocks_in,
            failed_copies=stats.num_failed_copies,
            writes=stats.num_store_writes,
            failed_store_ops=stats.num_store_failures,
            deferrals=self.harness.runner.num_deferrals,
            forced=self.harness.num_forced,
        )


def _all_of(sequence: Sequence) -> list[Sequence]:
    """Beams that have no events of their own are alive with those that have."""
    return sequence.group.sequences if sequence.is_beam else [sequence]


def run_machine(num_commands: int, *, shrinks: bool) -> Counter[str]:
    """At least so many commands; returns what happened. What fails is printed as a program, the
    shortest one found if it `shrinks`, which takes minutes."""
    seen = SchedulerMachine.seen
    seen.clear()
    while (num_left := num_commands - seen["commands"]) > 0:  # runs may end early
        run_state_machine_as_test(
            SchedulerMachine,
            settings=settings(
                max_examples=-(-num_left // STEPS_PER_RUN),
                stateful_step_count=STEPS_PER_RUN,
                deadline=None,
                database=None,
                phases=[Phase.generate, *([Phase.shrink] if shrinks else [])],
                suppress_health_check=list(HealthCheck),
            ),
        )
    return seen.copy()
