"""Any order of commands, copies and failures: what is found is what was computed, and it all ends.

`KVWorld` has the memory and checks contents; here are the commands.
"""

from __future__ import annotations

import random

import pytest
from core.kv_world import KVWorld
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamkv.core.kv.manager import Keep

LONGEST = 13  # tokens
INDEX = st.integers(0, 7)
SCRIPTS = st.lists(st.integers(0, 2), min_size=2, max_size=LONGEST)


class KVMachine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**32),
        block_size=st.integers(1, 4),
        num_more_blocks=st.integers(0, 8),
        num_slots=st.integers(0, 6),
        max_copies=st.integers(1, 4),
        num_session_blocks=st.integers(0, 6),
        has_store=st.booleans(),
        is_shared=st.booleans(),
        failures=st.sampled_from([0.0, 0.1, 0.4]),
    )
    def begin(
        self,
        seed,
        block_size,
        num_more_blocks,
        num_slots,
        max_copies,
        num_session_blocks,
        has_store,
        is_shared,
        failures,
    ):
        self.least = -(-LONGEST // block_size)
        self.world = KVWorld(
            random.Random(seed),
            block_size=block_size,
            num_blocks=self.least + num_more_blocks,
            enable_prefix_caching=is_shared,
            num_host_slots=num_slots,
            has_store=has_store and is_shared and num_slots > 0,
            max_copies=max_copies,
            max_session_blocks=num_session_blocks,
        )
        self.world.failures = failures

    def pick(self, sequences, index):
        return sequences[index % len(sequences)] if sequences else None

    @rule(script=SCRIPTS, num=st.integers(1, LONGEST), salt=st.sampled_from(["", "", "x"]))
    def add(self, script, num, salt):
        self.world.add(script, min(num, len(script) - 1), salt)

    @rule(script=SCRIPTS, num=st.integers(1, LONGEST), session=st.sampled_from("ab"))
    def add_with_session(self, script, num, session):
        self.world.add(script, min(num, len(script) - 1), session=session)

    @rule(index=INDEX)
    def add_what_goes_on(self, index):
        former = self.pick(self.world.sequences, index)
        if former is not None:
            script = (former.script + [1, 0])[:LONGEST]
            self.world.add(script, len(script) - 1, former.request.cache_salt)

    @rule(index=INDEX)
    def admit(self, index):
        sequence = self.pick(self.world.waiting(), index)
        if sequence is not None:
            self.world.admit(sequence)

    @rule(index=INDEX, count=st.integers(1, 9))
    def compute(self, index, count):
        sequence = self.pick(self.world.running(), index)
        if sequence is not None:
            self.world.compute(sequence, count)

    @rule()
    def compute_all(self):
        for sequence in self.world.running():
            self.world.compute(sequence, 2)

    @rule(index=INDEX, script=SCRIPTS)
    def fork(self, index, script):
        parent = self.pick(self.world.running(), index)
        num_more = 0 if parent is None else LONGEST - len(parent.token_ids)
        if parent is not None and num_more > 0 and not parent.is_lost:
            self.world.fork(parent, script[:num_more])

    @rule(index=INDEX, keep=st.sampled_from([Keep.SWAP, Keep.SWAP, Keep.GIVE_UP]))
    def preempt(self, index, keep):
        sequence = self.pick(self.world.running(), index)
        if sequence is not None:
            self.world.leave(sequence, keep)

    @rule(index=INDEX)
    def end(self, index):
        sequence = self.pick(self.world.running(), index)
        if sequence is not None:
            self.world.leave(sequence, Keep.CACHE)

    @rule(index=INDEX)
    def end_one_that_waits(self, index):
        world = self.world
        waiting = world.waiting() + [s for s in world.sequences if s.is_loading]
        sequence = self.pick(waiting, index)
        if sequence is not None:
            world.end_waiting(sequence)

    @precondition(lambda self: len(self.world.in_flight) < 2)
    @rule()
    def send(self):
        self.world.send()

    @rule()
    def commit(self):
        self.world.commit()

    @rule()
    def step(self):
        self.world.send()
        self.world.submit_ops()
        self.world.commit()

    @rule()
    def submit_ops(self):
        self.world.submit_ops()

    @rule()
    def end_op(self):
        self.world.end_op()

    @rule(num_more=st.integers(0, 10))
    def resize(self, num_more):
        self.world.resize(self.least + num_more)

    @rule()
    def wait(self):
        self.world.now_s += 1.0
        self.world.kv.expire_sessions(self.world.now_s)

    @invariant()
    def is_sound(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()


KVMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_any_order = KVMachine.TestCase


@pytest.mark.parametrize("seed", range(60))
def test_long_runs(seed):
    """Longer than the machine's, and with more going on at once."""
    rng = random.Random(seed)
    block_size, longest = rng.randint(1, 4), rng.choice([8, 13, 20])
    least = -(-longest // block_size)
    is_shared, num_slots = rng.random() < 0.8, rng.choice([0, 2, 5, 12])
    world = KVWorld(
        random.Random(seed + 1),
        block_size=block_size,
        num_blocks=least + rng.randint(0, 10),
        enable_prefix_caching=is_shared,
        num_host_slots=num_slots,
        has_store=is_shared and num_slots > 0 and rng.random() < 0.6,
        max_copies=rng.randint(1, 6),
        max_session_blocks=rng.randint(0, 8),
    )
    world.failures = rng.choice([0.0, 0.0, 0.05, 0.3])
    commands, weights = zip(*COMMANDS.items(), strict=True)
    for command in rng.choices(commands, weights, k=250):
        command(world, rng, longest, least)
        world.check()
    world.finish()


def pick(rng, sequences):
    return rng.choice(sequences) if sequences else None


def add(world, rng, longest, least):
    if len(world.sequences) >= 8:
        return
    former = pick(rng, world.sequences) if rng.random() < 0.4 else None
    if former is not None:
        script = (former.script + [1, 0])[:longest]
        num_prompt = max(1, len(script) - rng.randint(1, 3))
        world.add(script, num_prompt, former.request.cache_salt)
    else:
        script = [rng.randint(0, 1) for _ in range(rng.randint(2, longest))]
        salt, session = rng.choice(["", "", "x"]), rng.choice(["", "a", "b"])
        world.add(script, rng.randint(1, len(script) - 1), salt, session)


def admit(world, rng, longest, least):
    sequence = pick(rng, world.waiting())
    if sequence is not None:
        world.admit(sequence)


def compute(world, rng, longest, least):
    for sequence in world.running():
        world.compute(sequence, rng.randint(1, 6))


def fork(world, rng, longest, least):
    parent = pick(rng, world.running())
    num_more = 0 if parent is None else longest - len(parent.token_ids)
    if parent is not None and num_more > 0 and not parent.is_lost:
        world.fork(parent, [rng.randint(0, 1) for _ in range(rng.randint(1, num_more))])


def preempt(world, rng, longest, least):
    sequence = pick(rng, world.running())
    if sequence is not None:
        world.leave(sequence, rng.choice([Keep.SWAP, Keep.SWAP, Keep.GIVE_UP]))


def end(world, rng, longest, least):
    sequence = pick(rng, world.running())
    if sequence is not None:
        world.leave(sequence, Keep.CACHE)


def end_waiting(world, rng, longest, least):
    loading = [sequence for sequence in world.sequences if sequence.is_loading]
    sequence = pick(rng, world.waiting() + loading)
    if sequence is not None:
        world.end_waiting(sequence)


def send(world, rng, longest, least):
    if len(world.in_flight) < 2:
        world.send()


def store(world, rng, longest, least):
    world.submit_ops()
    world.end_op()


def wait(world, rng, longest, least):
    world.now_s += 1.0
    world.kv.expire_sessions(world.now_s)


COMMANDS = {
    add: 12,
    admit: 18,
    compute: 20,
    fork: 3,
    preempt: 5,
    end: 5,
    end_waiting: 1,
    send: 14,
    lambda world, *_: world.commit(): 12,
    store: 7,
    lambda world, rng, longest, least: world.resize(least + rng.randint(0, 12)): 1,
    wait: 2,
}
