"""Overload: many requests at once on a pool that holds a part of them, against one that holds all.

The pool's blocks hold `num_fitting` whole sequences, and as they begin smaller, more than those
are admitted, so that some have to step back. None may be refused, and each answer must be the one
of the big pool.
"""

from __future__ import annotations

import statistics
import time

from .client import answer_of
from .report import ONE_ROUND, Report
from .servers import Lab

TARGET = 0.70
BLOCK_SIZE = 16
SWAP_GIB = "2"
WAYS = BIG, SWAP, RECOMPUTE = "all fit", "with swap space", "without"


async def overload(
    lab: Lab,
    *,
    num_requests: int = 200,
    num_fitting: int = 40,
    input_len: int = 64,
    output_len: int = 64,
) -> Report:
    each = -(-(input_len + output_len) // BLOCK_SIZE)
    context = (
        "--block-size",
        str(BLOCK_SIZE),
        "--max-model-len",
        str(max(512, input_len + output_len)),
    )
    small = (*context, "--num-gpu-blocks-override", str(each * num_fitting))
    big = (*context, "--num-gpu-blocks-override", str(each * num_requests))
    report = Report(
        "overload",
        f"{num_requests} requests at once, {input_len} tokens in and {output_len} out; the pool "
        f"holds {num_fitting} of them ({each * num_fitting} blocks)",
    )
    async with (
        lab.server(*big) as all_fit,
        lab.server(*small, "--swap-space", SWAP_GIB) as swapping,
        lab.server(*small, "--swap-space", "0") as recomputing,
    ):
        clients = {
            BIG: all_fit.client,
            SWAP: swapping.client,
            RECOMPUTE: recomputing.client,
        }
        times: dict[str, list[float]] = {way: [] for way in clients}
        for client in clients.values():
            await client.ask(lab.prompts("overload warm-up").tokens(input_len), output_len)
        for number in range(lab.rounds):
            source = lab.prompts(f"overload {number}")
            prompts = source.prompts(num_requests, input_len)
            answers = {}
            first = number % len(WAYS)  # another in each round
            for way in (*WAYS[first:], *WAYS[:first]):
                lab.say(f"{report.name}: round {number + 1}, {way}")
                started_s = time.monotonic()
                streams = await clients[way].ask_all(
                    prompts, [output_len] * num_requests, num_requests
                )
                times[way].append(time.monotonic() - started_s)
                answers[way] = [*map(answer_of, streams)]
            for way in (SWAP, RECOMPUTE):
                report.compare(f"round {number}, {way}", answers[way], answers[BIG])
        counts = {way: (await clients[way].metrics())["num_preemptions_total"] for way in clients}
    for way in (SWAP, RECOMPUTE):
        # within a round: from one to the next other work of the machine changes
        ratios = [big_s / small_s for big_s, small_s in zip(times[BIG], times[way], strict=True)]
        what = f"throughput {way} / where all fit"
        report.add(what, statistics.median(ratios), "%", at_least=TARGET)
        report.notes.append(f"{what}, by round: {', '.join(f'{one:.0%}' for one in ratios)}")
    rate = num_requests * output_len / statistics.median(times[BIG])
    report.add("output tokens a second where all fit", rate)
    for way, count in counts.items():
        report.add(f"preemptions, {way}", count)
    report.notes.append("none was refused")  # one that is ends the run
    if lab.rounds == 1:
        report.notes.append(ONE_ROUND)
    return report
