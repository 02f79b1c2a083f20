"""Many cases by several clients at once, and what has to be true when they have gone.

Owns the order: each client takes the next few numbers. Invariant: when it returns, no connection
is left open.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..kv.metrics import parse_metrics
from ..sse_client import get
from .cases import make_case
from .http import Target
from .play import Fault, Player, make_fault

_BATCH = 24
_POLL_S = 0.05
_BUSY = ("num_requests_running", "num_requests_waiting", "kv_cache_blocks_held")


@dataclass
class Result:
    faults: list[Fault] = field(default_factory=list)
    num_played: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    unrest: str = ""  # what is wrong when all have gone; empty: nothing


async def run_cases(
    target: Target,
    seed: int,
    numbers: Sequence[int],
    *,
    concurrency: int,
    max_faults: int,
    careful_s: float = 0.0,
) -> Result:
    """`careful_s`: one after the other, and after each the server has so long to be at rest."""
    result = Result()
    left = iter(numbers)

    async def client() -> None:
        player = Player(target)
        try:
            while len(result.faults) < max_faults and (batch := _take(left, bool(careful_s))):
                cases = [make_case(seed, number, target) for number in batch]
                result.faults += await player.play(cases)
                result.num_played += len(cases)
                result.kinds.update(case.kind for case in cases)
                if careful_s and (unrest := await check_rest(target, careful_s)):
                    result.faults.append(make_fault(cases[0], unrest))
        finally:
            await player.close()
            result.outcomes += player.outcomes

    async with asyncio.TaskGroup() as group:
        for _ in range(1 if careful_s else concurrency):
            group.create_task(client())
    result.faults.sort()
    return result


def _take(left: Iterator[int], careful: bool) -> list[int]:
    return list(itertools.islice(left, 1 if careful else _BATCH))


async def check_rest(target: Target, limit_s: float) -> str:
    """What is wrong with a server that should be at rest; empty: nothing. It has some time."""
    status, text = await get(target.url, "/health")
    if status != 200:
        return f"/health: expected 200, got {status}: {text[:200]}"
    busy = {}
    for _ in range(max(int(limit_s / _POLL_S), 1)):
        status, text = await get(target.url, "/metrics")
        if status != 200:
            return f"/metrics: expected 200, got {status}: {text[:200]}"
        metrics = parse_metrics(text)
        busy = {name: metrics[name] for name in _BUSY if metrics[name]}
        if not busy:
            return ""
        await asyncio.sleep(_POLL_S)
    return f"expected nothing to run, wait or be held after {limit_s:g} s, got {json.dumps(busy)}"
