"""Chats: conversations of several turns, with prefix caching and without.

Each turn's prompt is all that was said before and a new message. The two servers get the same
messages in turns; their answers must be equal, so they do equal work.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from .client import Client, Prompt, answer_of
from .report import ONE_ROUND, Report
from .servers import Lab

TARGET = 2.0
FLAGS = ("--num-gpu-blocks-override", "4096", "--max-model-len", "4096")
Chat = list[Prompt]  # the user's messages


async def chats(
    lab: Lab,
    *,
    num_chats: int = 6,
    num_turns: int = 8,
    message_len: int = 128,
    output_len: int = 32,
) -> Report:
    report = Report(
        "chats",
        f"{num_chats} at once, {num_turns} turns of {message_len} tokens in and {output_len} out",
    )
    times: dict[str, list[float]] = {"on": [], "off": []}
    found = asked = 0
    async with (
        lab.server(*FLAGS, "--enable-prefix-caching") as on,
        lab.server(*FLAGS, "--no-enable-prefix-caching") as off,
    ):
        for client in (on.client, off.client):
            await client.ask(lab.prompts("chats warm-up").tokens(message_len), output_len)
        for number in range(lab.rounds):
            source = lab.prompts(f"chats {number}")
            said = [source.prompts(num_turns, message_len) for _ in range(num_chats)]
            answers = {}
            ways = {"on": on.client, "off": off.client}
            for way in list(ways)[:: 1 if number % 2 == 0 else -1]:
                lab.say(f"{report.name}: round {number + 1}, caching {way}")
                started_s = time.monotonic()
                answers[way], cached, total = await talk(ways[way], said, output_len)
                times[way].append(time.monotonic() - started_s)
                if way == "on":
                    found, asked = found + cached, asked + total
            report.compare(f"round {number}, turn by turn", answers["on"], answers["off"])
    num_tokens = num_chats * num_turns * output_len
    rates = {way: num_tokens / statistics.median(taken) for way, taken in times.items()}
    report.add("throughput, caching on / off", rates["on"] / rates["off"], "x", at_least=TARGET)
    for way, rate in rates.items():
        report.add(f"output tokens a second, caching {way}", rate)
    report.add("prompt tokens found, caching on", found / asked, "%")
    if lab.rounds == 1:
        report.notes.append(ONE_ROUND)
    return report


async def talk(
    client: Client, chats: list[Chat], output_len: int
) -> tuple[list[list[list[int]]], int, int]:
    """All chats at once: their answers, and how many of how many prompt tokens were found."""
    cached = total = 0

    async def one(messages: Chat) -> list[list[list[int]]]:
        nonlocal cached, total
        history: list[int] = []
        answers = []
        for message in messages:
            history += message
            stream = await client.ask(history, output_len)
            answers.append(answer_of(stream))
            history += answers[-1][0]
            cached, total = cached + stream.cached_tokens, total + stream.prompt_tokens
        return answers

    done = await asyncio.gather(*map(one, chats))
    return [answer for answers in done for answer in answers], cached, total
