"""The token → bytes table: what each token adds to the byte stream.

Owns the reading of a `tokenizers` decoder into a table. Knows nothing about streams or UTF-8
characters. Invariant: for the ids of any text, the table's entries joined are the UTF-8 bytes of
`tokenizers`' own decode (up to the one leading space that `Joining.strip` names).
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
import tokenizers.decoders

from ..errors import ModelLoadError

MAX_VOCAB_SIZE = 1 << 22  # several times the largest there are; the table has an entry for each
SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character


class Strip(enum.Enum):
    """What a decoder removes at the very start of a text."""

    NOTHING = enum.auto()
    ONE_SPACE = enum.auto()  # the space SentencePiece put before the first word
    MARKS = enum.auto()  # every space mark of the first token (the Metaspace decoder)


class Joining(NamedTuple):
    """How tokens become text."""

    byte_level: bool  # GPT-2's alphabet: each character of a token is one byte
    byte_fallback: bool  # tokens "<0x00>" .. "<0xFF>" are bytes
    strip: Strip

    def first_piece(self, piece: bytes) -> bytes:
        """The bytes of a text's first token, which may lose its space."""
        if self.strip is Strip.ONE_SPACE:
            return piece.removeprefix(b" ")
        return piece.replace(b" ", b"") if self.strip is Strip.MARKS else piece


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's character → byte map: printable Latin-1 stands for itself, the 68 other bytes for
    U+0100, U+0101, … in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


def read_joining(decoder: tokenizers.decoders.Decoder | None) -> Joining:
    """What the decoder does, if it is one whose bytes are known. ModelLoadError otherwise."""
    if decoder is None:
        raise ModelLoadError(
            "tokenizer: expected a decoder, got none; only byte-level and SentencePiece BPE "
            "tokenizers are supported"
        )
    spec: dict[str, Any] = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    byte_level, marks, byte_fallback, strip = False, False, False, Strip.NOTHING
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
                marks = True
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strip = Strip.ONE_SPACE if start else strip
            case {"type": "Metaspace", "replacement": "\u2581"}:
                marks = True
                strip = strip if step.get("prepend_scheme") == "never" else Strip.MARKS
            case _:
                raise ModelLoadError(
                    f"tokenizer: decoder step {json.dumps(step)[:200]} is not supported; expected "
                    "a byte-level or SentencePiece BPE tokenizer"
                )
    if byte_level == marks:
        raise ModelLoadError(
            "tokenizer: expected a ByteLevel decoder or one that replaces the space mark, "
            f"got {[step['type'] for step in steps]}"
        )
    return Joining(byte_level, byte_fallback, strip)


def build_table(
    vocab: Mapping[str, int], added: Mapping[int, str], joining: Joining, size: int
) -> list[bytes]:
    """Bytes by token id, `size` entries; ids without a token add nothing.

    `vocab` is token → id, `added` id → the literal text of tokens matched outside the BPE.
    ModelLoadError if there would be more than MAX_VOCAB_SIZE.
    """
    if size > MAX_VOCAB_SIZE:
        raise ModelLoadError(
            f"tokenizer: expected token ids below {MAX_VOCAB_SIZE}, got {size - 1}"
        )
    table = [b""] * size
    alphabet = _byte_level_translation()
    for token, token_id in vocab.items():
        if joining.byte_level:
            table[token_id] = _byte_level_bytes(token, alphabet)
        else:
            table[token_id] = _marked_bytes(token, joining.byte_fallback)
    for token_id, text in added.items():
        # SentencePiece decoders replace the mark in added tokens too
        literal = text if joining.byte_level else text.replace(SPACE_MARK, " ")
        table[token_id] = literal.encode()
    return table


def _byte_level_translation() -> dict[int, int]:
    """For `str.translate`: the alphabet's characters become those of their bytes in Latin-1, other
    characters of Latin-1 one that isn't in it."""
    others = dict.fromkeys(range(256), ord(SPACE_MARK))
    return others | {ord(char): byte for char, byte in byte_level_alphabet().items()}


def _byte_level_bytes(token: str, translation: Mapping[int, int]) -> bytes:
    try:
        return token.translate(translation).encode("latin-1")
    except UnicodeEncodeError:  # a character outside the alphabet: the token is literal text
        return token.encode()


def _marked_bytes(token: str, byte_fallback: bool) -> bytes:
    if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:  # looks like a byte token, but isn't one: literal text
            pass
    return token.replace(SPACE_MARK, " ").encode()
