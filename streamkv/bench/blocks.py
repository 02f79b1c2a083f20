"""`streamkv bench blocks`: what the books of KV blocks cost a step, for pools of several sizes.

Drives the KVManager as the scheduler does, without a device: so many sequences run, each computes a
token a step, and in each step the oldest ends and a new one takes its place, whose prompt begins
with what is known. Blocks that nobody runs hold cached prefixes, so what is taken is evicted.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections import deque
from collections.abc import Iterator
from itertools import count

import msgspec
import numpy as np

from ..core.kv.manager import KVManager
from ..core.kv.types import Keep
from ..core.sequence import Sequence
from ..errors import ConfigError
from ..protocol import Request, RowSampling, SamplingParams, StepOutput, pack_ints
from .options import BlocksConfig
from .report import Figures, medians, percentile, print_report

TARGET_US = 100.0
PROMPT_BLOCKS = 16
SHARED_BLOCKS = 8  # of a prompt: known from the first one on
CACHED_BLOCKS = 64  # of each prefix that fills the pool
OPERATIONS = ("grow", "publish", "arrive", "leave", "copies")


class Books:
    """One pool and its running sequences, the oldest first."""

    def __init__(self, num_blocks: int, options: BlocksConfig) -> None:
        self._block_size = options.block_size
        self._kv = KVManager(num_blocks, options.block_size, enable_prefix_caching=True)
        self._random = np.random.default_rng(options.sequences)
        self._shared = self._tokens(SHARED_BLOCKS)
        self._numbers = count()
        self._step_ids = count()
        for _ in range(num_blocks // CACHED_BLOCKS):
            self._leave(self._arrived(self._tokens(CACHED_BLOCKS)))
        self._running: deque[Sequence] = deque()
        for age in reversed(range(options.sequences)):
            sequence = self._arrived(self._prompt())
            for _ in range(age):
                self._advance(sequence)
            self._running.append(sequence)
            self._end_copies()

    def step(self) -> dict[str, float]:
        """One step; the seconds that each operation took."""
        kv, running, block_size = self._kv, self._running, self._block_size
        growing = [one for one in running if len(one.token_ids) % block_size == 0]
        arrival = self._sequence(self._prompt())
        moments = [time.perf_counter()]
        for sequence in growing:
            end = len(sequence.token_ids) + 1
            kv.grow(sequence, end)
        moments.append(time.perf_counter())
        filled = []
        for sequence in running:
            self._append(sequence)
            if sequence.num_computed_tokens % block_size == 0:
                filled.append(sequence)
        appended_s = time.perf_counter() - moments[-1]  # isn't counted: the scheduler's work
        for sequence in filled:
            kv.publish(sequence, sequence.num_computed_tokens)
        moments.append(time.perf_counter())
        self._arrive(arrival)
        moments.append(time.perf_counter())
        self._leave(running.popleft())
        moments.append(time.perf_counter())
        self._end_copies()
        moments.append(time.perf_counter())
        running.append(arrival)
        taken = [end - begin for begin, end in zip(moments, moments[1:], strict=False)]
        taken[OPERATIONS.index("publish")] -= appended_s
        return dict(zip(OPERATIONS, taken, strict=True))

    def check(self) -> None:
        """IntegrityError if the books are wrong."""
        self._kv.check_integrity(self._running)

    # --- what the scheduler does -----------------------------------------------------------------

    def _arrive(self, sequence: Sequence) -> None:
        """Admit it, and compute its prompt."""
        kv, num_tokens = self._kv, len(sequence.token_ids)
        match = kv.match(sequence)
        if kv.num_free_blocks_needed(sequence, match) > kv.pool.num_free:
            raise ConfigError("the pool is too small for the sequences that run")
        kv.share(sequence, match)
        kv.grow(sequence, num_tokens)
        sequence.num_computed_tokens = num_tokens
        kv.publish(sequence, num_tokens)

    def _leave(self, sequence: Sequence) -> None:
        self._kv.publish(sequence, sequence.num_computed_tokens, tail=True)
        self._kv.release(sequence, keep=Keep.CACHE)

    def _end_copies(self) -> None:
        """All copies of the step are made."""
        copies = self._kv.take_copies()
        if copies:
            done = pack_ints(copy.number for copy in copies)
            output = StepOutput(step_id=next(self._step_ids), sampled=b"", copies_done=done)
            self._kv.acknowledge(copies, output)

    def _append(self, sequence: Sequence) -> None:
        sequence.token_ids.append(len(sequence.token_ids))
        sequence.num_computed_tokens += 1

    def _advance(self, sequence: Sequence) -> None:
        """One step of one sequence, for the beginning."""
        if len(sequence.token_ids) % self._block_size == 0:
            self._kv.grow(sequence, len(sequence.token_ids) + 1)
        self._append(sequence)
        if sequence.num_computed_tokens % self._block_size == 0:
            self._kv.publish(sequence, sequence.num_computed_tokens)

    # --- sequences -------------------------------------------------------------------------------

    def _arrived(self, token_ids: list[int]) -> Sequence:
        sequence = self._sequence(token_ids)
        self._arrive(sequence)
        return sequence

    def _prompt(self) -> list[int]:
        return self._shared + self._tokens(PROMPT_BLOCKS - SHARED_BLOCKS)

    def _tokens(self, num_blocks: int) -> list[int]:
        drawn: list[int] = self._random.integers(0, 1 << 20, num_blocks * self._block_size).tolist()
        return drawn

    def _sequence(self, token_ids: list[int]) -> Sequence:
        number = next(self._numbers)
        request = Request(
            request_id=str(number),
            model="",
            prompt_token_ids=tuple(token_ids),
            sampling=_SAMPLING,
            seed=0,
            max_tokens=1 << 20,
        )
        return Sequence(
            request,
            0,
            arrival=number,
            token_ids=array("i", token_ids),
            end_token_ids=frozenset(),
            sampling=RowSampling.build(request, ()),
        )


_SAMPLING = SamplingParams()


def measure(options: BlocksConfig) -> dict[int, list[Figures]]:
    """Size of the pool → the figures of each round. ConfigError for a pool that is too small."""
    each = PROMPT_BLOCKS + -(-options.sequences // options.block_size) + 1
    least = options.sequences * each
    for num_blocks in options.num_blocks:
        if num_blocks < least:
            raise ConfigError(
                f"--num-blocks: expected at least {least}, which {options.sequences} sequences "
                f"take, got {num_blocks}"
            )
    books = {num_blocks: Books(num_blocks, options) for num_blocks in options.num_blocks}
    rounds: dict[int, list[Figures]] = {num_blocks: [] for num_blocks in books}
    gc.collect()
    gc.freeze()  # as a server does when it is ready
    try:
        for _ in range(options.rounds):
            for num_blocks, one in books.items():
                rounds[num_blocks].append(figures([one.step() for _ in range(options.steps)]))
    finally:
        gc.unfreeze()
    for one in books.values():
        one.check()
    return rounds


def figures(steps: list[dict[str, float]]) -> Figures:
    """Microseconds a step."""
    wholes = [1e6 * sum(step.values()) for step in steps]
    parts = {
        f"{name} us": percentile([1e6 * step[name] for step in steps], 0.5) for name in OPERATIONS
    }
    return {
        "step us": percentile(wholes, 0.5),
        "99 % us": percentile(wholes, 0.99),
        **parts,
    }


def rows(rounds: dict[int, list[Figures]]) -> Iterator[tuple[str, Figures]]:
    for num_blocks, runs in rounds.items():
        yield f"{num_blocks:,} blocks", medians(runs)


def verdict(figures: Figures) -> str:
    return "met" if figures["step us"] <= TARGET_US else "MISSED"


def bench_blocks(options: BlocksConfig) -> int:
    rounds = measure(options)
    shown = dict(rows(rounds))
    judged = [(f"{name}: {verdict(one)}", one) for name, one in shown.items()]
    title = f"{options.sequences} sequences, target {TARGET_US:.0f} us"
    details = {
        "config": msgspec.to_builtins(options),
        "target_us": TARGET_US,
        "medians": shown,
        "rounds": {str(num_blocks): runs for num_blocks, runs in rounds.items()},
    }
    print_report("blocks", title, judged, details)
    return 0
