"""Figures of predictions: perplexity, and how far they are from a reference's.

Owns the arithmetic and the memory of what the reference predicted. Knows no model. Invariant:
every model is scored on the same tokens in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import StreamkvError

LogProbs = NDArray[np.float32]  # [tokens, vocabulary]
STEPS = 65535  # of a uint16
MOST_NATS = 709.0  # whose exponential a float has


def log_probs(logits: NDArray[np.float32]) -> LogProbs:
    """Of each row, which may be overwritten. NotFinite if a logit isn't a number."""
    highest = logits.max(axis=1, keepdims=True)
    if not np.isfinite(highest).all() or not np.isfinite(logits.min()):
        raise NotFinite("a logit isn't a finite number")
    logits -= highest
    totals = np.exp(logits).sum(axis=1, dtype=np.float64, keepdims=True)
    logits -= np.log(totals).astype(np.float32)
    return logits


class NotFinite(StreamkvError):
    """A model computed something that is no number."""


class _Packed(NamedTuple):
    codes: NDArray[np.uint16]  # [n, vocabulary]
    least: NDArray[np.float32]  # [n, 1]
    step: NDArray[np.float32]  # [n, 1]


class Predictions:
    """What the reference predicted, in the order of the tokens: log-probabilities, each row in
    65,536 even steps, which is a thousandth of a nat for any vocabulary."""

    def __init__(self) -> None:
        self._chunks: list[_Packed] = []

    def append(self, values: LogProbs) -> None:
        least, greatest = (edge(axis=1, keepdims=True) for edge in (values.min, values.max))
        step = np.maximum((greatest - least) / STEPS, np.finfo(np.float32).tiny)
        codes = np.rint((values - least) / step).astype(np.uint16)
        self._chunks.append(_Packed(codes, least, step))

    def chunk(self, index: int) -> LogProbs:
        """Of the `index`-th append; a distribution again, so rounding can't look like a loss."""
        codes, least, step = self._chunks[index]
        return log_probs(codes * step + least)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for chunk in self._chunks for array in chunk)


@dataclass
class Score:
    """Sums over predicted tokens, then figures. Without a reference those beside it are absent."""

    num_tokens: int = 0
    nats: float = 0.0  # minus the log-probability of the text
    kl_nats: float = 0.0  # of the reference's distribution to this one
    num_same_top: int = 0
    has_reference: bool = False
    continuations: NDArray[np.int32] | None = None  # [prompts, greedy tokens]
    _next_chunk: int = field(default=0, repr=False)

    def add(
        self, values: LogProbs, token_ids: Sequence[int], reference: Predictions | None
    ) -> None:
        """Predictions of `token_ids`, each row before its token was seen."""
        targets = np.asarray(token_ids)
        self.num_tokens += len(targets)
        self.nats -= float(values[np.arange(len(targets)), targets].sum(dtype=np.float64))
        if reference is not None:
            self.has_reference = True
            expected = reference.chunk(self._next_chunk)
            self._next_chunk += 1
            self.kl_nats += _kl(expected, values)
            self.num_same_top += int((expected.argmax(axis=1) == values.argmax(axis=1)).sum())

    @property
    def perplexity(self) -> float:
        return _exp(self.nats / self.num_tokens)

    def figures(self, reference: Score | None) -> dict[str, Any]:
        """By name; None where there is nothing to compare with."""
        found: dict[str, Any] = {"perplexity": self.perplexity}
        found["ratio"] = None
        if reference is not None:  # of logarithms: either perplexity may be infinite
            found["ratio"] = _exp(
                self.nats / self.num_tokens - reference.nats / reference.num_tokens
            )
        if self.has_reference:
            found["kl_nats"] = self.kl_nats / self.num_tokens
            found["same_top"] = self.num_same_top / self.num_tokens
        else:
            found |= {"kl_nats": None, "same_top": None}
        found["same_greedy"] = None
        if reference is not None and self.continuations is not None:
            assert reference.continuations is not None
            found["same_greedy"] = same_beginning(reference.continuations, self.continuations)
        return found


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < MOST_NATS else math.inf


def _kl(expected: LogProbs, got: LogProbs) -> float:
    """Summed over rows: how many nats more the text that `expected` draws costs under `got`."""
    return float((np.exp(expected) * (expected - got)).sum(dtype=np.float64))


def same_beginning(expected: NDArray[np.int32], got: NDArray[np.int32]) -> float:
    """The share of tokens before the first difference, over rows."""
    return float(np.logical_and.accumulate(expected == got, axis=1).mean())
