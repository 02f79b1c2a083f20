"""What a reader is told of its prompt: how far it is computed, and its log-probabilities.

Owns what was told of one prompt and what of it was taken. It must not know the scheduler. Used on
the event-loop thread only, but for `describe` once all is there. Invariant: each position is taken
once, in order; its log-probabilities stay packed until they are described.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol import RowLogprobs, SamplingParams
from ..text.tokenizer import Tokenizer
from .describe import Describer
from .outputs import TokenDelta, TokenLogprob

MAX_DELTA_SCORES = 64


class PromptOutput:
    """Of one request."""

    __slots__ = (
        "_describer",
        "_is_scored",
        "_num_taken",
        "_scores",
        "_wants_progress",
        "has_news",
        "has_progress",
        "num_computed",
        "num_known",
        "token_ids",
        "wants_scores",
    )

    def __init__(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        *,
        wants_progress: bool,
    ) -> None:
        self.token_ids = token_ids
        self.num_computed = 0  # as far as was told
        self.num_known = 0  # positions whose scores have come; the first has none
        self.has_news = False  # `take` gives something
        self.has_progress = False
        self._is_scored = sampling.prompt_logprobs is not None
        self.wants_scores = self._is_scored  # to be taken
        self._wants_progress = wants_progress
        self._scores: list[RowLogprobs] = []
        self._num_taken = 0
        self._describer = Describer(tokenizer, sampling.prompt_logprobs, skip_special_tokens=False)

    def push(self, num_computed: int, scores: Sequence[RowLogprobs]) -> None:
        """A chunk of it is computed."""
        self._scores += scores
        self.num_computed = num_computed
        self.has_progress = self._wants_progress
        if self._is_scored:
            self.num_known = len(self._scores) + 1
        self._look()

    def complete(self) -> None:
        """All of it is computed: who isn't told of chunks knows now."""
        self.num_computed = len(self.token_ids)

    def take(self) -> TokenDelta | None:
        """Progress, or log-probabilities of some positions."""
        delta = None
        if self.has_progress:
            self.has_progress = False
            delta = TokenDelta(0, "", (), progress=(self.num_computed, len(self.token_ids)))
        elif self.has_news:
            start = self._num_taken
            self._num_taken = min(start + MAX_DELTA_SCORES, self.num_known)
            scores = self.describe(start, self._num_taken)
            delta = TokenDelta(0, "", (), prompt_logprobs=scores)
        self._look()
        return delta

    def skip_scores(self) -> None:
        """They are not to be taken, but described when somebody asks."""
        self.wants_scores = False
        self._look()

    def describe(self, start: int, stop: int) -> tuple[TokenLogprob | None, ...]:
        """Of these positions, as far as they are known; None of the first. Up to 20 us for each."""
        token_ids, tokenizer = self.token_ids, self._describer.tokenizer
        return tuple(
            None
            if index == 0
            else self._describer.describe(
                token_ids[index], tokenizer.token_bytes(token_ids[index]), self._scores[index - 1]
            )
            for index in range(*slice(start, stop).indices(self.num_known))
        )

    def _look(self) -> None:
        has_scores = self.wants_scores and self._num_taken < self.num_known
        self.has_news = self.has_progress or has_scores
