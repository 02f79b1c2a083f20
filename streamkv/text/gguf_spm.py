"""The SentencePiece BPE of a GGUF file (`tokenizer.ggml.model = llama`), built for `tokenizers`.

Owns how scores become merges and where a space is put before a text. Knows nothing about tokens
matched whole, but for how they are spelled. Invariant: a text has the tokens that SentencePiece
gives it, with bytes for what the vocabulary lacks.

SentencePiece puts a space before a text. Each stretch between tokens that are matched whole counts
as a text of its own: so Llama 2 and what was made of it were trained, and so their tokenizer.json
and llama.cpp have it. That goes for user-defined tokens too: converters call so what was added to a
tokenizer later. (SentencePiece's own, around which it puts spaces otherwise, they call normal.)
Mistral's vocabularies in which [INST] is one token are the exception: their templates write
the spaces themselves, and only what stands first in the prompt gets one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from ..errors import ModelLoadError
from .gguf_bpe import bpe
from .gguf_metadata import (
    OTHER_TOKENIZER,
    TokenType,
    Vocabulary,
    flag,
    read_merges,
    special_id,
    unexpected,
)
from .token_bytes import SPACE_MARK

_WRITES_SPACES = "[INST]"


def spell(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary with user-defined tokens as they stand in a text, spaces for marks."""
    tokens = [
        token.replace(SPACE_MARK, " ") if kind == TokenType.USER_DEFINED else token
        for token, kind in vocabulary.entries()
    ]
    return Vocabulary(tokens, vocabulary.types)


def build_spm(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Without the tokens that are matched whole. ModelLoadError."""
    if metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise ModelLoadError(
            "GGUF: expected a SentencePiece tokenizer that takes text as it stands, got one with "
            f"tokenizer.ggml.precompiled_charsmap; {OTHER_TOKENIZER}"
        )
    _check_marks(vocabulary)
    tokens, types = vocabulary
    unknown = special_id(metadata, "unknown", len(tokens))
    if unknown is None and TokenType.UNKNOWN in types:
        unknown = types.index(TokenType.UNKNOWN)
    backend = bpe(
        {t: i for i, t in enumerate(tokens) if types[i] != TokenType.UNUSED},
        _merges(metadata, vocabulary),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    _set_spaces(backend, metadata, vocabulary)
    return backend


def _check_marks(vocabulary: Vocabulary) -> None:
    """ModelLoadError where words end with their space. No key says so, but then no word begins
    with one."""
    normal = [
        token
        for token, kind in vocabulary.entries()
        if kind == TokenType.NORMAL and token.strip(SPACE_MARK)
    ]
    begins = any(token.startswith(SPACE_MARK) for token in normal)
    if not begins and any(token.endswith(SPACE_MARK) for token in normal):
        raise ModelLoadError(
            "GGUF: expected a SentencePiece tokenizer whose words begin with their space, got one "
            f"whose words end with it (treat_whitespace_as_suffix); {OTHER_TOKENIZER}"
        )


def _set_spaces(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], vocabulary: Vocabulary
) -> None:
    """How spaces are written: as marks, one more before a text, and taken off again."""
    has_prefix = flag(metadata, "add_space_prefix", True)
    steps: list[normalizers.Normalizer] = []
    if flag(metadata, "remove_extra_whitespaces", False):
        outer, inner = tokenizers.Regex(r"\A +| +\z"), tokenizers.Regex(" {2,}")
        steps += [normalizers.Replace(outer, ""), normalizers.Replace(inner, " ")]
    if has_prefix and (_WRITES_SPACES, TokenType.CONTROL) in vocabulary.entries():
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        steps += [normalizers.Prepend(SPACE_MARK)] if has_prefix else []
        steps.append(normalizers.Replace(" ", SPACE_MARK))
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    replace = decoders.Replace(SPACE_MARK, " ")
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *strip])


def _merges(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Those in the file, which come from the model's tokenizer.json; else by the tokens' scores.

    SentencePiece merges the neighbours that make the token with the best score. In a list that is
    all ways to make the best token, then all ways to make the next.
    """
    if metadata.get("tokenizer.ggml.merges"):
        return read_merges(metadata)
    scores = _scores(metadata, len(vocabulary.tokens))
    normal = {
        token: token_id
        for token_id, (token, kind) in enumerate(vocabulary.entries())
        if kind == TokenType.NORMAL
    }
    ranked = []
    for token, token_id in normal.items():
        for cut in range(1, len(token)):
            left = normal.get(token[:cut])
            if left is not None and (right := normal.get(token[cut:])) is not None:
                ranked.append((-scores[token_id], token_id, left, right))
    if len(ranked) > 1 and len({score for score, *_ in ranked}) == 1:
        raise unexpected("scores", "in the order of merges", "the same for all")
    tokens = vocabulary.tokens
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]


def _scores(metadata: Mapping[str, Any], num_tokens: int) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or set(map(type, scores)) - {int, float}:
        raise unexpected("scores", "a list of numbers", scores)
    if len(scores) != num_tokens:
        raise ModelLoadError(f"GGUF: expected {num_tokens} token scores, got {len(scores)}")
    return scores
