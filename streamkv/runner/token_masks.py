"""Which tokens a row may get next: bits over the vocabulary, bit i % 32 of word i // 32.

Owns a row's masks and how they combine. Knows no logits and no board: numpy only. Invariant: what
masks leave is never nothing. They are applied from the strongest to the weakest (a grammar's, the
allowed tokens, bad words, the stop tokens while min_tokens aren't reached), and one that would
leave no token isn't applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol import RowSampling

Int32s = NDArray[np.int32]
Words = NDArray[np.uint32]


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


class TokenMasks(NamedTuple):
    """Of a row, fixed while it lives. Tokens that the vocabulary doesn't have are left out."""

    vocab_size: int
    allowed: Words | None  # None: any token is
    bad_words: tuple[tuple[int, ...], ...]
    stop_ids: Int32s
    min_tokens: int

    @classmethod
    def build(cls, sampling: RowSampling, vocab_size: int) -> TokenMasks | None:
        """None if it has none of its own. ValueError for bad words that are no words."""
        bad_words = tuple(
            word
            for word in _unpack_words(np.frombuffer(sampling.bad_words, np.int32).tolist())
            if 0 <= min(word) and max(word) < vocab_size
        )
        stop_ids = np.frombuffer(sampling.min_tokens_stop_ids, np.int32)
        masks = cls(
            vocab_size,
            _words_of(np.frombuffer(sampling.allowed_ids, np.int32), vocab_size)
            if sampling.allowed_ids
            else None,
            bad_words,
            _known(stop_ids, vocab_size),
            sampling.min_tokens,
        )
        has_some = sampling.allowed_ids or bad_words or sampling.min_tokens
        return masks if has_some or sampling.mask_slot >= 0 else None

    def allowed_next(self, output: Int32s, grammar: Words | None) -> Words | None:
        """What may follow these tokens of the output. None: anything."""
        bad_ends = self._bad_ends(output)
        is_short = len(output) < self.min_tokens and len(self.stop_ids) > 0
        if grammar is None and self.allowed is None and not bad_ends and not is_short:
            return None
        words = _words_of(np.arange(self.vocab_size), self.vocab_size)
        if grammar is not None:
            words = _kept(words, words & grammar)
        if self.allowed is not None:
            words = _kept(words, words & self.allowed)
        words = _kept(words, words & ~_words_of(np.array(bad_ends, np.int32), self.vocab_size))
        if is_short:
            words = _kept(words, words & ~_words_of(self.stop_ids, self.vocab_size))
        return words

    def _bad_ends(self, output: Int32s) -> list[int]:
        """The last tokens of the words whose others the output ends with."""
        longest = max(map(len, self.bad_words), default=0)
        ending = tuple(output[max(0, len(output) - longest) :].tolist())
        return [
            word[-1]
            for word in self.bad_words
            if len(word) == 1 or ending[-len(word) + 1 :] == word[:-1]
        ]


def _kept(words: Words, fewer: Words) -> Words:
    return fewer if fewer.any() else words


def _known(token_ids: NDArray[np.integer], vocab_size: int) -> Int32s:
    return token_ids[(token_ids >= 0) & (token_ids < vocab_size)].astype(np.int32)


def _words_of(token_ids: NDArray[np.integer], vocab_size: int) -> Words:
    bits = np.zeros(32 * num_mask_words(vocab_size), np.bool_)
    bits[_known(token_ids, vocab_size)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _unpack_words(packed: Sequence[int]) -> Iterator[tuple[int, ...]]:
    at = 0
    while at < len(packed):
        length, num_left = packed[at], len(packed) - at - 1
        if not 1 <= length <= num_left:
            raise ValueError(f"bad words: expected 1 to {num_left} tokens at {at}, got {length}")
        yield tuple(packed[at + 1 : at + 1 + length])
        at += 1 + length
