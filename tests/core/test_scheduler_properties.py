"""Any order of commands: the invariants hold, and the answers don't depend on the load."""

import subprocess
import sys

import pytest
from core.harness import EOS, Harness
from core.simulation import EPISODE_LEN, run_episode
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from streamkv.core.sequence import Sequence, SequenceStatus
from streamkv.protocol import FinishReason

NUM_REQUESTS = 10_000


class SchedulerMachine(RuleBasedStateMachine):
    """Tiny pools, few tokens: collisions, preemption and eviction are the normal case."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []

    @initialize(
        depth=st.integers(0, 2),
        num_blocks=st.integers(6, 16),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.sampled_from([1, 3, 8, 64]),
        caching=st.booleans(),
        eos=st.booleans(),
    )
    def start(
        self, depth, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, caching, eos
    ):
        self.max_num_tokens = num_blocks * block_size
        self.harness = Harness(
            depth=depth,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            eos_token_ids=frozenset({EOS} if eos else ()),
            enable_prefix_caching=caching,
        )

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 10),
        n=st.sampled_from([1, 1, 2, 3]),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.integers(0, 1),
        cache_salt=st.sampled_from(["", "", "x"]),
        stop_token_ids=st.sampled_from([(), (), tuple(range(10, 20))]),
    )
    def add(self, prompt, max_tokens, **rest):
        prompt = prompt[: self.max_num_tokens - 1]
        max_tokens = min(max_tokens, self.max_num_tokens - len(prompt))
        self.sequences += self.harness.add(prompt, max_tokens, **rest)

    @rule(number=st.integers(0, 100))
    def add_the_continuation_of_an_answer(self, number):
        if self.sequences:
            prompt = self.sequences[number % len(self.sequences)].token_ids
            if len(prompt) < self.max_num_tokens:
                self.sequences += self.harness.add(prompt, 1)

    @precondition(lambda self: len(self.harness.in_flight) <= self.harness.depth)
    @rule()
    def schedule(self):
        idle = not self.harness.in_flight
        output = self.harness.schedule()
        if output is None:
            assert not (idle and self.harness.live), "I5: work, nothing in flight, no step"
        elif output.preempted:
            assert output.admitted == []

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def commit(self):
        self.harness.commit()

    @rule(num_steps=st.integers(1, 10))
    def advance(self, num_steps):
        for _ in range(num_steps):
            if self.harness.scheduler.has_work:
                self.harness.advance()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def fail_the_next_step(self):
        self.harness.runner.fail_next = "out of luck"

    @rule(token_ids=st.sampled_from([(), (), (5,)]))
    def break_rows_with(self, token_ids):
        self.harness.runner.broken_token_ids = frozenset(token_ids)

    @precondition(lambda self: self.harness.live)
    @rule(
        number=st.integers(0, 100), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP])
    )
    def finish(self, number, reason):
        live = list(self.harness.live)
        sequence = live[number % len(live)]
        self.harness.finish(sequence, reason)
        self.harness.finish(sequence, FinishReason.ERROR)
        assert sequence.finish_reason is reason
        expected = self.harness.oracle(sequence)
        assert sequence.output_token_ids == expected[: sequence.num_output_tokens]
        self.sequences.remove(sequence)

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "harness"):
            return
        scheduler = self.harness.scheduler
        assert scheduler.num_running + scheduler.num_waiting == len(self.harness.live)
        assert scheduler.num_in_flight_steps == len(self.harness.in_flight)

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        for sequence in self.sequences:
            assert sequence.status is SequenceStatus.FINISHED
            self.harness.check_answer(sequence)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("depth", [0, 1])
def test_ten_thousand_simulated_requests_get_the_oracles_answers(depth):
    results = [run_episode(seed, depth) for seed in range(NUM_REQUESTS // EPISODE_LEN)]
    assert sum(result.num_requests for result in results) == NUM_REQUESTS
    assert sum(result.num_preemptions for result in results) > 1000
    assert sum(result.num_hit_tokens for result in results) > 10_000


def test_the_same_commands_give_the_same_steps_in_another_process():
    """Python's string hashes differ between processes, so an unordered container would show."""
    program = (
        "from core.simulation import run_episode\n"
        "print([run_episode(seed, depth).steps_crc for seed in range(3) for depth in (0, 1)])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    here = [run_episode(seed, depth).steps_crc for seed in range(3) for depth in (0, 1)]
    assert outputs == [f"{here}\n"] * 2
    assert len(set(here)) == len(here)
