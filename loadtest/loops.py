"""Closed and open loops: when requests are sent.

Closed: so many clients, each sends its next request when its last one ended. Open: requests come
at random moments (Poisson) whatever the server does, as those of many strangers do; times count
from when a request was due. Invariant: every request ends, or the round raises RequestFailed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from .stream import Stream, summarize

Prompt = TypeVar("Prompt")
Send = Callable[[Prompt, float], Awaitable[Stream]]  # prompt, when it is due


async def closed_loop(
    send: Send[Prompt], prompts: Sequence[Prompt], concurrency: int
) -> dict[str, float]:
    waiting, done = list(prompts), list[Stream]()
    started_s = time.monotonic()

    async def client() -> None:
        while waiting:
            done.append(await send(waiting.pop(), time.monotonic()))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return summarize(done, time.monotonic() - started_s)


async def open_loop(
    send: Send[Prompt], prompts: Sequence[Prompt], rate: float, seed: str
) -> dict[str, float]:
    """`rate`: requests per second, on average."""
    source = random.Random(seed)
    done: list[Stream] = []
    started_s = due_s = time.monotonic()

    async def client(prompt: Prompt, due_s: float) -> None:
        done.append(await send(prompt, due_s))

    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            await asyncio.sleep(due_s - time.monotonic())
            group.create_task(client(prompt, due_s))
            due_s += source.expovariate(rate)
    return summarize(done, time.monotonic() - started_s)
