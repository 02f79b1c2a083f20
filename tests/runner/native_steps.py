"""Steps for a native runner without a model: made by hand, and at random."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

from runner.support import GREEDY

from streamkv._cpu import KvCache, MaskBoard, Runner, Team
from streamkv.protocol import MAX_SCORED, Ask, RowAdded, RowSampling, StepInput, pack_ints

NUM_ROWS = 6
MAX_MODEL_LEN = 50  # the last block of 4 is not full
BLOCK_SIZE = 4
NUM_BLOCKS = 200
VOCAB_SIZE = 64
MAX_TOKENS = 80
NUM_SLOTS = 12


def small_cache() -> KvCache:
    return KvCache("float32", NUM_BLOCKS, 2, 1, BLOCK_SIZE, 16, NUM_SLOTS)


def mask_board() -> MaskBoard:
    """With a slot for each row."""
    board = MaskBoard(VOCAB_SIZE)
    assert [board.add() for _ in range(NUM_ROWS)] == [*range(NUM_ROWS)]
    return board


def native_runner(
    cache: KvCache | None = None, num_threads: int = 2, masks: MaskBoard | None = None
) -> Runner:
    """It waits for no mask."""
    return Runner(
        None,
        Team(num_threads),
        cache or small_cache(),
        0,
        num_rows=NUM_ROWS,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        max_tokens=MAX_TOKENS,
        max_scored=MAX_SCORED,
        masks=masks,
    )


def make_step(step_id: int, scheduled=(), *, removed=(), added=(), appended=(), copies=()):
    """`added`: RowAdded, or (row, token ids, block ids) of a greedy row. `copies`: (number, kind,
    source, target)."""
    return StepInput(
        step_id=step_id,
        removed=pack_ints(removed),
        added=tuple(
            one
            if isinstance(one, RowAdded)
            else RowAdded(one[0], len(one[1]), pack_ints(one[1]), pack_ints(one[2]), GREEDY)
            for one in added
        ),
        appended=pack_ints(value for pair in appended for value in pair),
        scheduled=pack_ints(value for entry in scheduled for value in entry),
        copies=pack_ints(value for copy in copies for value in copy),
    )


@dataclass
class _Running:
    num_tokens: int
    num_computed: int
    num_blocks: int
    num_prompt_tokens: int
    is_scored: bool
    deferred_at: int = -1


@dataclass
class RandomSteps:
    """Steps as a scheduler could send them, and some that only the protocol allows."""

    rng: random.Random
    has_masks: bool = False  # each row has its slot of `mask_board`
    running: dict[int, _Running] = field(default_factory=dict)
    step_id: int = 0

    def next(self) -> StepInput:
        removed = [row for row in self.running if self.rng.random() < 0.08]
        for row in removed:
            del self.running[row]
        free = [row for row in range(NUM_ROWS) if row not in self.running]
        added = [self.add(row) for row in free if self.rng.random() < 0.3]
        appended: list[tuple[int, int]] = []
        scheduled: list[tuple[int, ...]] = []
        num_tokens = num_scored = 0
        for row in self.rng.sample(list(self.running), len(self.running)):
            if self.rng.random() < 0.8:
                one = self._schedule(row, MAX_TOKENS - num_tokens, appended)
                num_tokens += sum(entry[2] for entry in one)
                if self.running[row].is_scored and num_scored + sum(e[2] for e in one) < MAX_SCORED:
                    one = [(*entry[:3], entry[3] | Ask.SCORE) for entry in one]
                    num_scored += sum(entry[2] for entry in one)
                scheduled += one
        self.step_id += 1
        return make_step(self.step_id, scheduled, removed=removed, added=added, appended=appended)

    def add(self, row: int) -> RowAdded:
        rng = self.rng
        num_tokens = rng.randrange(1, 25)
        num_blocks = -(-num_tokens // BLOCK_SIZE) + rng.randrange(2)
        num_prompt_tokens = rng.randrange(1, num_tokens + 1)
        sampling = self.sampling(row if self.has_masks else -1)
        is_scored = sampling.num_prompt_logprobs >= 0
        self.running[row] = _Running(num_tokens, 0, num_blocks, num_prompt_tokens, is_scored)
        return RowAdded(
            row=row,
            num_prompt_tokens=num_prompt_tokens,
            token_ids=pack_ints(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)),
            block_ids=pack_ints(rng.randrange(NUM_BLOCKS) for _ in range(num_blocks)),
            sampling=sampling,
        )

    def defer(self, row: int, position: int) -> None:
        """The step made last gave it no token for that position; maybe an earlier one did not
        either. Later steps go on as if it had, and sooner or later one asks again."""
        state = self.running[row]
        if state.deferred_at < 0:
            state.deferred_at = position

    def _schedule(
        self, row: int, budget: int, appended: list[tuple[int, int]]
    ) -> list[tuple[int, ...]]:
        """The next tokens of a row, all or a few, if there are any and they fit."""
        rng, state = self.rng, self.running[row]
        if state.deferred_at >= 0 and rng.random() < 0.6:
            state.num_tokens, state.num_computed = state.deferred_at, state.deferred_at - 1
            state.deferred_at = -1
        start = state.num_computed
        left = min(min(state.num_tokens, MAX_MODEL_LEN) - start, budget)
        if left <= 0:
            return []
        end = start + (left if rng.random() < 0.6 else rng.randrange(1, left + 1))
        while end > state.num_blocks * BLOCK_SIZE:
            appended.append((row, rng.randrange(NUM_BLOCKS)))
            state.num_blocks += 1
        asks = end == state.num_tokens
        state.num_computed = end
        state.num_tokens += asks
        return [(row, start, end - start, Ask.SAMPLE if asks else Ask.NONE)]

    def sampling(self, slot: int = -1) -> RowSampling:
        rng = self.rng
        bias_ids = rng.sample(range(VOCAB_SIZE + 5), rng.choice([0, 0, 3]))
        return RowSampling(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.8]),
            top_k=rng.choice([0, 5]),
            min_p=rng.choice([0.0, 0.05]),
            presence_penalty=rng.choice([0.0, 0.0, 1.5]),
            frequency_penalty=rng.choice([0.0, 0.0, -0.75]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.5]),
            seed=rng.randrange(-(2**63), 2**63),
            choice=rng.randrange(3),
            min_tokens=rng.choice([0, 4]),
            num_logprobs=rng.choice([-1, -1, 0, 3]),
            min_tokens_stop_ids=pack_ints(
                rng.choice([(), (1, 2, VOCAB_SIZE + 9), range(VOCAB_SIZE), range(60)])
            ),
            bias_ids=pack_ints(bias_ids),
            bias_values=array("f", (rng.uniform(-5, 5) for _ in bias_ids)).tobytes(),
            allowed_ids=pack_ints(rng.choice([(), (), range(3, VOCAB_SIZE + 7, 2), (7, 9)])),
            bad_words=pack_ints(rng.choice([(), (), (1, 5, 2, 7, 9), (3, 1, 2, VOCAB_SIZE)])),
            mask_slot=slot if rng.random() < 0.6 else -1,
            num_prompt_logprobs=rng.choice([-1, 0, 2]),
        )
