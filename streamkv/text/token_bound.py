"""How many tokens a text has at least, known from its length alone.

Owns the bound. Knows nothing about requests. Invariant: tokenizing never gives fewer tokens than
`TokenBound.min_num_tokens` says; where the tokenizer's rules allow no such promise, it says 0.

A text far beyond the context can so be refused in microseconds, where tokenizing it takes seconds.
The bound is loose: one token can stand for dozens of bytes, most stand for four.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models

from .token_bytes import Joining, byte_level_alphabet

# NFC makes UTF-8 shorter by at most 3.5 (U+1FBE U+0308 U+0301, 7 bytes, become U+0390, 2 bytes).
NFC_SHRINKS = 4.0
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})  # pre-tokenizers that drop nothing


class TokenBound(NamedTuple):
    """`bytes_per_token` bytes of text, those of `dropped` not counted, may become one token."""

    bytes_per_token: float  # infinite: no bound
    dropped: bytes  # that may become no token at all

    def min_num_tokens(self, text: str) -> int:
        """At least so many tokens has the text."""
        return int(len(text.encode().translate(None, self.dropped)) / self.bytes_per_token)


def read_bound(
    backend: tokenizers.Tokenizer,
    vocab: Collection[str],
    joining: Joining,
    pieces: Iterable[bytes],
) -> TokenBound:
    """The bound of a tokenizer with these tokens, which stand for these bytes."""
    model = backend.model
    added = backend.get_added_tokens_decoder().values()
    if (
        not isinstance(model, models.BPE)  # others may make one token of anything unknown
        or any(token.lstrip or token.rstrip for token in added)  # they swallow white space
        or not _keeps_all(backend.pre_tokenizer)
    ):
        return TokenBound(math.inf, b"")
    if joining.byte_level:
        alphabet = byte_level_alphabet()
        longest = max(map(len, pieces), default=0)
        dropped = bytes(byte for char, byte in alphabet.items() if char not in vocab)
    else:
        if not (model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256))):
            return TokenBound(math.inf, b"")
        longest = max((len(token.encode()) for token in vocab), default=0)  # marks are not spaces
        dropped = b""
    return TokenBound(max(longest, 1) * _shrinks(_state(backend.normalizer)), dropped)


def _state(part: Any) -> Mapping[str, Any] | None:
    """A normalizer or pre-tokenizer as tokenizer.json writes it."""
    return None if part is None else json.loads(part.__getstate__())


def _shrinks(state: Mapping[str, Any] | None) -> float:
    """How many bytes a normalizer may make one of."""
    match state:
        case None | {"type": "Prepend"}:
            return 1.0
        case {"type": "NFC"}:
            return NFC_SHRINKS
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if new:
            return max(len(old.encode()) / len(new.encode()), 1.0)
        case {"type": "Sequence", "normalizers": list(steps)}:
            return math.prod(map(_shrinks, steps))
        case _:
            return math.inf


def _keeps_all(pre_tokenizer: Any) -> bool:
    """Whether cutting a text into words leaves every character in one of them."""
    state = _state(pre_tokenizer)
    steps = [state] if state is None or state["type"] != "Sequence" else state["pretokenizers"]
    return all(
        step is None
        or step["type"] in _KEEPING
        or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in steps
    )
