"""Detokenizer: a stream of token ids → text, O(1) per token.

Owns the bytes of a character that is not complete yet. Knows nothing about stop strings or
requests. Invariant: however the ids are split into pushes, the texts joined are the tokenizer's
decode of all of them (of a text that they go on with: what they add to it), less a character left
incomplete at the end; U+FFFD appears only for bytes that are no UTF-8.

vLLM's `spaces_between_special_tokens` has no meaning here: it is about tokenizers written in
Python, which put spaces around special tokens. Those of `tokenizers`, which all are here, put none.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from .tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One sequence's text. Owned by whoever owns the sequence."""

    __slots__ = (
        "_at_start",
        "_decoder",
        "_first_piece",
        "_is_whole",
        "_pieces",
        "_skipped",
        "_texts",
    )

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, after: int | None = None
    ) -> None:
        """`after` is the token before the stream's first. Unless it is a special one, the stream
        goes on with a text: SentencePiece's space before a first word is a space then."""
        self._pieces = tokenizer.pieces
        self._texts = tokenizer.shown_texts if skip_special_tokens else tokenizer.all_texts
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._first_piece = tokenizer.joining.first_piece
        self._decoder = _new_decoder(errors="replace")
        self._at_start = after is None or after in tokenizer.special_token_ids
        self._is_whole = not self._at_start  # no character waits for bytes, no text begins

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became complete with these tokens: whole characters only."""
        return "".join([self.add(token_id) for token_id in token_ids])

    def add(self, token_id: int) -> str:
        """The text that became complete with the next token."""
        if self._is_whole:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        return self._add(token_id)

    def piece(self, token_id: int) -> bytes:
        """What the next token adds to the byte stream: nothing if it is skipped, and less than
        the token says where it begins a text with a space that stands for none."""
        if token_id in self._skipped or not 0 <= token_id < len(self._pieces):
            return b""
        piece = self._pieces[token_id]
        if self._at_start and piece:
            piece = self._first_piece(piece)
            self._at_start = False
        return piece

    def decode(self, piece: bytes) -> str:
        """The text that became complete with the next bytes."""
        if self._is_whole and piece.isascii():
            return piece.decode("ascii")
        text = self._decoder.decode(piece)
        self._is_whole = not self._at_start and not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """The end of the stream: an incomplete character is dropped, so this is always empty."""
        self._decoder.reset()
        self._is_whole = not self._at_start
        return ""

    def _add(self, token_id: int) -> str:
        """`add`, a character at a time. What a token adds where no character is incomplete, if it
        leaves none so, is the same each time."""
        was_whole = self._is_whole
        text = self.decode(self.piece(token_id))
        if was_whole and self._is_whole:
            self._texts[token_id] = text
        return text
