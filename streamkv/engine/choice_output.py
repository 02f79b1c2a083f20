"""One choice on its way from tokens to text, and the one slot its reader has not taken yet.

Owns the choice's detokenizer and stop strings, and the tokens and text since the last delta. It
must not know the scheduler, the device or asyncio. Used on the event-loop thread only.

Invariant: the joined text of all deltas is the decoded text of the tokens, up to the stop string
or the end token; text that a later token could turn into a stop string is never shown early.
"""

from __future__ import annotations

from ..core.scheduler import TokenEvent
from ..protocol import FinishReason, RowLogprobs, SamplingParams, unpack_ints
from ..text.detokenizer import Detokenizer
from ..text.stop import StopChecker
from ..text.tokenizer import Tokenizer
from .outputs import TokenDelta, TokenLogprob, TopLogprob


class ChoiceOutput:
    """Text state and mailbox slot of one choice."""

    __slots__ = (
        "_detokenizer",
        "_logprobs",
        "_min_tokens",
        "_show_stop",
        "_stop",
        "_text",
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
        # Parts, joined when taken: a reader that never reads must not make appending quadratic.
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def push(self, event: TokenEvent) -> None:
        """Take one sampled token; may set `finish_reason`, also by a stop string in the text."""
        self.num_tokens += 1
        self._token_ids.append(event.token_id)
        if event.logprobs is not None:
            self._logprobs.append(_describe(self._tokenizer, event.token_id, event.logprobs))
        stop_token_id = event.sequence.stop_reason
        ends_by_token = event.finish_reason is FinishReason.STOP
        if not ends_by_token or (self._show_stop and stop_token_id is not None):
            self._show(self._detokenizer.push((event.token_id,)))
        if event.finish_reason is not None:
            self.finish(event.finish_reason, stop_token_id if ends_by_token else None)

    def finish(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        """End the choice with what text was held back; nothing happens if it has ended."""
        if self.finish_reason is not None:
            return
        if self._stop is not None:
            self._text.append(self._stop.flush())
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def take(self) -> TokenDelta:
        """All that came since the last call, as one delta; the slot is empty after."""
        delta = TokenDelta(
            self.choice,
            "".join(self._text),
            tuple(self._token_ids),
            tuple(self._logprobs),
            self.finish_reason,
            self.stop_reason,
        )
        self._text.clear()
        self._token_ids.clear()
        self._logprobs.clear()
        return delta

    def _show(self, text: str) -> None:
        """Append text, unless it is or may become a stop string.

        Stop strings count only in text that began after `min_tokens` tokens (as in vLLM).
        """
        if self._stop is not None and self.num_tokens > self._min_tokens:
            text = self._stop.push(text)
            if self._stop.matched is not None:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = self._stop.matched
        if text:
            self._text.append(text)


def _describe(tokenizer: Tokenizer, token_id: int, logprobs: RowLogprobs) -> TokenLogprob:
    """A row's log-probabilities with the tokens' texts and bytes."""
    top = tuple(
        TopLogprob(top_id, tokenizer.token_text(top_id), tokenizer.token_bytes(top_id), logprob)
        for top_id, logprob in zip(
            unpack_ints(logprobs.top_ids), memoryview(logprobs.top_logprobs).cast("f"), strict=True
        )
    )
    return TokenLogprob(
        token_id,
        tokenizer.token_text(token_id),
        tokenizer.token_bytes(token_id),
        logprobs.logprob,
        logprobs.rank,
        top,
    )
