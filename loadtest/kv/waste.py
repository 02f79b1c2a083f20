"""Waste: slots of held blocks that hold no token, while requests of a chat's lengths come and go.

Prompts have a log-normal length of median 200 and mean 300, answers of median 130 and mean 200
(as in ShareGPT's conversations, the longest cut off); a closed loop, nothing shared.
"""

from __future__ import annotations

from ..stream import percentile
from .metrics import BLOCKS_HELD, Sampler
from .report import Report
from .servers import Lab

TARGET = 0.04
SAMPLE_S = 0.1
FLAGS = ("--num-gpu-blocks-override", "4096", "--max-model-len", "2048")


async def waste(lab: Lab, *, num_requests: int = 96, concurrency: int = 32) -> Report:
    source = lab.prompts("waste")
    input_lens = source.lengths(num_requests, median=200, mean=300, least=8, most=1200)
    output_lens = source.lengths(num_requests, median=130, mean=200, least=4, most=600)
    prompts = [source.tokens(length) for length in input_lens]
    report = Report(
        "waste",
        f"{num_requests} requests, {concurrency} at once, {mean(input_lens):.0f} tokens in and "
        f"{mean(output_lens):.0f} out on average",
    )
    async with lab.one_server(*FLAGS) as client:
        lab.say("waste: requests come and go")
        sampler = Sampler(client.metrics, SAMPLE_S)
        async with sampler:
            await client.ask_all(prompts, output_lens, concurrency)
    shares = sampler.waste()
    report.add("empty slots in held blocks", sampler.mean_waste(), "%", at_most=TARGET)
    report.add("in the median sample", percentile(shares, 0.5), "%")
    report.add("in 99 of 100 samples at most", percentile(shares, 0.99), "%")
    report.add("blocks held at most", sampler.peak(BLOCKS_HELD))
    report.add("samples", len(shares))
    return report


def mean(lengths: list[int]) -> float:
    return sum(lengths) / len(lengths)
