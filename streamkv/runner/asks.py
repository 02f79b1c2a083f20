"""What rows ask of a step: a token, log-probabilities of their prompt's, or both.

Owns the meaning of an Ask: who gets a token, which tokens are scored, where their logits stand.
Knows no row state beyond what it is given: numpy only. Invariant: a step's rows of logits are those
of the rows that want a token, then those of the tokens that are scored, both in its order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol import MAX_SCORED, Ask

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


class Asking(NamedTuple):
    """Rows of a step that want a token, in `scheduled`'s order."""

    rows: Int32s  # [R]
    positions: Int32s  # [R] where the token will stand
    mask_slots: Int32s  # [R] of the board; -1 = none
    is_void: NDArray[np.bool_]  # [R] it is after a position that was deferred, and gets none

    @classmethod
    def none(cls) -> Asking:
        zero = np.zeros(0, np.int32)
        return cls(zero, zero, zero, np.zeros(0, np.bool_))

    def at(self, places: NDArray[np.integer]) -> Asking:
        return Asking(*(array[places] for array in self))


class Scoring(NamedTuple):
    """Tokens of prompts that a step scores, in `scheduled`'s order, then by position."""

    token_ids: Int32s  # [S]
    num_logprobs: Int64s  # [S]

    @classmethod
    def none(cls) -> Scoring:
        return cls(np.zeros(0, np.int32), np.zeros(0, np.int64))


class ScoredSpans(NamedTuple):
    """Of each scored token: its row's place in `scheduled`, and how far in the chunk it is that its
    logits are computed."""

    places: Int64s  # [S]
    offsets: Int64s  # [S]

    @classmethod
    def find(cls, scheduled: Int32s, num_prompt_tokens: Int64s) -> ScoredSpans:
        """`num_prompt_tokens` of each scheduled row."""
        _, starts, counts, asks = scheduled.T
        ends = np.minimum(starts + counts, num_prompt_tokens - 1)
        num_scored = np.where(asks & Ask.SCORE, np.maximum(ends - starts, 0), 0)
        firsts = np.cumsum(num_scored) - num_scored
        places = np.repeat(np.arange(len(scheduled)), num_scored)
        return cls(places, np.arange(len(places)) - np.repeat(firsts, num_scored))


def check_asks(scheduled: Int32s, num_prompt_logprobs: Int64s) -> None:
    """ValueError for what is no Ask, and for scores where `num_prompt_logprobs` is off."""
    rows, _, _, asks = scheduled.T
    wrong = np.flatnonzero((asks < 0) | (asks > Ask.SAMPLE | Ask.SCORE))
    if len(wrong):
        row, ask = rows[wrong[0]], asks[wrong[0]]
        raise ValueError(f"row {row}: expected to ask 0 to 3, got {ask}")
    wrong = np.flatnonzero((asks & Ask.SCORE != 0) & (num_prompt_logprobs < 0))
    if len(wrong):
        raise ValueError(
            f"row {rows[wrong[0]]} asks for scores: expected num_prompt_logprobs from 0, got -1"
        )


def check_num_scored(spans: ScoredSpans) -> None:
    if len(spans.places) > MAX_SCORED:
        raise ValueError(
            f"expected at most {MAX_SCORED} tokens of prompts to score in a step, got "
            f"{len(spans.places)}"
        )
