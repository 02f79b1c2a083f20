"""Log-probabilities in words: tokens' texts and bytes beside the device's packed numbers.

Knows one tokenizer, and no request. Invariant: of a token that the text skips the bytes are none.
"""

from __future__ import annotations

from collections.abc import Container

from ..protocol import RowLogprobs, unpack_ints
from ..text.tokenizer import Tokenizer
from .outputs import TokenLogprob, TopLogprob


class Describer:
    """For one request."""

    __slots__ = ("_num_top", "_skipped", "tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, num_top: int | None, *, skip_special_tokens: bool
    ) -> None:
        """`num_top`: of the most likely tokens, of which the device may have sent more."""
        self.tokenizer = tokenizer
        self._num_top = num_top
        self._skipped: Container[int] = tokenizer.special_token_ids if skip_special_tokens else ()

    def describe(self, token_id: int, piece: bytes, row: RowLogprobs) -> TokenLogprob:
        """A row's log-probabilities; `piece` is what the token adds to the text."""
        tokenizer = self.tokenizer
        top = []
        top_ids = unpack_ints(row.top_ids)[: self._num_top]
        for top_id, logprob in zip(
            top_ids, memoryview(row.top_logprobs).cast("f")[: len(top_ids)], strict=True
        ):
            adds = b"" if top_id in self._skipped else tokenizer.token_bytes(top_id)
            shown = piece if top_id == token_id else adds
            top.append(TopLogprob(top_id, tokenizer.token_text(top_id), shown, logprob))
        text = tokenizer.token_text(token_id)
        return TokenLogprob(token_id, text, piece, row.logprob, row.rank, tuple(top))
