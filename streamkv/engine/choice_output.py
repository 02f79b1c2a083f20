"""One choice on its way from tokens to text, and the one slot its reader has not taken yet.

Owns the choice's detokenizer and stop strings, and the tokens and text since the last delta. It
must not know the scheduler, the device or asyncio. Used on the event-loop thread only.

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

from collections.abc import Container
from typing import TypeVar

from ..core.scheduler import TokenEvent
from ..protocol import FinishReason, RowLogprobs, SamplingParams, unpack_ints
from ..text.detokenizer import Detokenizer
from ..text.stop import StopChecker
from ..text.tokenizer import Tokenizer
from .outputs import TokenDelta, TokenLogprob, TopLogprob

MAX_DELTA_LOGPROBS = 64

T = TypeVar("T")


class ChoiceOutput:
    """Text state and mailbox slot of one choice."""

    __slots__ = (
        "_detokenizer",
        "_logprobs",
        "_min_tokens",
        "_num_logprobs",
        "_pieces",
        "_show_stop",
        "_skipped",
        "_stop",
        "_texts",
        "_token_ids",
        "_tokenizer",
        "choice",
        "cumulative_logprob",
        "finish_reason",
        "num_tokens",
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
        self.num_tokens = 0
        self.queued = False  # in the mailbox, waiting for the reader
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._min_tokens = sampling.min_tokens
        self._num_logprobs = sampling.logprobs
        self._show_stop = sampling.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens, after=after
        )
        self._stop: StopChecker | None = None
        if sampling.stop:
            self._stop = StopChecker(sampling.stop, include_stop_str_in_output=self._show_stop)
        self._skipped: Container[int] = (
            tokenizer.special_token_ids if sampling.skip_special_tokens else ()
        )
        # One of each per token. Texts are joined when taken: a reader that never reads must not
        # make appending quadratic.
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[RowLogprobs] = []
        self._pieces: list[bytes] = []  # what the tokens add to the text; with _logprobs only

    @property
    def has_more(self) -> bool:
        """Whether `take` left something."""
        return bool(self._token_ids)

    def push(self, event: TokenEvent) -> None:
        """Take one sampled token; may set `finish_reason`, also by a stop string in the text."""
        self.num_tokens += 1
        stop_token_id = event.sequence.stop_reason
        ends_by_token = event.finish_reason is FinishReason.STOP
        piece = b""
        if not ends_by_token or (self._show_stop and stop_token_id is not None):
            piece = self._detokenizer.piece(event.token_id)
        self._token_ids.append(event.token_id)
        self._texts.append(self._shown(self._detokenizer.decode(piece)))
        if event.logprobs is not None:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + event.logprobs.logprob
            if self._num_logprobs is not None:
                self._logprobs.append(event.logprobs)
                self._pieces.append(piece)
        if event.finish_reason is not None:
            self.finish(event.finish_reason, stop_token_id if ends_by_token else None)

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
        num_tokens = len(self._token_ids)
        if self._logprobs:
            num_tokens = min(num_tokens, MAX_DELTA_LOGPROBS)
        token_ids = _pop(self._token_ids, num_tokens)
        all_taken = not self._token_ids
        # Text that was held back to the end comes after the last token's.
        texts = _pop(self._texts, len(self._texts) if all_taken else num_tokens)
        pieces, logprobs = _pop(self._pieces, num_tokens), _pop(self._logprobs, num_tokens)
        return TokenDelta(
            self.choice,
            "".join(texts),
            tuple(token_ids),
            tuple(map(self._describe, token_ids, pieces, logprobs)),  # () without logprobs
            self.finish_reason if all_taken else None,
            self.stop_reason if all_taken else None,
            self.cumulative_logprob if all_taken and self.finish_reason is not None else None,
        )

    def _shown(self, text: str) -> str:
        """What of the text may be shown now: not what is or may become a stop string.

        Stop strings count only in text that began after `min_tokens` tokens (as in vLLM).
        """
        if self._stop is not None and self.num_tokens > self._min_tokens:
            text = self._stop.push(text)
            if self._stop.matched is not None:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = self._stop.matched
        return text

    def _describe(self, token_id: int, piece: bytes, logprobs: RowLogprobs) -> TokenLogprob:
        """A row's log-probabilities with the tokens' texts and bytes."""
        tokenizer = self._tokenizer
        top = []
        top_ids = unpack_ints(logprobs.top_ids)[: self._num_logprobs]
        for top_id, logprob in zip(
            top_ids, memoryview(logprobs.top_logprobs).cast("f")[: len(top_ids)], strict=True
        ):
            adds = b"" if top_id in self._skipped else tokenizer.token_bytes(top_id)
            shown = piece if top_id == token_id else adds
            top.append(TopLogprob(top_id, tokenizer.token_text(top_id), shown, logprob))
        text = tokenizer.token_text(token_id)
        return TokenLogprob(token_id, text, piece, logprobs.logprob, logprobs.rank, tuple(top))


def _pop(items: list[T], num: int) -> list[T]:
    """Take the first `num` out of the list, or as many as there are."""
    first = items[:num]
    del items[:num]
    return first
