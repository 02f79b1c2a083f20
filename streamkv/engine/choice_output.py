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
MAX_DELTA_LOGPROBS of them.
"""

from __future__ import annotations

from collections.abc import Container

from ..core.scheduler import TokenEvent
from ..protocol import FinishReason, RowLogprobs, SamplingParams, unpack_ints
from ..text.detokenizer import Detokenizer
from ..text.stop import StopChecker
from ..text.tokenizer import Tokenizer
from .outputs import TokenDelta, TokenLogprob, TopLogprob


MAX_DELTA_LOGPROBS = 64


class ChoiceOutput:
    """Text state and mailbox slot of one choice."""

    __slots__ = (
        "_detokenizer",
        "_logprobs",
        "_min_tokens",
        "_pieces",
        "_show_stop",
        "_skipped",
        "_stop",
        "_texts",
        "_token_ids",
        "_tokenizer",
        "choice",
        "finish_reason",
        "num_tokens",
        "queued",
        "stop_reason",
    )

    def __init__(self, choice: int, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
        self.choice = choice
        self.num_tokens = 0
        self.queued = False  # in the mailbox, waiting for the reader
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._min_tokens = sampling.min_tokens
        self._show_stop = sampling.include_stop_str_in_output
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
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
        token_ids = tuple(self._token_ids[:num_tokens])
        del self._token_ids[:num_tokens]
        num_texts = num_tokens if self._token_ids else len(self._texts)
        delta = TokenDelta(
            self.choice,
            "".join(self._texts[:num_texts]),
            token_ids,
            tuple(
                self._describe(*item)
                for item in zip(
                    token_ids, self._pieces[:num_tokens], self._logprobs[:num_tokens], strict=True
                )
            )
            if self._logprobs
            else (),
            None if self._token_ids else self.finish_reason,
            None if self._token_ids else self.stop_reason,
        )
        for taken in (self._texts[:num_texts], self._pieces, self._logprobs):
            pass
        return delta
