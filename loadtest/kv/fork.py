"""Fork: blocks held by one prompt with several choices, against as many separate prompts.

Blocks are sampled while requests run, more often than steps end. What separate ones take is
known besides: each holds its prompt and answer, but not the KV of the answer's last token.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable
from typing import Any

from .client import Client, answer_of
from .metrics import BLOCKS_HELD, Sampler
from .report import Report
from .servers import Lab

TARGET = 0.20
SAMPLE_S = 0.01
FLAGS = ("--num-gpu-blocks-override", "4096", "--max-model-len", "2048")
SAMPLING = {"temperature": 0.8, "seed": 7}


async def fork(
    lab: Lab, *, num_choices: int = 8, input_len: int = 1000, output_len: int = 64
) -> Report:
    report = Report(
        "fork", f"n={num_choices} on {input_len} tokens, {output_len} out, {lab.rounds} rounds"
    )
    together, apart = [], []
    async with lab.one_server(*FLAGS) as client:
        await client.ask(lab.prompts("fork warm-up").tokens(input_len), output_len)
        block_size = await client.block_size()
        for number in range(lab.rounds):
            lab.say(f"{report.name}: round {number + 1}")
            source = lab.prompts(f"fork {number}")
            others = source.prompts(num_choices, input_len)
            asked = (client.ask(prompt, output_len, **SAMPLING) for prompt in others)
            apart.append((await peak_of(client, asyncio.gather(*asked)))[0])
            prompt = source.tokens(input_len)
            peak, stream = await peak_of(
                client, client.ask(prompt, output_len, n=num_choices, **SAMPLING)
            )
            together.append(peak)
            alone = await client.ask_afresh(prompt, output_len, **SAMPLING)
            report.compare("first choice", answer_of(stream)[:1], answer_of(alone))
            greedy = await client.ask(prompt, output_len, n=num_choices)
            right = answer_of(await client.ask_afresh(prompt, output_len))
            report.compare("greedy choices", answer_of(greedy), right * num_choices)
    known = num_choices * -(-(input_len + output_len - 1) // block_size)
    held, separate = statistics.median(together), statistics.median(apart)
    report.add("blocks held: forked / separate", held / separate, "%", at_most=TARGET)
    report.add("forked / what separate ones take by count", held / known, "%")
    report.add("held, forked", held, "blocks")
    report.add("held, separate", separate, "blocks")
    report.add("separate, by count", known, "blocks")
    return report


async def peak_of(client: Client, work: Awaitable[Any]) -> tuple[float, Any]:
    """The most blocks held while something is done, and what that gave."""
    async with Sampler(client.metrics, SAMPLE_S) as sampler:
        result = await work
    return sampler.peak(BLOCKS_HELD), result
