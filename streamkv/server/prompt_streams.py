"""The streams of one request's several prompts, as one.

Owns their merging. Knows nothing about how answers are written. Invariant: admitted all or none,
ended together, and never more than one delta in wait: the streams themselves merge what a slow
reader has not taken.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import NamedTuple

from ..engine.stream import Completion, TokenDelta, TokenStream


class PromptDelta(NamedTuple):
    prompt: int
    delta: TokenDelta


class PromptStreams:
    """The streams of all prompts as one: entered, left, cancelled and read together."""

    def __init__(self, sources: Sequence[AbstractAsyncContextManager[TokenStream]]) -> None:
        self._sources = sources
        self._stack = AsyncExitStack()
        self._pumps: list[asyncio.Task[None]] = []
        self.streams: list[TokenStream] = []

    async def __aenter__(self) -> PromptStreams:
        """Admit all prompts, or none."""
        async with AsyncExitStack() as stack:
            for source in self._sources:
                await asyncio.sleep(0)  # many prompts may be tokenized here: let others run
                self.streams.append(await stack.enter_async_context(source))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        await self._stack.aclose()

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    async def collect(
        self, take_logprobs: Callable[[int, TokenDelta], None]
    ) -> list[list[Completion]]:
        """Each prompt's choices, log-probabilities handed to `take_logprobs(prompt, delta)`. They
        run together; read one by one, since deltas merge."""
        return [
            await stream.collect(functools.partial(take_logprobs, prompt))
            for prompt, stream in enumerate(self.streams)
        ]

    async def deltas(self) -> AsyncIterator[PromptDelta]:
        """The deltas of all prompts as they come; the first error of any."""
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                yield PromptDelta(0, delta)
            return
        queue: asyncio.Queue[PromptDelta | Exception | None] = asyncio.Queue(maxsize=1)
        self._pumps = [
            asyncio.create_task(_pump(prompt, stream, queue))
            for prompt, stream in enumerate(self.streams)
        ]
        num_open = len(self._pumps)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item


async def _pump(
    prompt: int, stream: TokenStream, queue: asyncio.Queue[PromptDelta | Exception | None]
) -> None:
    try:
        async for delta in stream:
            await queue.put(PromptDelta(prompt, delta))
    except Exception as exc:
        await queue.put(exc)
    else:
        await queue.put(None)
