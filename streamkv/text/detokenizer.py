"""Detokenizer: a stream of token ids → text, O(1) per token.

Owns the bytes of a character that is not complete yet. Knows nothing about stop strings or
requests. Invariant: however the ids are split into pushes, the texts joined are the tokenizer's
decode of all of them (of a text that they go on with: what they add to it), less a character left
incomplete at the end; U+FFFD appears only for bytes that are no UTF-8.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from .tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One sequence's text. Owned by whoever owns the sequence."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, after: int | None = None
    ) -> None:
        """`after` is the token before the stream's first. Unless it is a special one, the stream
        goes on with a text: SentencePiece's space before a first word is a space then."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = _new_decoder(errors="replace")
        self._at_start = after is None or after in tokenizer.special_token_ids

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became complete with these tokens: whole characters only."""
        return self.decode(b"".join([self.piece(token_id) for token_id in token_ids]))

    def piece(self, token_id: int) -> bytes:
        """What the next token adds to the byte stream: nothing if it is skipped, and less than
        the token says where it begins a text with a space that stands for none."""
        if token_id in self._skipped:
            return b""
        piece = self._tokenizer.token_bytes(token_id)
        if self._at_start and piece:
            piece = self._tokenizer.joining.first_piece(piece)
            self._at_start = False
        return piece

    def decode(self, piece: bytes) -> str:
        """The text that became complete with the next bytes."""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """The end of the stream: an incomplete character is dropped, so this is always empty."""
        self._decoder.reset()
        return ""
