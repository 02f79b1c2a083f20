"""BeamSearch: which continuations of one prompt live on, and which are answers.

Owns the beams' histories and scores. Must not know sequences, rows, blocks or text. Invariant:
the same log-probabilities give the answers of `generate(num_beams=width)` in transformers 5.24,
and the same scores, as sums are rounded to float32 like there; of equal scores, the better beam's
comes first, then the more likely token's. One beam is greedy, as it is there. (Only scores below
-1e9, which extreme penalties give, are nothing there.)
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from ..protocol import FinishReason, RowLogprobs, unpack_ints

_FLOAT32 = struct.Struct("f")


class Link:
    """The last token of a beam; what comes before it is shared with other beams."""

    __slots__ = ("_place", "_row", "parent")

    def __init__(self, parent: Link | None, row: RowLogprobs, place: int) -> None:
        self.parent = parent
        self._row = row  # the candidates it was chosen from
        self._place = place  # among them, 0 = most likely

    @property
    def token_id(self) -> int:
        token_id: int = memoryview(self._row.top_ids).cast("i")[self._place]
        return token_id

    @property
    def logprobs(self) -> RowLogprobs:
        row, place = self._row, self._place
        logprob = memoryview(row.top_logprobs).cast("f")[place]
        return RowLogprobs(logprob, place + 1, row.top_ids, row.top_logprobs)


class Hypothesis(NamedTuple):
    """An answer."""

    last: Link
    cumulative_logprob: float
    score: float  # cumulative_logprob / number of tokens ** length_penalty
    finish_reason: FinishReason

    def links(self) -> list[Link]:
        """Its tokens in order, the end token included."""
        links: list[Link] = []
        link: Link | None = self.last
        while link is not None:
            links.append(link)
            link = link.parent
        return links[::-1]


class BeamSearch:
    """Begins with one beam, the prompt; every `advance` adds a token to each."""

    __slots__ = (
        "_answers",
        "_beams",
        "_best_length",
        "_end_token_ids",
        "_length_penalty",
        "_max_output_tokens",
        "_num_output_tokens",
        "_num_return",
        "_stops_when_full",
        "_totals",
        "_width",
        "is_done",
    )

    def __init__(
        self,
        width: int,
        *,
        num_return: int,
        length_penalty: float,
        early_stopping: bool | str,
        end_token_ids: Collection[int],
        num_prompt_tokens: int,
        max_num_tokens: int,
    ) -> None:
        """`early_stopping`: with `width` answers True stops; False, if the best beam's score is
        no better than the worst answer's; "never", if it can't become so up to full length."""
        self._width = width
        self._num_return = num_return
        self._length_penalty = length_penalty
        self._end_token_ids = frozenset(end_token_ids)
        self._max_output_tokens = max_num_tokens - num_prompt_tokens
        self._num_output_tokens = 0  # of each beam
        never = early_stopping == "never"
        self._stops_when_full = width == 1 or (bool(early_stopping) and not never)
        self._best_length = self._max_output_tokens if never and length_penalty > 0.0 else None
        self._beams: list[Link | None] = [None]  # best first
        self._totals = [0.0]  # of the beams: the sum of their tokens' log-probabilities
        self._answers: list[Hypothesis] = []  # best first, at most `width`
        self.is_done = False

    def advance(self, candidates: Sequence[RowLogprobs]) -> list[tuple[int, int]]:
        """The next beams, best first, as (index of the beam it continues, token id); none once it
        is done. `candidates` has each beam's most likely tokens: `width` and as many more as there
        are end tokens are all that can matter. Fewer than `width` beams are next only if all
        candidates together are too few."""
        self._num_output_tokens += 1
        is_last = self._num_output_tokens == self._max_output_tokens
        ids = [unpack_ints(row.top_ids) for row in candidates]
        logprobs = [memoryview(row.top_logprobs).cast("f") for row in candidates]
        # The best continuation left of each beam: (-total, beam, place). Merged, best first.
        heap = [
            (-_round(total + values[0]), beam, 0)
            for beam, (total, values) in enumerate(zip(self._totals, logprobs, strict=True))
        ]
        heapify(heap)
        beams: list[Link | None] = []
        totals: list[float] = []
        chosen: list[tuple[int, int]] = []
        num_answers = len(self._answers)
        num_seen = 0
        while heap and len(chosen) < self._width:
            negative, beam, place = heap[0]
            token_id = ids[beam][place]
            is_end = token_id in self._end_token_ids
            if not (is_end or is_last):
                beams.append(Link(self._beams[beam], candidates[beam], place))
                totals.append(-negative)
                chosen.append((beam, token_id))
            elif num_seen < self._width:
                link = Link(self._beams[beam], candidates[beam], place)
                reason = FinishReason.STOP if is_end else FinishReason.LENGTH
                score = self._score(-negative, self._num_output_tokens)
                self._answers.append(Hypothesis(link, -negative, score, reason))
            num_seen += 1
            if is_last and num_seen == self._width:
                break
            place += 1
            if place < len(ids[beam]):
                total = _round(self._totals[beam] + logprobs[beam][place])
                heapreplace(heap, (-total, beam, place))
            else:
                heappop(heap)
        if len(self._answers) > num_answers:
            self._answers.sort(key=lambda answer: -answer.score)
            del self._answers[self._width :]
        self._beams, self._totals = beams, totals
        self.is_done = not chosen or self._cannot_improve()
        return [] if self.is_done else chosen

    def hypotheses(self) -> list[Hypothesis]:
        """The best answers so far, best first; `num_return` of them once it is done, or fewer if
        there are no more."""
        return self._answers[: self._num_return]

    def _cannot_improve(self) -> bool:
        if len(self._answers) < self._width:
            return False
        if self._stops_when_full:
            return True
        length = self._best_length or self._num_output_tokens
        return self._score(self._totals[0], length) <= self._answers[-1].score

    def _score(self, total: float, length: int) -> float:
        try:
            return _round(total / _round(length**self._length_penalty))
        except (OverflowError, ZeroDivisionError):  # the power is out of float32's range
            return -0.0 if self._length_penalty > 0.0 else float("-inf")


def _round(value: float) -> float:
    """To float32. What one operation gives on two of them in float64, then rounded, is what it
    gives in float32."""
    rounded: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    return rounded
