"""One server, asked with prompts of tokens.

Greedy and of fixed length unless said otherwise, so that equal prompts have equal answers and all
servers do equal work; answers are token ids. Invariant: an answer is as long as it was asked for,
or RequestFailed.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from typing import Any

from ..sse_client import get, stream_sse
from ..stream import RequestFailed, Stream
from .metrics import BLOCK_SIZE, Metrics, parse_metrics

Prompt = Sequence[int]
NUM_UNUSUAL = 1000  # the first ids of a vocabulary, often special or bytes, are left out


class Client:
    """Asks; knows nothing about how the server was started."""

    def __init__(self, url: str, *, api_key: str = "none", model: str | None = None) -> None:
        self.url = url
        self._api_key = api_key
        self._body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        if model:
            self._body["model"] = model

    async def ask(self, prompt: Prompt, num_tokens: int, **fields: Any) -> Stream:
        """The answer, of `num_tokens` for each choice."""
        body = {**self._body, "prompt": list(prompt), "max_tokens": num_tokens, **fields}
        stream = await stream_sse(
            self.url, "/v1/completions", body, self._api_key, time.monotonic()
        )
        lengths = sorted(map(len, stream.token_ids.values()))
        if lengths != [num_tokens] * fields.get("n", 1):
            raise RequestFailed(
                f"expected {fields.get('n', 1)} x {num_tokens} token ids, got {lengths}: does the "
                "server honour ignore_eos and return_token_ids?"
            )
        return stream

    async def ask_afresh(self, prompt: Prompt, num_tokens: int, **fields: Any) -> Stream:
        """The same, with nothing shared: what the answer has to be."""
        salt = f"{random.SystemRandom().getrandbits(64):x}"
        stream = await self.ask(prompt, num_tokens, cache_salt=salt, **fields)
        if stream.cached_tokens:
            raise RequestFailed(
                f"expected nothing cached with a cache_salt of its own, got {stream.cached_tokens}"
            )
        return stream

    async def ask_all(
        self, prompts: Sequence[Prompt], num_tokens: Sequence[int], concurrency: int
    ) -> list[Stream]:
        """A closed loop: answers in the order of the prompts."""
        waiting = list(enumerate(zip(prompts, num_tokens, strict=True)))[::-1]
        answers: dict[int, Stream] = {}

        async def worker() -> None:
            while waiting:
                number, (prompt, count) = waiting.pop()
                answers[number] = await self.ask(prompt, count)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
        return [answers[number] for number in range(len(prompts))]

    async def block_size(self) -> int:
        """Tokens in a block."""
        return int((await self.metrics())[BLOCK_SIZE])

    async def metrics(self) -> Metrics:
        status, text = await get(self.url, "/metrics")
        if status != 200:
            raise RequestFailed(f"/metrics: expected 200, got {status}")
        return parse_metrics(text)


class Prompts:
    """Random prompts: the same from the same seed, and no two alike."""

    def __init__(self, seed: str, vocab_size: int) -> None:
        self._source = random.Random(seed)
        self._first = min(NUM_UNUSUAL, vocab_size // 20)
        self._end = vocab_size

    def tokens(self, count: int) -> list[int]:
        return [self._source.randrange(self._first, self._end) for _ in range(count)]

    def prompts(self, count: int, length: int) -> list[Prompt]:
        return [self.tokens(length) for _ in range(count)]

    def lengths(
        self, count: int, *, median: float, mean: float, least: int, most: int
    ) -> list[int]:
        """Log-normal, as those of chats are; what lies outside is cut to the bounds."""
        mu, sigma = lognormal(median, mean)
        drawn = (self._source.lognormvariate(mu, sigma) for _ in range(count))
        return [min(max(round(length), least), most) for length in drawn]


def lognormal(median: float, mean: float) -> tuple[float, float]:
    """mu and sigma: the median is exp(mu), the mean exp(mu + sigma² / 2)."""
    return math.log(median), math.sqrt(2 * math.log(mean / median))


def answer_of(stream: Stream) -> list[list[int]]:
    """Token ids of all choices, in order."""
    return [stream.token_ids[choice] for choice in sorted(stream.token_ids)]
