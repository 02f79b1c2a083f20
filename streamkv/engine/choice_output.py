"""One choice on its way from tokens to text, and the one slot its reader has not taken yet.

Owns the choice's detokenizer and stop strings, its tokens and text, and how much of them was taken.
It must not know the scheduler, the device or asyncio. Used on the event-loop thread only.

Invariant: the joined text of all deltas is the decoded text of the tokens, up to the stop string
or the end token; text that a later token could turn into a stop string is never shown early. Nor
is a token's bytes beside its log-probability what the text doesn't show: the bytes of a token that
is skipped or ends the answer are none, and all of them joined and decoded are the text (where no
stop string cut it).

Log-probabilities stay packed, as the device sent them, until they are taken: 0.5 KB a token with
the 20 most likely ones, where describing them takes 3 KB and 20 us. A delta has at most
MAX_DELTA_LOGPROBS of them. What of them only the engine needed, to rank choices, isn't shown.
"""

from __future__ import annotations

from typing import TypeVar

from ..core.scheduler import TokenEvent
from ..protocol import FinishReason, RowLogprobs, SamplingParams
from ..text.detokenizer import Detokenizer
from ..text.stop import StopChecker
from ..text.tokenizer import Tokenizer
from .describe import Describer
from .outputs import SoFar, TokenDelta, TokenLogprob

MAX_DELTA_LOGPROBS = 64

T = TypeVar("T")


class ChoiceOutput:
    """Text state and mailbox slot of one choice."""

    __slots__ = (
        "_add_text",
        "_describer",
        "_detokenizer",
        "_logprobs",
        "_min_tokens",
        "_num_logprobs",
        "_num_taken",
        "_pieces",
        "_show_stop",
        "_stop",
        "_texts",
        "_token_ids",
        "choice",
        "cumulative_logprob",
        "finish_reason",
        "queued",
        "stop_reason",
    )

    def __init__(
        self,
        choice: int,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        *,
        after: int | None = None,
    ) -> None:
        self.choice = choice
        self.cumulative_logprob: float | None = None  # of the tokens so far, where it is known
        self.queued = False  # in the mailbox, waiting for the reader
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._min_tokens = sampling.min_tokens
        self._num_logprobs = sampling.logprobs
        self._show_stop = sampling.include_stop_str_in_output
        skip = sampling.skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, after=after)
        self._add_text = self._detokenizer.add
        self._describer = Describer(tokenizer, sampling.logprobs, skip_special_tokens=skip)
        self._stop: StopChecker | None = None
        if sampling.stop:
            self._stop = StopChecker(sampling.stop, include_stop_str_in_output=self._show_stop)
        # One of each per token, and at the end perhaps a text more. Kept after they were taken, to
        # say what came so far: next to a token's KV they are nothing. Texts are joined when taken:
        # a reader that never reads must not make appending quadratic.
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._num_taken = 0
        # Of those that were not taken, with `logprobs` only.
        self._logprobs: list[RowLogprobs] = []
        self._pieces: list[bytes] = []  # what the tokens add to the text

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def has_more(self) -> bool:
        """Whether `take` left something."""
        return self._num_taken < len(self._token_ids)

    def push(self, event: TokenEvent) -> None:
        """Take one sampled token; may set `finish_reason`, also by a stop string in the text."""
        _, token_id, logprobs, reason = event
        if logprobs is not None or reason is not None:
            self._push_all(event)
            return
        text = self._add_text(token_id)
        self._token_ids.append(token_id)
        self._texts.append(text if self._stop is None else self._shown(text, self._stop))

    def _push_all(self, event: TokenEvent) -> None:
        """A token with its log-probability, or the last one."""
        sequence, token_id, logprobs, reason = event
        ends_by_token = reason is FinishReason.STOP
        stop_token_id = sequence.stop_reason if ends_by_token else None
        piece = b""
        if not ends_by_token or (self._show_stop and stop_token_id is not None):
            piece = self._detokenizer.piece(token_id)
        self._token_ids.append(token_id)
        text = self._detokenizer.decode(piece)
        self._texts.append(text if self._stop is None else self._shown(text, self._stop))
        if logprobs is not None:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprobs.logprob
        if self._num_logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
            self._pieces.append(piece)
        if reason is not None:
            self.finish(reason, stop_token_id)

    def finish(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        """End the choice with what text was held back; nothing happens if it has ended."""
        if self.finish_reason is not None:
            return
        if self._stop is not None:
            self._texts.append(self._stop.flush())
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def take(self) -> TokenDelta:
        """What came since the last call, as one delta; all of it, unless `has_more` then."""
        start, token_ids = self._num_taken, self._token_ids
        if len(token_ids) == start + 1 and self.finish_reason is None and not self._logprobs:
            self._num_taken = start + 1  # a reader that keeps up
            return TokenDelta(self.choice, self._texts[start], (token_ids[start],))
        end = len(token_ids)
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._logprobs:
            end = min(end, start + MAX_DELTA_LOGPROBS)
            logprobs = self._take_logprobs(start, end)
        self._num_taken = end
        taken = tuple(token_ids[start:end])
        if end < len(token_ids):
            return TokenDelta(self.choice, "".join(self._texts[start:end]), taken, logprobs)
        # Text that was held back to the end comes after the last token's.
        text = "".join(self._texts[start:])
        if self.finish_reason is None:
            return TokenDelta(self.choice, text, taken, logprobs)
        return TokenDelta(
            self.choice,
            text,
            taken,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            self.cumulative_logprob,
        )

    def so_far(self) -> SoFar:
        """All there is, taken or not."""
        return SoFar(
            self.choice,
            "".join(self._texts),
            tuple(self._token_ids),
            self.finish_reason,
            self.stop_reason,
        )

    def _shown(self, text: str, stop: StopChecker) -> str:
        """What of the text may be shown now: not what is or may become a stop string.

        Stop strings count only in text that began after `min_tokens` tokens (as in vLLM).
        """
        if len(self._token_ids) > self._min_tokens:
            text = stop.push(text)
            if stop.matched is not None:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = stop.matched
        return text

    def _take_logprobs(self, start: int, end: int) -> tuple[TokenLogprob, ...]:
        num = end - start
        rows, pieces = _pop(self._logprobs, num), _pop(self._pieces, num)
        return tuple(map(self._describer.describe, self._token_ids[start:end], pieces, rows))


def _pop(items: list[T], num: int) -> list[T]:
    """Take the first `num` out of the list, or as many as there are."""
    first = items[:num]
    del items[:num]
    return first
