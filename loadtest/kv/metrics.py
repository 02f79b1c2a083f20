"""/metrics in Prometheus' text format: read, and sampled while something runs.

Invariant: a sum over samples counts each sample once, so it is an average over time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType

from ..stream import RequestFailed

PREFIX = "streamkv:"
BLOCKS_HELD = "kv_cache_blocks_held"
TOKENS_HELD = "kv_cache_tokens_held"
BLOCK_SIZE = "kv_cache_block_size"

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?$")


class Metrics(dict[str, float]):
    """By name, without the prefix; series of one name added up."""

    def __missing__(self, name: str) -> float:
        raise RequestFailed(
            f"/metrics: expected {PREFIX}{name}, which isn't there; is it a streamkv server with "
            "this version's metrics?"
        )


def parse_metrics(text: str) -> Metrics:
    metrics = Metrics()
    for line in text.splitlines():
        if found := _LINE.match(line):
            name = found[1].removeprefix(PREFIX)
            metrics[name] = metrics.get(name, 0.0) + float(found[2])
    return metrics


class Sampler:
    """Reads metrics again and again while it is entered; all of them are in `samples`."""

    def __init__(self, read: Callable[[], Awaitable[Metrics]], interval_s: float) -> None:
        self._read = read
        self._interval_s = interval_s
        self.samples: list[Metrics] = []

    async def __aenter__(self) -> Sampler:
        self._task = asyncio.create_task(self._sample())
        return self

    async def _sample(self) -> None:
        while True:
            self.samples.append(await self._read())
            await asyncio.sleep(self._interval_s)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task  # an error of a reading is an error here

    def peak(self, name: str) -> float:
        return max((sample[name] for sample in self.samples), default=0.0)

    def waste(self) -> list[float]:
        """Of each sample with blocks held: the share of their slots that hold no token."""
        return [
            1 - sample[TOKENS_HELD] / slots_held(sample)
            for sample in self.samples
            if sample[BLOCKS_HELD]
        ]

    def mean_waste(self) -> float:
        """Empty slots of all samples over slots of all samples."""
        held = sum(map(slots_held, self.samples))
        return 1 - sum(sample[TOKENS_HELD] for sample in self.samples) / held if held else 0.0


def slots_held(sample: Metrics) -> float:
    return sample[BLOCKS_HELD] * sample[BLOCK_SIZE]
