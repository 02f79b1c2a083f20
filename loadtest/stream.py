"""What one streamed request gave, and what many gave together.

Owns times and statistics; knows no transport. All times are seconds on the monotonic clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class RequestFailed(Exception):
    """The server refused or broke off a request."""


@dataclass
class Stream:
    """One request as its client saw it."""

    due_s: float  # when it was to be sent: in an open loop a late client is the server's delay too
    event_s: list[float] = field(default_factory=list)  # arrival of each event with text or tokens
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    token_ids: dict[int, list[int]] = field(default_factory=dict)  # by choice, if asked for

    @property
    def first_event_s(self) -> float:
        return self.event_s[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.event_s, self.event_s[1:], strict=False)]


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summarize(streams: Sequence[Stream], elapsed_s: float) -> dict[str, float]:
    """The figures of one round. `tokens_per_s` counts the whole round, prompts included."""
    first_ms = [1e3 * stream.first_event_s for stream in streams]
    gaps_ms = [1e3 * gap for stream in streams for gap in stream.gaps_s]
    return {
        "tokens_per_s": sum(stream.completion_tokens for stream in streams) / elapsed_s,
        "requests_per_s": len(streams) / elapsed_s,
        "ttft_p50_ms": percentile(first_ms, 0.5),
        "ttft_p99_ms": percentile(first_ms, 0.99),
        "itl_p50_ms": percentile(gaps_ms, 0.5),
        "itl_p99_ms": percentile(gaps_ms, 0.99),
        "request_p50_ms": percentile([1e3 * (s.end_s - s.due_s) for s in streams], 0.5),
        "prompt_tokens": statistics.median(stream.prompt_tokens for stream in streams),
        "cached_tokens": statistics.median(stream.cached_tokens for stream in streams),
    }


def rounded(value: Any) -> Any:
    """The same with numbers of no more digits than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value
