"""Simulated requests through the scheduler: `python -m core.simulation --requests 1000000`.

(From the repository's root, with `PYTHONPATH=.:tests`.) Requests come in episodes of 250, each with
its own pool, block size, host memory, store, budget and load; some are beams, some of many choices,
some have a grammar or want scores of their prompts; some are cancelled on the way, some ended as a
stop string would end them, some paused. Meanwhile copies, reads and writes fail, masks come late,
and the pool is resized. Each episode runs at overlap depth 0 and 1; each answer is
compared with the sequential oracle, and at the end everything must be free.

`--steps N` gives the state machine of machine.py N commands instead.
"""

from __future__ import annotations

import argparse
import random
import zlib
from typing import Any, NamedTuple

from core.harness import EOS, VOCAB_SIZE, Harness
from fakes import FakeStore

from streamkv.core.sequence import Sequence
from streamkv.errors import CapacityError, InvalidRequestError
from streamkv.protocol import CopyKind, FinishReason
from streamkv.step_bytes import encode_step

EPISODE_LEN = 250
SEVERAL: tuple[dict[str, Any], ...] = ({"n": 3}, {"n": 1, "best_of": 2}, {"n": 5})
BEAMS: tuple[dict[str, Any], ...] = (
    {"n": 2},
    {"n": 1, "best_of": 3, "length_penalty": 0.0},
    {"n": 3, "early_stopping": True},
    {"n": 4, "early_stopping": "never", "length_penalty": 2.0},
)


class Result(NamedTuple):
    num_requests: int
    num_steps: int
    num_preemptions: int
    num_swaps: int
    num_hit_tokens: int
    num_copies: int
    num_deferrals: int
    num_forced_tokens: int
    num_scores: int
    steps_crc: int  # of all StepInputs, encoded


class Arrival(NamedTuple):
    prompt_token_ids: list[int]
    max_tokens: int
    seed: int
    priority: int
    cache_salt: str
    session_id: str
    grammar: int | None
    wants_progress: bool
    sampling: dict[str, Any]
    ends_after: int  # committed tokens after which it is cancelled, -1 = never


def draw_arrival(rng: random.Random, max_num_tokens: int) -> Arrival:
    max_tokens = rng.randint(1, max_num_tokens * 3 // 4)
    num_prompt_tokens = rng.randint(1, max_num_tokens - max_tokens)
    shared = [rng.randrange(3)] * rng.randint(0, num_prompt_tokens)
    own = [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens - len(shared))]
    sampling: dict[str, Any] = {"stop_token_ids": rng.choice(([], [], [5, 6]))}
    kind, grammar = rng.random(), None
    if rng.random() < 0.1:
        sampling["prompt_logprobs"] = rng.choice((0, 2))
    if kind < 0.1:
        sampling |= {"use_beam_search": True, **rng.choice(BEAMS)}
    else:
        sampling["temperature"] = rng.choice((0.0, 1.0))
        if kind > 0.8:
            grammar = rng.randrange(1000)
        else:
            sampling["min_tokens"] = rng.choice((0, 0, min(3, max_tokens)))
        if kind < 0.3 or kind > 0.95:
            sampling |= rng.choice(SEVERAL)
    return Arrival(
        prompt_token_ids=shared + own,
        max_tokens=max_tokens,
        seed=rng.randrange(100),
        priority=rng.choice((0, 0, 0, 1)),
        cache_salt=rng.choice(("", "", "tenant")),
        session_id=rng.choice(("", "", "a", "b")),
        grammar=grammar,
        wants_progress=rng.random() < 0.2,
        sampling=sampling,
        ends_after=rng.randint(0, max_tokens) if rng.random() < 0.15 else -1,
    )


def run_episode(seed: int, depth: int, num_requests: int = EPISODE_LEN) -> Result:
    """The same seed is the same requests and shapes, whatever the depth."""
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4, 16))
    max_num_tokens = rng.choice((12, 40))
    num_blocks = -(-max_num_tokens // block_size) * rng.choice((2, 3, 3, 4, 4, 6, 12)) // 2
    has_store = rng.random() < 0.25
    harness = Harness(
        depth=depth,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=rng.choice((1, 3, 16, 16, 16)),
        max_num_batched_tokens=rng.choice((1, 7, 64, 64, 64)),
        eos_token_ids=frozenset({EOS}),
        enable_prefix_caching=rng.random() < 0.8,
        num_host_slots=rng.choice((4, 16)) if has_store else rng.choice((0, 3, 16, 64)),
        copy_delay=rng.choice((0, 0, 2)),
        store=FakeStore() if has_store else None,
        max_copies=rng.choice((1, 3, 32)),
        max_session_blocks=rng.choice((0, num_blocks // 4)),
        preemption_mode=rng.choice(("auto", "swap", "swap", "recompute")),
        copy_block_s=0.0001,
        token_s=rng.choice((0.00001, 0.0001)),
        min_lookahead=rng.choice((0, 0, 0, 0, 0, 4)),
        vocab_size=rng.choice((VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, 3)),
        answers_at_once=rng.choice((3, 1000)),
        forced_at_once=rng.choice((1, 3, 1000)),
        masks_are_late=rng.random() < 0.5,
        forces=rng.choice(("never", "sometimes", "always")),
        check_every=100,
    )
    arrivals = [draw_arrival(rng, max_num_tokens) for _ in range(num_requests)]
    steps_crc = _Episode(harness, arrivals, rng.choice((1, 8, 40)), rng).run()
    scheduler = harness.scheduler
    return Result(
        num_requests,
        harness.runner.num_steps,
        scheduler.num_preemptions,
        scheduler.num_swaps,
        scheduler.num_prefix_hit_tokens,
        sum(harness.runner.memory.num_copies.values()),
        harness.runner.num_deferrals,
        harness.num_forced,
        sum(map(len, harness.scores.values())),
        steps_crc,
    )


class _Episode:
    """New requests come while fewer than `num_at_once` wait."""

    def __init__(
        self, harness: Harness, arrivals: list[Arrival], num_at_once: int, rng: random.Random
    ) -> None:
        self.harness = harness
        self.pending = arrivals[::-1]
        self.num_at_once = num_at_once
        self.rng = rng
        self.num_blocks = harness.scheduler.num_blocks
        self.ends_after: dict[Sequence, int] = {}
        self.sequences: list[Sequence] = []
        self.now_s = 0.0
        rate = rng.choice((0.0, 0.0, 0.2))
        harness.runner.memory.fails_copy = lambda number, kind: (
            kind is not CopyKind.BLOCK and rng.random() < rate
        )
        if harness.store is not None:
            harness.store.fails = lambda op: rng.random() < rate

    def run(self) -> int:
        """Returns the CRC-32 of all steps."""
        harness, steps_crc = self.harness, 0
        scheduler = harness.scheduler
        while self.pending or scheduler.has_work or scheduler.is_busy or scheduler.num_paused:
            while self.pending and scheduler.num_waiting < self.num_at_once:
                self._add(self.pending.pop())
            self._end_some()
            if self.rng.random() < 0.1:
                self._pause_or_resume()
            if harness.grammars.due and self.rng.random() < 0.7:
                harness.make_masks(self.rng.randint(1, 4))
            if self.rng.random() < 0.05:
                self._disturb()
            harness.fill()
            if harness.in_flight:
                steps_crc = zlib.crc32(encode_step(harness.in_flight[0]), steps_crc)
                harness.commit()
            elif scheduler.has_answers:
                harness.take_answers()
            elif scheduler.has_forced:
                harness.take_forced()
            elif harness.store is not None:
                harness.deliver()
            if harness.store is not None and self.rng.random() < 0.3:
                harness.deliver(self.rng.randint(1, 4))
        self._check_end()
        return steps_crc

    def _add(self, arrival: Arrival) -> None:
        fields = arrival._asdict()
        last_token, sampling = fields.pop("ends_after"), fields.pop("sampling")
        self.harness.scheduler.resize(self.num_blocks)
        try:
            added = self.harness.add(**fields, **sampling)
        except InvalidRequestError:
            assert sampling["use_beam_search"]
            added = self.harness.add(**fields)
        self.sequences += added
        if last_token >= 0:
            self.ends_after.update(dict.fromkeys(added, last_token))

    def _end_some(self) -> None:
        harness = self.harness
        for sequence in [s for s, end in self.ends_after.items() if s.num_output_tokens >= end]:
            del self.ends_after[sequence]
            stops = sequence.num_output_tokens and not sequence.is_beam
            if sequence in harness.live:
                harness.finish(sequence, FinishReason.STOP if stops else FinishReason.ABORT)
                if sequence.is_beam:  # it may have ended, and been told a part
                    self.sequences = [s for s in self.sequences if s.group is not sequence.group]
                else:
                    output = sequence.output_token_ids  # STOP, but not where the oracle stops
                    assert output == harness.oracle(sequence)[: len(output)]
                    self.sequences.remove(sequence)

    def _pause_or_resume(self) -> None:
        paused = list(self.harness.scheduler._roster.paused)
        if self.harness.live and self.rng.random() < 0.4:
            self.harness.pause(self.rng.choice(list(self.harness.live)))
        elif paused:
            self.harness.resume(self.rng.choice(paused).sequences[0])

    def _disturb(self) -> None:
        rng, harness = self.rng, self.harness
        self.now_s += rng.choice((0.0, 1.0, 20.0))
        harness.scheduler.advance_clock(self.now_s)
        if harness.store is not None and harness.store.records:
            harness.store.drop(rng.choice(list(harness.store.records)))
        try:
            harness.scheduler.resize(rng.randint(max(1, self.num_blocks // 2), self.num_blocks))
        except CapacityError:
            assert harness.live

    def _check_end(self) -> None:
        harness = self.harness
        assert harness.live == {}
        assert harness.scheduler.num_held_blocks == 0
        harness.scheduler.advance_clock(self.now_s + 1000.0)
        stats = harness.scheduler.kv_stats
        assert (stats.num_sessions, stats.num_pinned_blocks) == (0, 0)
        harness.scheduler.check_integrity()
        for sequence in self.sequences:
            harness.check_answer(sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps:
        from core.machine import run_machine

        seen = run_machine(args.steps, shrinks=True)
        print(*(f"{number} {name}," for name, number in seen.items()), "all answers as expected")
        return
    totals = [0] * (len(Result._fields) - 1)
    for episode in range(-(-args.requests // EPISODE_LEN)):
        for depth in (0, 1):
            result = run_episode(args.seed + episode, depth)
            totals = [total + number for total, number in zip(totals, result[:-1], strict=True)]
    print(
        f"{totals[0] // 2} requests at depths 0 and 1: {totals[1]} steps, {totals[2]} preemptions "
        f"({totals[3]} swaps), {totals[4]} prefix hit tokens, {totals[5]} copies, "
        f"{totals[6]} deferrals, {totals[7]} forced tokens, {totals[8]} scores; "
        "all answers equal the oracle's"
    )


if __name__ == "__main__":
    main()
