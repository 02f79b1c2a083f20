"""Prefix: the first token of a prompt whose beginning is known, against that of a new prompt.

One request at a time, hits and new prompts of equal length in turns. Each answer to a hit is
compared with the answer to the same prompt when nothing is shared.
"""

from __future__ import annotations

import statistics

from .client import answer_of
from .report import Report
from .servers import Lab

TARGET = 0.25
OUTPUT_LEN = 4
FLAGS = ("--num-gpu-blocks-override", "4096", "--max-model-len", "2048")


async def prefix(lab: Lab, *, pairs: int = 12, shared_len: int = 512, own_len: int = 32) -> Report:
    source = lab.prompts("prefix")
    system = source.tokens(shared_len)
    hits = [system + source.tokens(own_len) for _ in range(pairs)]
    fresh = source.prompts(pairs, shared_len + own_len)
    report = Report(
        "prefix", f"prompts of {shared_len + own_len} tokens, of hits {shared_len} are shared"
    )
    async with lab.one_server(*FLAGS) as client:
        lab.say("prefix: hits and new prompts, in turns")
        await client.ask(source.tokens(shared_len + own_len), OUTPUT_LEN)  # to warm up
        await client.ask(system + source.tokens(own_len), OUTPUT_LEN)
        of_hits, of_fresh = [], []
        for hit, new in zip(hits, fresh, strict=True):
            of_hits.append(await client.ask(hit, OUTPUT_LEN))
            of_fresh.append(await client.ask(new, OUTPUT_LEN))
        block_size = await client.block_size()
        expected = [await client.ask_afresh(hit, OUTPUT_LEN) for hit in hits]
    hit_s = statistics.median(stream.first_event_s for stream in of_hits)
    fresh_s = statistics.median(stream.first_event_s for stream in of_fresh)
    report.add("first token of a hit / of a new prompt", hit_s / fresh_s, "%", at_most=TARGET)
    report.add("first token of a hit", 1e3 * hit_s, "ms")
    report.add("first token of a new prompt", 1e3 * fresh_s, "ms")
    found = min(stream.cached_tokens for stream in of_hits)
    least = shared_len // block_size * block_size
    report.add("tokens found of each hit", found, at_least=least)
    report.compare("hit", [*map(answer_of, of_hits)], [*map(answer_of, expected)])
    return report
