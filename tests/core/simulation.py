"""Simulated requests through the scheduler: `python -m core.simulation --requests 1000000`.

(From the repository's root, with `PYTHONPATH=.:tests`.) Requests come in episodes of 250, each with
its own pool, block size, budget and load, some cancelled on the way, some ended as a stop string
would end them. Each episode runs at overlap depth 0 and 1; each answer is compared with the
sequential oracle, and at the end everything must be free.
"""

from __future__ import annotations

import argparse
import random
import zlib
from typing import NamedTuple

from core.harness import EOS, VOCAB_SIZE, Harness

from streamkv.core.sequence import Sequence
from streamkv.protocol import FinishReason
from streamkv.step_bytes import encode_step

EPISODE_LEN = 250


class Result(NamedTuple):
    num_requests: int
    num_steps: int
    num_preemptions: int
    num_hit_tokens: int
    steps_crc: int  # of all StepInputs, encoded


class Arrival(NamedTuple):
    prompt_token_ids: list[int]
    max_tokens: int
    n: int
    temperature: float
    seed: int
    priority: int
    cache_salt: str
    min_tokens: int
    stop_token_ids: list[int]
    ends_after: int  # committed tokens after which it is cancelled, -1 = never


def draw_arrival(rng: random.Random, max_num_tokens: int) -> Arrival:
    max_tokens = rng.randint(1, max_num_tokens * 3 // 4)
    num_prompt_tokens = rng.randint(1, max_num_tokens - max_tokens)
    shared = [rng.randrange(3)] * rng.randint(0, num_prompt_tokens)
    own = [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens - len(shared))]
    return Arrival(
        prompt_token_ids=shared + own,
        max_tokens=max_tokens,
        n=rng.choice((1, 1, 1, 1, 3)),
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(100),
        priority=rng.choice((0, 0, 0, 1)),
        cache_salt=rng.choice(("", "", "tenant")),
        min_tokens=rng.choice((0, 0, min(3, max_tokens))),
        stop_token_ids=rng.choice(([], [], [5, 6])),
        ends_after=rng.randint(0, max_tokens) if rng.random() < 0.15 else -1,
    )


def run_episode(seed: int, depth: int, num_requests: int = EPISODE_LEN) -> Result:
    """The same seed is the same requests and shapes, whatever the depth."""
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4, 16))
    max_num_tokens = rng.choice((12, 40))
    num_blocks = -(-max_num_tokens // block_size) * rng.choice((1, 2, 2, 3, 8))
    harness = Harness(
        depth=depth,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=rng.choice((1, 3, 16)),
        max_num_batched_tokens=rng.choice((1, 7, 64)),
        eos_token_ids=frozenset({EOS}),
        enable_prefix_caching=rng.random() < 0.8,
        check_every=50,
    )
    arrivals = [draw_arrival(rng, max_num_tokens) for _ in range(num_requests)]
    steps_crc = _run(harness, arrivals, num_at_once=rng.choice((1, 4, 40)))
    scheduler = harness.scheduler
    return Result(
        num_requests,
        harness.runner.num_steps,
        scheduler.num_preemptions,
        scheduler.num_prefix_hit_tokens,
        steps_crc,
    )


def _run(harness: Harness, arrivals: list[Arrival], *, num_at_once: int) -> int:
    """New requests come while fewer than `num_at_once` wait. Returns the CRC-32 of all steps."""
    ends_after: dict[Sequence, int] = {}
    sequences: list[Sequence] = []
    steps_crc = 0
    pending = arrivals[::-1]
    while pending or harness.scheduler.has_work:
        while pending and harness.scheduler.num_waiting < num_at_once:
            arrival = pending.pop()._asdict()
            last_token = arrival.pop("ends_after")
            added = harness.add(**arrival)
            sequences += added
            if last_token >= 0:
                ends_after.update(dict.fromkeys(added, last_token))
        for sequence in [s for s, end in ends_after.items() if s.num_output_tokens >= end]:
            del ends_after[sequence]
            reason = FinishReason.STOP if sequence.num_output_tokens else FinishReason.ABORT
            if sequence in harness.live:
                harness.finish(sequence, reason)
                output = sequence.output_token_ids  # STOP, but not where the oracle stops
                assert output == harness.oracle(sequence)[: len(output)]
                sequences.remove(sequence)
        harness.fill()
        if harness.in_flight:
            steps_crc = zlib.crc32(encode_step(harness.in_flight[0]), steps_crc)
            harness.commit()
    assert harness.live == {}
    assert harness.scheduler.num_held_blocks == 0
    for sequence in sequences:
        harness.check_answer(sequence)
    return steps_crc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    totals = [0, 0, 0, 0]
    for episode in range(-(-args.requests // EPISODE_LEN)):
        for depth in (0, 1):
            result = run_episode(args.seed + episode, depth)
            totals = [total + number for total, number in zip(totals, result[:4], strict=True)]
    print(
        f"{totals[0] // 2} requests at depths 0 and 1: {totals[1]} steps, "
        f"{totals[2]} preemptions, {totals[3]} prefix hit tokens; all answers equal the oracle's"
    )


if __name__ == "__main__":
    main()
